"""Ollama's API: a translation for the clients that speak it."""
