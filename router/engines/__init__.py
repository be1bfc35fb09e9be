"""Connections to engines: discovery, sessions, health."""
