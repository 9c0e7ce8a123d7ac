"""What runs on GPUs only; imported when a model is loaded on one."""
