"""Names kernels that Triton cannot compile."""

import sys
import traceback

import torch


def why_uncompiled(error: BaseException) -> str | None:
    """Return which kernel did not compile, for which target, and the versions; else None.

    Triton's own errors name no kernel: a pass that fails, an assembler that ends, a SystemError.
    """
    triton = sys.modules.get("triton")
    if triton is None:
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        kernel = frame.f_locals.get("self")
        is_compiling = frame.f_code.co_name == "_do_compile"
        if is_compiling and isinstance(kernel, triton.runtime.JITFunction):
            why = str(error).strip().partition("\n")[0]
            return (
                f"Triton {triton.__version__} cannot compile the kernel {kernel.fn.__name__} for"
                f" {frame.f_locals['target']} beside torch {torch.__version__}"
                f" ({type(error).__name__}: {why}): try other versions of both"
            )
    return None
