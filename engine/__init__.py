"""The engine: one model replica; it owns tokens and memory."""
