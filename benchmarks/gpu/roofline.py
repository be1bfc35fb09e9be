"""Show what the kernels' loops issue beside what they read, by their machine code; no GPU needed.

    python -m benchmarks.gpu.roofline [--cases decode prefill ...]

Each kernel is compiled for an A100 and an H100. An iteration of its loop, or all of a kernel that
has none, takes a multiprocessor at least as many cycles as

- its four schedulers need to issue the instructions, one each a cycle;
- its busiest units need to execute them: "16 results a cycle" are two warps' in four cycles (CUDA
  C++ Programming Guide, "Throughput of Native Arithmetic Instructions");
- its matrix units need for the products (NVIDIA's white papers on both GPUs; products of single
  warps reach 63% of that on Hopper: Luo et al. 2024, arXiv:2402.13499, table VII);
- its share of the memory's bandwidth (data sheets), or of the L2 cache's where neighbours read the
  same keys (A100: white paper; H100: chipsandcheese.com, July 2023), needs for the bytes.

If all of these overlap, the slowest decides: that is one share of the limit. If the instructions
run while the products wait, as in a program alone on a multiprocessor, their cycles add up: that is
the other.
"""

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from triton.compiler import CompiledKernel

from octavo.kernels.gpu import Gpu
from tests.kernels.compiling import (
    A100,
    BF16,
    COMMON,
    E4M3,
    H100,
    LATENT,
    Shape,
    compile_attention,
    compile_experts,
    compile_linear,
    compile_write,
)
from tests.kernels.quantized_weights import random_weight
from tests.kernels.sass import disassembled, first_loop

SCHEDULERS, WARP = 4, 32


@dataclass(frozen=True)
class Machine:
    """Maximum rates of a multiprocessor, per cycle.

    Attributes:
        gpu: The GPU.
        memory: Bytes from memory.
        l2: Bytes from the L2 cache.
        products: Multiply-adds of bfloat16 in its matrix units.
        warp_share: Part of them that products of single warps reach.
        results: Results of other units, by their names.
    """

    gpu: Gpu
    memory: float
    l2: float
    products: int
    warp_share: float
    results: dict[str, int]


MACHINES = (
    Machine(
        A100,
        memory=2.039e12 / (108 * 1.41e9),
        l2=5120 / 108,
        products=1024,
        warp_share=1.0,
        results={"float": 64, "integer": 64, "special": 16, "shared": 32},
    ),
    Machine(
        H100,
        memory=3.35e12 / (132 * 1.755e9),
        l2=5.7e12 / (114 * 1.755e9),
        products=2048,
        warp_share=0.63,
        results={"float": 128, "integer": 64, "special": 16, "shared": 32},
    ),
)

UNITS = {
    "float": r"F(ADD|MUL|FMA)|H(ADD|MUL|FMA)2",
    "integer": r"I?MNMX|FMNMX|IADD|IMAD|LEA|LOP|SHF|I?SETP|[IF]SETP|SEL|PRMT|F2FP|PLOP|BFE|VIADD",
    "special": r"MUFU|[IF]2[IF]\b",
    "shared": r"LDS|STS|SHFL|LDGSTS|LDG|STG",
}
"""The instructions of units; all others are only issued."""
READS = r"LD(?:G|GSTS)\.E\S*?(?:\.(\d+|U8|U16))?(?:\.CONSTANT)?$"


@dataclass(frozen=True)
class Loop:
    """An iteration of a kernel's loop, or all of a kernel without one.

    Attributes:
        instructions: Number of instructions of a warp.
        products: Number of instructions for matrix units among them.
        read: Bytes that a program reads from memory.
        cycles: Cycles of a multiprocessor for a program, by what takes them.
    """

    instructions: int
    products: int
    read: int
    cycles: dict[str, float]

    @property
    def limit(self) -> str:
        """What the iteration cannot do without: "products" or "bytes", whichever takes longer."""
        return max(("products", "bytes"), key=lambda name: self.cycles[name])

    @property
    def overlapped(self) -> float:
        """The share of the limit if all that takes cycles overlaps."""
        return self.cycles[self.limit] / max(self.cycles.values())

    @property
    def alone(self) -> float:
        """The share of the limit if no instruction is issued while matrix units work."""
        own = max(value for name, value in self.cycles.items() if name not in {"products", "bytes"})
        taken = max(self.cycles["bytes"], self.cycles["products"] + own)
        return self.cycles[self.limit] / taken


