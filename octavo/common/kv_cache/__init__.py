"""What routers and engines agree on about the KV cache: keys of prefixes, and groups of layers."""
