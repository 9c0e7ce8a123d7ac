"""embedq worker."""