def examine(code: list[str], machine: Machine, warps: int, *, from_l2: bool = False) -> Loop:
    """Return the counts of a program's instructions, and their cycles.

    Args:
        code: The instructions of a warp.
        machine: The multiprocessor.
        warps: The program's warps.
        from_l2: Whether neighbours read the same bytes, so that memory is read once for all.
    """
    counts: Counter[str] = Counter()
    multiplied = read = products = 0.0
    # Beside copies, plain loads are of numbers that a warp's threads share, as of blocks.
    copies = "LDGSTS" if any(each.startswith("LDGSTS") for each in code) else None
    for instruction in code:
        name = instruction.partition(" ")[0]
        if product := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):  # one for four warps
            products += 1
            multiplied += int(product[1]) * int(product[2]) * int(product[3]) / SCHEDULERS
        elif product := re.match(r"HMMA\.16(8)(\d+)", name):
            products += 1
            multiplied += 16 * 8 * int(product[2]) / machine.warp_share
        for unit, pattern in UNITS.items():
            counts[unit] += bool(re.match(pattern, name))
        if (loaded := re.match(READS, name)) and name.startswith(("LDGSTS", copies or "LDG")):
            read += WARP * _bytes_of(loaded[1])
    bandwidth = machine.l2 if from_l2 else machine.memory
    cycles = {unit: count * warps * WARP / machine.results[unit] for unit, count in counts.items()}
    cycles["issue"] = len(code) * warps / SCHEDULERS
    cycles["products"] = multiplied * warps / machine.products
    cycles["bytes"] = read * warps / bandwidth
    return Loop(len(code), int(products), int(read * warps), cycles)


def _bytes_of(width: str | None) -> int:
    if width in {"U8", "U16"}:
        return int(width[1:]) // 8
    return int(width or 32) // 8


@dataclass(frozen=True)
class Case:
    """A kernel to examine.

    Attributes:
        name: Its name.
        compile: Compiles it for a GPU.
        from_l2: See `examine`.
        loops: Whether it has a loop.
    """

    name: str
    compile: Callable[[Gpu], CompiledKernel]
    from_l2: bool = False
    loops: bool = True


def _attention(kind: str, shape: Shape) -> Callable[[Gpu], CompiledKernel]:
    return lambda gpu: compile_attention(gpu, kind, shape)[0]


def _linear(kind: str, group: int, rows: int) -> Callable[[Gpu], CompiledKernel]:
    weight = random_weight(kind, 64, 4096, group, torch.Generator().manual_seed(0))
    return lambda gpu: compile_linear(gpu, weight, rows)[0]


CASES = [
    Case("decode", _attention("decode", COMMON)),
    Case("decode, fp8 cache", _attention("decode", Shape(cache_dtype=E4M3))),
    Case("decode, latents", _attention("decode", LATENT)),
    Case("prefill", _attention("chunk", COMMON), from_l2=True),
    *(
        Case(f"int4, {rows} rows", _linear("nibbles", 128, rows), from_l2=rows > 64)
        for rows in (16, 64, 128, 256)
    ),
    Case("fp8, 16 rows", _linear("e4m3", 128, 16)),
    Case("experts, 1 row", lambda gpu: compile_experts(gpu, 1)[0]),
    Case("experts, 128 rows", lambda gpu: compile_experts(gpu, 128)[0], from_l2=True),
    Case("write", lambda gpu: compile_write(gpu, BF16), loops=False),
]


def examine_case(case: Case, machine: Machine, folder: Path) -> Loop:
    """Compile a kernel, and examine its loop."""
    made = case.compile(machine.gpu)
    path = folder / "cubin"
    path.write_bytes(made.asm["cubin"])
    if case.loops:
        code = first_loop(path)
    else:
        code = [instruction for _, instruction in disassembled(path) if instruction]
        code = code[: len(code) - code[::-1].index("EXIT")]  # jumps to itself follow
    return examine(code, machine, made.metadata.num_warps, from_l2=case.from_l2)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="NAME")
    chosen = parser.parse_args().cases
    table = Table("kernel", "GPU")
    titles = ("instructions", "products", "KiB", "issue", "busiest", "", "products", "bytes")
    for title in (*titles, "limit", "overlapped", "alone"):
        table.add_column(title, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        for case in CASES:
            for machine in MACHINES if case.name in chosen else ():
                if case.name.startswith("decode, fp8") and machine.gpu.e4m3 is None:
                    continue
                table.add_row(*_row(case.name, machine, examine_case(case, machine, Path(folder))))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    return 0


def _row(name: str, machine: Machine, loop: Loop) -> list[str]:
    unit = max(UNITS, key=lambda each: loop.cycles[each])
    shown = ("issue", unit, "products", "bytes")
    issue, busiest, products, read = (f"{loop.cycles[each]:.0f}" for each in shown)
    return [
        *(name, machine.gpu.name, str(loop.instructions), str(loop.products)),
        *(f"{loop.read / 1024:.1f}", issue, busiest, unit, products, read),
        *(loop.limit, f"{loop.overlapped:.0%}", f"{loop.alone:.0%}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
