"""Random quantized weights, in every layout of the kernels."""

import math
from functools import partial

import torch
from hypothesis import strategies as st

from octavo.kernels.quantized import Numbers, QuantizedWeight, make_e2m1, make_weight

KINDS = (
    *("nibbles", "points", "offsets", "nested", "bytes", "byte points", "nested bytes"),
    *("e4m3", "e2m1"),
)


def random_weight(
    kind: str, outputs: int, inputs: int, group: int, draw: torch.Generator
) -> QuantizedWeight:
    """Return a weight with values about as large as a model's."""
    group = min(inputs, group)
    groups = -(-inputs // group)
    of_groups = (outputs, groups)
    scale = (torch.rand(of_groups, generator=draw) + 0.5) / 8 / inputs**0.5

    def whole(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    nibbles = whole(0, 16, (outputs, inputs), torch.uint8)
    signed = whole(-128, 128, (outputs, inputs), torch.int8)
    noise = torch.randn(of_groups, generator=draw) / inputs**0.5
    in_nibbles = partial(make_weight, nibbles, group=group, numbers=Numbers.NIBBLES)
    in_bytes = partial(make_weight, signed, group=group, numbers=Numbers.BYTES)
    if kind == "nibbles":
        return in_nibbles(scale.half(), zero_point=8)
    if kind == "e2m1":
        exponents = whole(116, 124, (outputs, -(-inputs // 32)), torch.uint8)
        exponents[:, ::5] = 0  # the least value, a subnormal number
        exponents -= exponents.clamp(max=int(math.log2(inputs) / 2))
        made = make_e2m1(nibbles, exponents)
        assert made is not None
        return made
    if kind == "points":
        return in_nibbles(scale.bfloat16(), zero_points=whole(0, 17, of_groups, torch.int16))
    if kind == "offsets":
        return in_nibbles(scale, zero_point=8, offset=noise)
    if kind == "bytes":
        return in_bytes((scale / 16).half())
    if kind == "byte points":
        return in_bytes(scale / 16, zero_points=whole(-128, 129, of_groups, torch.int16))
    if kind == "e4m3":
        codes = (torch.randn((outputs, inputs), generator=draw) * 40).to(torch.float8_e4m3fn)
        codes[:, ::3] = (codes[:, ::3].float() / 20000).to(torch.float8_e4m3fn)  # subnormal ones
        return make_weight(codes, scale / 10, group=group, numbers=Numbers.E4M3)
    units = -(-groups // 8)
    of_groups = (outputs, units * 8)
    outer = ((torch.rand((outputs, units), generator=draw) + 0.5) / 1600 / inputs**0.5).half()
    if kind == "nested":
        scale, offset = (whole(0, 64, of_groups, torch.uint8) for _ in range(2))
        return in_nibbles(scale, offset=offset, outer=(outer, -outer))
    return in_bytes(whole(-128, 128, of_groups, torch.int8), outer=(outer / 8, None))


weights = st.builds(
    lambda kind, outputs, inputs, group, seed: random_weight(
        kind, outputs, inputs, group, torch.Generator().manual_seed(seed)
    ),
    kind=st.sampled_from(KINDS),
    outputs=st.integers(1, 150),
    inputs=st.integers(1, 700),
    group=st.sampled_from([16, 32, 48, 64, 128, 192, 1 << 20]),
    seed=st.integers(0, 999),
)


def moved(weight: QuantizedWeight, device: str | torch.device) -> QuantizedWeight:
    """Return a weight with its tensors on another device."""
    return QuantizedWeight(
        *(own.to(device) if isinstance(own, torch.Tensor) else own for own in weight)
    )
