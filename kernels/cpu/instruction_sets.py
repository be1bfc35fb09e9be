"""The instruction sets that wheels carry kernels for, and which of them this CPU has.

It imports nothing, as wheels are made with it too.
"""

from typing import NamedTuple


class InstructionSet(NamedTuple):
    """An instruction set of wheels' kernels.

    Attributes:
        name: The name that `octavo_isa` in isa.cpp returns.
        flags: Flags of the compiler, GCC 12 or later.
        needs: Instruction sets that a CPU must have, named as in /proc/cpuinfo.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _isa(name: str, flags: str, needs: str, base: InstructionSet | None = None) -> InstructionSet:
    """Return an instruction set that extends another one; a new -march replaces the other's."""
    added = tuple(flags.split())
    inherited = () if base is None else base.flags
    if any(flag.startswith("-march") for flag in added):
        inherited = ()
    return InstructionSet(
        name, inherited + added, frozenset(needs.split()) | (base.needs if base else frozenset())
    )


_AVX2 = _isa("avx2", "-march=x86-64-v3", "sse4_2 popcnt cx16 movbe avx avx2 bmi1 bmi2 f16c fma abm")
_AVX2_VNNI = _isa("avx2-vnni", "-mavxvnni", "avx_vnni", _AVX2)
_AVX512 = _isa("avx512", "-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl", _AVX2)
_AVX512_VNNI = _isa("avx512-vnni", "-mavx512vnni", "avx512_vnni", _AVX512)
_AVX512_BF16 = _isa("avx512-bf16", "-mavx512bf16", "avx512_bf16", _AVX512_VNNI)
_AMX = _isa(
    *("amx", "-mamx-tile -mamx-bf16 -mamx-int8", "amx_tile amx_bf16 amx_int8", _AVX512_BF16)
)
_NEON = _isa("neon", "-march=armv8-a", "asimd")
_NEON_DOTPROD = _isa(
    *("neon-dotprod", "-march=armv8.2-a+fp16+dotprod"),
    *("atomics asimdrdm crc32 fphp asimdhp asimddp", _NEON),
)
_NEON_BF16 = _isa(
    *("neon-bf16", "-march=armv8.2-a+fp16+dotprod+i8mm+bf16", "i8mm bf16", _NEON_DOTPROD)
)

INSTRUCTION_SETS = {
    "x86_64": (_AMX, _AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2_VNNI, _AVX2),
    "aarch64": (_NEON_BF16, _NEON_DOTPROD, _NEON),
}
"""Instruction sets by the machine's name, as `platform.machine` returns it; the best first."""


def supported_sets(machine: str, features: set[str]) -> list[InstructionSet]:
    """Return the instruction sets of wheels that a CPU has, the best first.

    Args:
        machine: The architecture, as `platform.machine` returns it.
        features: Linux's names of the CPU's instruction sets.
    """
    return [isa for isa in INSTRUCTION_SETS.get(machine, ()) if isa.needs <= features]
