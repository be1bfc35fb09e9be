"""The kernels on CPU: compiled C++ where there is a compiler, else plain PyTorch."""

from kernels.cpu.fallback import copy_blocks, paged_attention, swap_blocks, write_kv

__all__ = ["copy_blocks", "paged_attention", "swap_blocks", "write_kv"]
