"""LoRA adapters: read from peft's files, kept in memory, added to the layers of a model."""
