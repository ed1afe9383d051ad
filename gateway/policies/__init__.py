"""What tenants, projects and routes may say of how their requests are treated: plain values, known to every room."""
