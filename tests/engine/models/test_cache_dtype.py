"""The KV cache's dtype, and the scales that fit keys and values into its range."""

import pytest
import torch

from octavo.engine.models.dtypes import choose_cache_dtype
from octavo.engine.models.kv_scales import measure_kv_scales
from octavo.engine.models.load_model import load
from octavo.kernels import gpu
from octavo.kernels.gpu import Gpu


@pytest.mark.parametrize(
    ("name", "arch", "dtype"),
    [
        ("auto", "gfx942", torch.bfloat16),
        ("fp8_e5m2", "gfx942", torch.float8_e5m2),
        ("fp8_e4m3", "gfx942", torch.float8_e4m3fnuz),
        ("fp8_e4m3", "gfx950", torch.float8_e4m3fn),
        ("fp8_e4m3", "sm_90", torch.float8_e4m3fn),
    ],
)
def test_e4m3_is_the_devices_own(name, arch, dtype, monkeypatch):
    monkeypatch.setattr(gpu, "describe_gpu", lambda _: Gpu("any", arch, 64, 65_536, 1))
    device = torch.device("cuda")
    assert choose_cache_dtype(name, torch.bfloat16, device) == dtype


def test_scales_fit_the_range_of_the_type(tiny_model):
    loaded = load(str(tiny_model), dtype="float32", device="cpu", block_size=16)
    wide, narrow = (
        measure_kv_scales(loaded.model, loaded.shape, str(tiny_model), dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    )
    for pair, other in zip(wide, narrow, strict=True):
        assert [scale * 448 for scale in pair] == pytest.approx([scale * 240 for scale in other])
