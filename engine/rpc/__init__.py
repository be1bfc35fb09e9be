"""The RPCs of an engine, and what carries results from its core to clients."""
