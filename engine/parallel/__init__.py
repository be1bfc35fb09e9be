"""An engine's ranks: processes that each hold a part of one model."""
