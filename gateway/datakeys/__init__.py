"""Keys of tenants and of their end users: what they seal is gone, in every copy of it, when the key is erased."""
