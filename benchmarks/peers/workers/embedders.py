"""Each peer that embeds texts: how it loads the model and answers a workload.

embedders.py octavo|sentence_transformers|fastembed|openvino
"""

# ruff: noqa: PLC0415 - each peer is imported where it is installed

import atexit
import contextlib
import functools
import http.client
import json
import shutil
import sys
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .protocol import Embedded, Setup, Texts, serve

Embed = Callable[..., Sequence[Any]]
"""Embeds texts. The peers that have batches take their size as the second argument."""
BATCHES = 16, 64
"""Sizes of batches, of which each peer's fastest is used."""
TRIED = 64
"""Texts on which batches are tried."""
CALL, CALLS = 64, 8
"""Texts of a call to Octavo, and calls at once."""
MOST = 256
"""Tokens at which texts are cut, MiniLM's limit."""
CHECKED = 32
"""Embeddings that are returned, to be compared."""
PACKAGES = {
    "octavo": ["octavo", "torch", "transformers"],
    "sentence_transformers": ["sentence-transformers", "torch"],
    "fastembed": ["fastembed", "onnxruntime"],
    "openvino": ["openvino-genai"],
}


class Embedder:
    """A loaded peer."""

    def __init__(self, embed: Embed, sizes: Sequence[int]) -> None:
        self._embed, self._sizes = embed, sizes

    def run(self, requests: Sequence[Texts]) -> Embedded:
        """Embed one workload."""
        (work,) = requests
        return self._alone(work) if work.alone else self._together(work)

    def _alone(self, work: Texts) -> Embedded:
        made = [_timed(self._embed, [text], *self._sizes[:1]) for text in work.texts]
        return Embedded([seconds for seconds, _ in made], _checked([v[0] for _, v in made]))

    def _together(self, work: Texts) -> Embedded:
        sample = work.texts[:TRIED]
        _timed(self._embed, sample[: TRIED // 8], *self._sizes[:1])  # warms up
        best = sorted(self._sizes, key=lambda size: _timed(self._embed, sample, size)[0])[:1]
        seconds, vectors = _timed(self._embed, work.texts, *best)
        return Embedded([seconds], _checked(vectors), f"batches of {best[0]}" if best else "")


def _timed(embed: Embed, *arguments: Any) -> tuple[float, Sequence[Any]]:  # noqa: ANN401
    began = time.perf_counter()
    vectors = embed(*arguments)
    return time.perf_counter() - began, vectors


def _checked(vectors: Sequence[Any]) -> list[list[float]]:
    return np.array(vectors[:CHECKED], dtype=np.float64).tolist()  # type: ignore[no-any-return]


def by_length(embed: Embed) -> Embed:
    """Return a function that embeds texts of similar lengths together, longest first."""

    def embed_sorted(texts: list[str], size: int) -> list[Any]:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(texts), size):
            batch = order[start : start + size]
            for i, vector in zip(batch, embed([texts[i] for i in batch], size), strict=True):
                vectors[i] = vector
        return vectors

    return embed_sorted


def load_octavo(setup: Setup) -> Embed:
    """Start a server; send calls of several texts from threads."""
    from octavo import Client
    from octavo.cli.local_server import local_server
    from octavo.common.ports import free_port

    options, port = dict(setup.options), free_port()
    over = options.pop("over")
    flags = [f"--{name}={value}" for name, value in options.items()]
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    address = stack.enter_context(local_server(setup.model, f"--http-port={port}", *flags))
    client = stack.enter_context(Client(address))
    threads = stack.enter_context(ThreadPoolExecutor(CALLS))
    (model,) = client.list_models()

    def by_grpc(texts: list[str]) -> Sequence[Any]:
        return client.embed(texts, truncate=True).embeddings

    @functools.cache
    def connection(_: int) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port)

    def by_http(texts: list[str]) -> list[Any]:
        call = connection(threading.get_ident())
        body = {"model": model.name, "input": texts, "encoding_format": "base64", "truncate": True}
        headers = {"Content-Type": "application/json"}
        call.request("POST", "/v1/embeddings", json.dumps(body), headers)
        data = json.loads(call.getresponse().read())["data"]
        return [np.frombuffer(b64decode(each["embedding"]), np.float32) for each in data]

    one = by_grpc if over == "gRPC" else by_http

    def embed(texts: list[str]) -> Sequence[Any]:
        if len(texts) <= CALL:
            return one(texts)
        calls = [texts[start : start + CALL] for start in range(0, len(texts), CALL)]
        return [vector for vectors in threads.map(one, calls) for vector in vectors]

    return embed


