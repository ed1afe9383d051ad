"""What administrators do with what tenants said: each deed is checked and written to the audit log first."""
