"""Properties of GPUs, derived from PyTorch's for NVIDIA and AMD."""

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from octavo.kernels import ops
from octavo.kernels.gpu import INTERPRETER, Gpu, describe_gpu, e4m3_dtype

KIB = 1024
DEVICE = torch.device("cuda", 0)
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "warp_size": 32,
    "multi_processor_count": 132,
    "shared_memory_per_block": 48 * KIB,
    "shared_memory_per_block_optin": 227 * KIB,
}
MI300X = {
    "name": "AMD Instinct MI300X",
    "major": 9,
    "minor": 4,
    "gcnArchName": "gfx942:sramecc+:xnack-",
    "warp_size": 64,
    "multi_processor_count": 304,
    "shared_memory_per_block": 64 * KIB,
}


@pytest.fixture
def there_is(monkeypatch):
    """Make PyTorch report a GPU with these properties."""

    def put(properties, **changes):
        found = SimpleNamespace(**(properties | changes))
        hip = "7.0" if hasattr(found, "gcnArchName") else None
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)

    describe_gpu.cache_clear()
    yield put
    describe_gpu.cache_clear()


def test_an_nvidia_gpu(there_is):
    there_is(H100)
    gpu = describe_gpu(DEVICE)
    assert gpu == Gpu("NVIDIA H100 80GB HBM3", "sm_90", 32, 227 * KIB, 132)
    assert not gpu.is_amd
    assert gpu.capability == (9, 0)
    assert gpu.multiplies_in_place


def test_an_amd_gpu_is_not_taken_for_nvidias_of_the_same_capability(there_is):
    there_is(MI300X)
    gpu = describe_gpu(DEVICE)
    assert gpu == Gpu("AMD Instinct MI300X", "gfx942", 64, 64 * KIB, 304)
    assert gpu.is_amd
    assert gpu.capability == (0, 0)
    assert not gpu.multiplies_in_place


def test_the_interpreter_stands_for_a_gpu():
    assert describe_gpu(torch.device("cpu")) is INTERPRETER


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_86", None),
        ("sm_89", torch.float8_e4m3fn),
        ("sm_120", torch.float8_e4m3fn),
        ("gfx90a", None),
        ("gfx942", torch.float8_e4m3fnuz),
        ("gfx950", torch.float8_e4m3fn),
        ("gfx1100", None),
        ("gfx1201", None),
    ],
)
def test_each_gpu_has_its_own_e4m3(arch, dtype):
    assert Gpu("any", arch, 32, 64 * KIB, 1).e4m3 == dtype


def test_the_largest_number_is_that_of_the_devices_own_e4m3(there_is):
    there_is(MI300X)
    assert torch.finfo(e4m3_dtype(DEVICE)).max == 240
    assert torch.finfo(e4m3_dtype(torch.device("cpu"))).max == 448


@pytest.mark.parametrize(
    ("properties", "changes", "cache_dtype", "message"),
    [
        (H100, {"major": 7, "minor": 5}, None, r"capability 8\.0 or .* has 7\.5: use a CPU"),
        (H100, {"major": 8, "minor": 6}, torch.float8_e4m3fn, "on sm_86: use fp8_e5m2"),
        (H100, {"major": 8, "minor": 6}, torch.float8_e5m2, None),
        (H100, {"major": 12, "minor": 0}, torch.float8_e4m3fn, None),
        (H100, {"major": 10, "minor": 0}, None, None),
        (H100, {"major": 10, "minor": 3}, None, r"products for B300 .* wrongly"),
        (MI300X, {}, torch.float8_e4m3fnuz, None),
        (MI300X, {}, torch.float8_e4m3fn, "on gfx942: use fp8_e5m2"),
        (MI300X, {}, torch.float8_e5m2, None),
        (MI300X, {"gcnArchName": "gfx1100"}, None, None),
        (MI300X, {"gcnArchName": "gfx1100"}, torch.float8_e4m3fn, "on gfx1100: use fp8_e5m2"),
        (MI300X, {"gcnArchName": "gfx1030"}, None, "gfx12, but this one is gfx1030: use a CPU"),
    ],
)
def test_a_gpu_that_cannot_run_the_kernels_is_refused(
    there_is, properties, changes, cache_dtype, message
):
    pytest.importorskip("triton")
    there_is(properties, **changes)
    model = {"num_heads": 9, "num_kv_heads": 3, "key_dim": 64, "value_dim": 64}
    model["dtype"] = torch.bfloat16
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        ops.check_supported(**model, block_size=16, device=DEVICE, cache_dtype=cache_dtype)


@pytest.mark.parametrize(
    ("minor", "version", "has"), [(9, (2, 11), False), (9, (2, 12), True), (6, (2, 12), False)]
)
def test_products_in_fp8_that_ignore_the_stream_are_not_used(
    there_is, monkeypatch, minor, version, has
):
    pytest.importorskip("triton")
    there_is(H100, major=8, minor=minor)
    products = import_module("octavo.kernels.triton.fp8_linear")
    product = torch.full((16, 16), 96.0)
    monkeypatch.setattr(products, "TORCH", version)
    monkeypatch.setattr(products, "multiply", lambda *_: product)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: product)
    products.has_fp8_products.cache_clear()
    assert products.has_fp8_products(DEVICE, torch.bfloat16) == has
    products.has_fp8_products.cache_clear()
