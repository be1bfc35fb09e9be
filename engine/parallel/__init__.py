"""The ranks of an engine: processes that each hold a part of one model."""
