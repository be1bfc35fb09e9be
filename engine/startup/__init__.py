"""Starts an engine: loads the model, allocates memory and puts the parts together."""
