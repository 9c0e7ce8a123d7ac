"""embedq: queue-driven batch embedding."""
