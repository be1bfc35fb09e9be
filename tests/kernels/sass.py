"""Reads the machine code of NVIDIA's GPUs, by the tools that Triton includes."""

import re
import subprocess
from pathlib import Path

import triton
from triton.compiler import CompiledKernel


def resources(made: CompiledKernel, path: Path) -> dict[str, int]:
    """Return a compiled kernel's registers, and its bytes of stack, where registers spill."""
    path.write_bytes(made.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    command = [tool, "--dump-resource-usage", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (re.search(rf"{name}:(\d+)", output) for name in ("REG", "STACK"))
    registers, stack = (int(each[1]) for each in found if each)
    return {"REG": registers, "STACK": stack}


def disassembled(path: Path) -> list[tuple[str, str]]:
    """Return a kernel's code, as pairs of a label and an instruction, one of them empty."""
    command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", str(path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    label_or_instruction = r"^(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.+?)\s*;"
    return re.findall(label_or_instruction, output, re.MULTILINE)


def first_loop(path: Path) -> list[str]:
    """Return the instructions of a kernel's first loop; in attention, tiles need no mask there."""
    instructions, loops = _loops(path)
    assert loops, "there is no loop"
    return instructions[loops[0].start : loops[0].stop]


def spills_in_loops(path: Path) -> list[str]:
    """Return the instructions of all loops that store or load spilled registers."""
    instructions, loops = _loops(path)
    repeated = sorted({i for loop in loops for i in loop})
    return [instructions[i] for i in repeated if instructions[i].startswith(("STL", "LDL"))]


def _loops(path: Path) -> tuple[list[str], list[range]]:
    """Return a kernel's instructions, and the ranges that branches repeat, by their ends."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for label, instruction in disassembled(path):
        if label:
            labels[label] = len(instructions)
            continue
        instructions.append(instruction)
        branch = re.match(r"BRA.*`\((\.L_\w+)\)", instruction)
        if branch and branch[1] in labels:
            loops.append(range(labels[branch[1]], len(instructions)))
    return instructions, loops
