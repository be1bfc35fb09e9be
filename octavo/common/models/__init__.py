"""Find a model's files: hub, directory, GGUF or the demo model."""
