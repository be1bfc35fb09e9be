"""A request in the router: validation, outputs, pacing."""
