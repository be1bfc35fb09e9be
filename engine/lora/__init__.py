"""LoRA adapters: read from peft's files, kept in memory, and applied to a model's layers."""
