"""A request in the router: its parameters (`request`), progress (`state`) and limits."""
