"""An engine's RPCs, and the path of results from its core to clients."""
