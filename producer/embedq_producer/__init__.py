"""embedq producer."""
