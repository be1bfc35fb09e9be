"""Tenants: authentication, permissions and quotas."""
