"""Files and batches: POST /v1/files and /v1/batches, and what runs them."""
