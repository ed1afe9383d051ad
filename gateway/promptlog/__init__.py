"""What was said: written for tenants that want it, sealed by keys of their own, read again and erased."""