def load_sentence_transformers(setup: Setup) -> Embed:
    """Load a model in PyTorch."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(setup.threads)
    dtype = getattr(torch, setup.options["dtype"])
    model = SentenceTransformer(setup.model, device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts, size: model.encode(texts, batch_size=size)


def load_fastembed(setup: Setup) -> Embed:
    """Load a model's ONNX file."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    folder = export_onnx(Path(setup.model))
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model="local",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="local"),
        dim=size,
        model_file=f"{setup.options['dtype']}.onnx",
    )
    model = TextEmbedding("local", specific_model_path=str(folder), threads=setup.threads)
    return by_length(lambda texts, size: list(model.embed(texts, batch_size=size)))


def load_openvino(setup: Setup) -> Embed:
    """Load a model in OpenVINO's format, made of the ONNX file."""
    import openvino
    import openvino_genai as genai
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    folder = export_onnx(Path(setup.model))
    if not (folder / "openvino_tokenizer.xml").exists():
        model = openvino.convert_model(str(folder / "float32.onnx"))
        openvino.save_model(model, str(folder / "openvino_model.xml"), compress_to_fp16=False)
        tokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(setup.model))
        openvino.save_model(tokenizer, str(folder / "openvino_tokenizer.xml"))
    config = genai.TextEmbeddingPipeline.Config()
    config.pooling_type = genai.TextEmbeddingPipeline.PoolingType.MEAN
    config.normalize = True
    config.max_length = MOST
    pipeline = genai.TextEmbeddingPipeline(
        str(folder), "CPU", config, INFERENCE_NUM_THREADS=setup.threads
    )
    return by_length(lambda texts, _: pipeline.embed_documents(texts))


def export_onnx(model: Path) -> Path:
    """Return a folder with the model's ONNX files; make them if they are missing.

    They have ONNX Runtime's dynamic quantization to int8, and float32.
    """
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from transformers import AutoModel

    folder = model.with_name(f"{model.name}-onnx")
    if (folder / "int8.onnx").exists():
        return folder

    class HiddenStates(torch.nn.Module):
        def __init__(self, model: Any) -> None:  # noqa: ANN401
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:  # noqa: ANN401
            return self.model(ids, mask, token_type_ids=types).last_hidden_state

    folder.mkdir(exist_ok=True)
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    limits = folder / "tokenizer_config.json"  # which fastembed reads
    settings = json.loads(limits.read_text()) | {"max_length": MOST, "model_max_length": MOST}
    limits.write_text(json.dumps(settings))
    exported = AutoModel.from_pretrained(
        model, add_pooling_layer=False, attn_implementation="eager", dtype=torch.float32
    ).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    hidden = "last_hidden_state"
    torch.onnx.export(
        HiddenStates(exported),
        tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names),
        str(folder / "float32.onnx"),
        input_names=names,
        output_names=[hidden],
        dynamic_axes={name: {0: "texts", 1: "tokens"} for name in (*names, hidden)},
        opset_version=17,
        dynamo=False,
    )
    quantize_dynamic(
        *(str(folder / f"{name}.onnx") for name in ("float32", "int8")),
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return folder


LOADERS: dict[str, Callable[[Setup], Embed]] = {
    "octavo": load_octavo,
    "sentence_transformers": load_sentence_transformers,
    "fastembed": load_fastembed,
    "openvino": load_openvino,
}


def main() -> None:
    """Serve the peer that the command line names."""
    name = sys.argv[1]
    sizes = () if name == "octavo" else BATCHES
    serve(lambda setup: Embedder(LOADERS[name](setup), sizes), PACKAGES[name], Texts)


if __name__ == "__main__":
    main()
