"""embedq gateway."""
