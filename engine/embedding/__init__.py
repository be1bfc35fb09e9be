"""Models that embed texts: encoders, and decoders whose checkpoints say how they pool."""
