"""A GGUF file's blocks in a traced step."""

import pytest

from octavo.common.models.cache import cache_dir
from tests.engine.compilation.engines import check_equal
from tests.engine.models.quantization.formats.test_gguf import q4_k_m, write


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float32", 1e-3)])
def test_traced_is_eager(dtype, tolerance, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    file = write(tmp_path / "tiny.gguf", "qwen2", q4_k_m)
    check_equal(file, dtype, tolerance=tolerance)
