"""embedq broker."""
