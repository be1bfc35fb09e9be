"""Quantizes and packs weights by each format's specification, without Octavo's code.

Each function takes a float32 weight `[outputs, inputs]` and returns the layer's tensors by name
suffix, and their dequantized weight.
"""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def to_words(columns, bits):
    """Pack lists of tensors into int32, the first in the low bits."""
    word = sum(column.long() << (bits * place) for place, column in enumerate(columns))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def round_groups(weight, bits, size, *, symmetric, least_zero=0):
    """Return codes `[outputs, inputs]`, scales and zeros `[outputs, groups]`."""
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, -1, inputs if size == -1 else size)
    most = 2**bits - 1
    if symmetric:
        scale = (groups.abs().amax(-1) / (most // 2)).half().float()
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scale = ((high - low) / most).half().float()
        zero = (-low / scale).round().clamp(least_zero, most)
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, most)
    values = (codes - zero[..., None]) * scale[..., None]
    return codes.reshape(outputs, inputs), scale, zero, values.reshape(outputs, inputs)


def gptq(weight, bits=4, size=64, *, symmetric=False, act_order=False, version=1):
    inputs, per_word = weight.shape[1], 32 // bits
    # Activation order: a group's inputs may be anywhere.
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator) if act_order else torch.arange(inputs)
    # Version 1 stores the zero minus one.
    codes, scale, zero, values = round_groups(
        weight[:, order], bits, size, symmetric=symmetric, least_zero=1
    )
    back = order.argsort()
    codes, values = codes[:, back], values[:, back]
    stored = zero.t() - (1 if version == 1 else 0)
    tensors = {
        "qweight": to_words([codes.t()[place::per_word] for place in range(per_word)], bits),
        "qzeros": to_words([stored[:, place::per_word] for place in range(per_word)], bits),
        "scales": scale.t().half().contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs if size == -1 else size))[back].int(),
    }
    return tensors, values


def awq(weight, size=64):
    codes, scale, zero, values = round_groups(weight, 4, size, symmetric=False)

    def words(numbers):
        return to_words([numbers[:, output::8] for output in AWQ_ORDER], 4)

    tensors = {
        "qweight": words(codes.t()),
        "qzeros": words(zero.t()),
        "scales": scale.t().half().contiguous(),
    }
    return tensors, values


def packed(weight, bits=4, size=64, *, symmetric=True, act_order=False):
    """compressed-tensors' pack-quantized."""
    inputs, per_word = weight.shape[1], 32 // bits
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator) if act_order else torch.arange(inputs)
    codes, scale, zero, values = round_groups(weight[:, order], bits, size, symmetric=symmetric)
    back = order.argsort()
    codes, values = codes[:, back], values[:, back]
    tensors = {
        "weight_packed": to_words([codes[:, place::per_word] for place in range(per_word)], bits),
        "weight_scale": scale.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = to_words(
            [zero[place::per_word] for place in range(per_word)], bits
        )
    if act_order:
        tensors["weight_g_idx"] = (torch.arange(inputs) // size)[back].int()
    return tensors, values


def int8(weight):
    """compressed-tensors' int-quantized, with a scale per output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8(weight, *, by="channel"):
    """compressed-tensors' float-quantized."""
    peak = weight.abs().amax(1, keepdim=True) if by == "channel" else weight.abs().max()[None]
    scale = peak / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def fp8_blocks(weight, size=48):
    """Use blocks that do not divide the weight."""
    outputs, inputs = weight.shape
    rows, columns = torch.arange(outputs) // size, torch.arange(inputs) // size
    scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            scale[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    spread = scale[rows][:, columns]
    numbers = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scale}, numbers.float() * spread


def mxfp4(weight):
    """Pack weights `[experts, outputs, inputs]`."""
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    levels = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (groups[..., None] / 2.0 ** exponent[..., None, None] - levels).abs().argmin(-1)
    values = (levels[codes] * 2.0 ** exponent[..., None]).flatten(-2)
    tensors = {
        "blocks": (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "scales": (exponent + 127).to(torch.uint8),
    }
    return tensors, values
