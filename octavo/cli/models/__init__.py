"""Several models under one router, loaded on demand."""
