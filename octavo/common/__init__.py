"""Code that the router and the engine share."""
