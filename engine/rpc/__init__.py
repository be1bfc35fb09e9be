"""The RPCs of an engine, and the path of results from its core to clients."""
