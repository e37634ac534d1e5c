"""What a model does and what it costs."""
