"""Holds all peers to one level of instructions, so that one CPU can speak for others."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.peers.environments import Environment

NATIVE_BUILD = "-DGGML_NATIVE=ON"
"""How what is built from source is told to use all that this CPU has."""


@dataclass(frozen=True, slots=True)
class Isa:
    """A level of instructions.

    Attributes:
        name: on the command line.
        needs: Linux's names of what the CPU must have.
        variables: for each worker. They hold Octavo's kernels, PyTorch, and oneDNN, which OpenVINO
            has too.
        build: CMake's arguments instead of `NATIVE_BUILD`.
    """

    name: str
    needs: frozenset[str] = frozenset()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    build: str = NATIVE_BUILD

    @property
    def is_native(self) -> bool:
        """Whether it holds nothing back."""
        return not self.variables

    def hold(self, environment: Environment) -> Environment:
        """Return an environment whose compiled code is held to it too."""
        built = {
            name: value.replace(NATIVE_BUILD, self.build)
            for name, value in environment.variables.items()
        }
        if built == dict(environment.variables):
            return environment
        name = f"{environment.name}-{self.name}"
        return dataclasses.replace(environment, name=name, variables=built)


_AVX2 = "-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
NATIVE = Isa("native")
ISAS = {
    isa.name: isa
    for isa in (
        NATIVE,
        Isa(
            "avx2",
            frozenset({"avx2", "fma", "f16c", "bmi2"}),
            {
                "OCTAVO_MARCH": "x86-64-v3",
                "ATEN_CPU_CAPABILITY": "avx2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
            },
            _AVX2,
        ),
        Isa(
            "avx512",
            frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
            {
                "OCTAVO_MARCH": "x86-64-v4",
                "ATEN_CPU_CAPABILITY": "avx512",
                "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            },
            f"{_AVX2} -DGGML_AVX512=ON",
        ),
    )
}
