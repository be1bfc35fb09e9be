"""The tier of the KV cache below swap space: blocks in files, which outlive the engine."""
