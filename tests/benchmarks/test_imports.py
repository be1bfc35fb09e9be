"""All benchmarks can be imported; nothing else runs many of them."""

import importlib
import pkgutil

import benchmarks

PEERS = {"llama_cpp", "openvino", "openvino_genai", "optimum", "vllm", "pace"}
"""Packages of other servers, each installed in an environment of its own."""


def test_benchmarks_can_be_imported():
    failed = {}
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                failed[module.name] = (error.name or "").partition(".")[0]
    assert set(failed.values()) <= PEERS, failed
