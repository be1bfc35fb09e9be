"""The imports of a CPU engine's process."""

import subprocess
import sys

START = """
import sys
from octavo.engine.without_compiler import keep_compiler_out
keep_compiler_out()
import octavo.engine.server
import octavo.engine.models.load_model
"""
UNUSED = "scipy", "torch._inductor", "torch._dynamo.utils", "torch.distributed.tensor._ops"


def imported(code: str) -> str:
    """Run the startup's imports and some code in a new process; return its output."""
    command = [sys.executable, "-c", START + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_cpu_engine_imports_no_compiler_but_it_is_there_when_it_is_used():
    found = imported(
        f"print([name for name in {UNUSED} if name in sys.modules])\n"
        "import torch, scipy\n"
        "from transformers import AttentionInterface\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "print(double(torch.ones(2)).tolist(), torch._dynamo.config.cache_size_limit > 0)\n"
        "from torch.distributed.tensor import DTensor, Shard\n"
        "print(torch.distributed.is_available(), Shard.__name__)\n"
    )
    assert found.splitlines() == ["[]", "[2.0, 2.0] True", "True Shard"]
