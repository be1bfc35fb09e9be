"""An engine whose kernels Triton cannot compile names them, and does not start."""

import pytest
import torch

from octavo.common.models.errors import ModelError
from octavo.engine.models.checks.self_check import SelfCheck
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build as startup
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDAOptions  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("interpreted: nothing is compiled", allow_module_level=True)


@pytest.fixture
def broken(monkeypatch):
    """Make Triton fail at a kernel as 3.6.0 does; other kernels do nothing."""

    def compile_(*_, **__):
        raise SystemError("returned NULL without setting an exception\nand more")

    def launch(kernel, *_, grid, warmup, **launched):
        if kernel.fn.__name__ == named:
            caches = {0: ({}, {}, GPUTarget("cuda", 90, 32), None, None)}
            monkeypatch.setattr(kernel, "device_caches", caches)
            monkeypatch.setattr(kernel, "compile", compile_, raising=False)
            monkeypatch.setattr(kernel, "ASTSource", lambda *_: None, raising=False)
            kernel._do_compile("", {}, 0, {}, CUDAOptions(), {}, warmup=False)
        if "out" in launched:
            launched["out"].zero_()

    named = "_write_kv_kernel"
    monkeypatch.setattr(JITFunction, "run", launch)


MESSAGE = (
    rf"Triton {triton.__version__} cannot compile the kernel _write_kv_kernel for .*cuda.*90.* "
    rf"beside torch 2\..* \(SystemError: returned NULL without setting an exception\)"
)


@pytest.mark.usefixtures("broken", "on_triton")
def test_a_kernel_that_does_not_compile_is_named(tiny_model):
    settings = EngineSettings(model=str(tiny_model), num_blocks=8, compile="off", swap_space=0)
    with pytest.raises(ModelError, match=MESSAGE):
        build(settings)


@pytest.mark.usefixtures("broken", "on_triton")
def test_so_it_is_if_only_the_warm_up_needs_it(tiny_model, monkeypatch):
    warm_up = startup.warm_up

    def as_on_a_gpu(*arguments):
        executor = warm_up(*arguments)
        executor.warm_up(128, 32)
        return executor

    monkeypatch.setattr(SelfCheck, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(startup, "warm_up", as_on_a_gpu)
    settings = EngineSettings(model=str(tiny_model), num_blocks=8, compile="off", swap_space=0)
    with pytest.raises(StartupError, match=MESSAGE) as raised:
        build(settings)
    assert "\n" not in str(raised.value)
    assert torch.__version__ in str(raised.value)
