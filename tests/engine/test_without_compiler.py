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
UNUSED = (
    "scipy",
    "sympy.core",
    "torch._inductor",
    "torch._dynamo.utils",
    "torch.distributed.tensor._ops",
    "transformers.models.bloom.modeling_bloom",
)


def imported(code: str) -> str:
    """Run the startup's imports and some code in a new process; return its output."""
    command = [sys.executable, "-c", START + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_cpu_engine_imports_no_compiler_but_it_is_there_when_it_is_used():
    found = imported(
        "import torch\n"
        "from transformers.models.llama import LlamaConfig\n"
        "from octavo.engine.models.empty_model import make_on_meta\n"
        "model = make_on_meta(LlamaConfig(hidden_size=64, num_hidden_layers=1), torch.float32)\n"
        "model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device='meta'))\n"
        f"print([name for name in {UNUSED} if name in sys.modules])\n"
        "print(type(sys.modules['transformers']).__name__)\n"
        "from transformers import BertConfig\n"
        "import scipy, sympy, transformers\n"
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv\n"
        "print(sympy.sqrt(4), ShapeEnv.__name__, transformers.models.gpt2.GPT2Config.model_type,"
        " BertConfig.model_type, transformers.LlamaConfig is LlamaConfig)\n"
        "from transformers import AttentionInterface\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "print(double(torch.ones(2)).tolist(), torch._dynamo.config.cache_size_limit > 0)\n"
        "from torch.distributed.tensor import DTensor, Shard\n"
        "print(torch.distributed.is_available(), Shard.__name__)\n"
    )
    assert found.splitlines() == [
        "[]",
        "_Placeholder",
        "2 ShapeEnv gpt2 bert True",
        "[2.0, 2.0] True",
        "True Shard",
    ]
