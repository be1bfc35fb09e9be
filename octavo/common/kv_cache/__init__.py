"""KV-cache definitions that routers and engines share: prefix keys and layer groups."""
