"""A request in the router: what was asked (`request`), its progress (`state`), its limits."""
