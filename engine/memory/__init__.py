"""The KV cache's tensors on the device and in swap space, and copies between them."""
