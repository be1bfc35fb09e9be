"""The tensors of the KV cache, on the device and in swap space, and copies between them."""
