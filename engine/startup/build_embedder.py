"""Builds the parts of an engine that embeds or classifies texts."""

from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from octavo.common.models.classification import ClassifierPlan, read_classifier
from octavo.common.models.embedding import EmbeddingPlan, read_plan
from octavo.common.thread_priority import lower_priority
from octavo.engine.embedding.encoder import Encoder
from octavo.engine.memory.freed import mapping_large, return_freed
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import CPU_SEQS, StartupError, keeps_blocks
from octavo.engine.startup.find_model import find_model
from octavo.engine.startup.threads import Threads, set_threads
from octavo.kernels.ops import device_warning, kernel_path

log = structlog.get_logger(__name__)

BATCHED_TOKENS = 2048
"""Default maximum of a step's tokens."""
STEPS_AHEAD = 16
"""Steps of texts that a router may have at an engine, so that it never idles."""
BLOCK_TOKENS = 16
"""Tokens of a block, in which routers count an engine's room."""


@dataclass(frozen=True, slots=True)
class EmbedderParts:
    """The parts of an engine that embeds or classifies, ready to run.

    Attributes:
        path: The model's directory.
        encoder: The model.
        vocab_size: Exclusive upper limit of token ids.
        max_num_seqs: Maximum requests that run.
        max_num_batched_tokens: Maximum tokens of a step with several texts.
        dtype: The weights' data type.
        kernels: The kernels' name from `octavo.kernels.ops.kernel_path`.
        warnings: Reasons why the engine is slow, and remedies.
        threads: The threads that compute on a CPU.
        device: The device's name.
        leader: None: there are no other ranks.
        ranks: Number of processes that hold a part of the model.
    """

    path: Path
    encoder: Encoder
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kernels: str
    warnings: tuple[str, ...]
    threads: Threads
    device: str = "cpu"
    leader: None = None
    ranks: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of `BLOCK_TOKENS` tokens that may run or wait."""
        return STEPS_AHEAD * self.max_num_batched_tokens // BLOCK_TOKENS


def read_purpose(
    settings: EngineSettings, directory: Path
) -> EmbeddingPlan | ClassifierPlan | None:
    """Return how a model embeds or classifies; None if it generates text.

    Raises:
        StartupError: The settings are for embeddings, and it makes none.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: A file cannot be read.
    """
    plan = read_plan(
        directory, settings.pooling, settings.normalize, matryoshka=settings.matryoshka
    )
    if plan is None and (settings.normalize is not None or settings.matryoshka):
        raise StartupError("--normalize and --matryoshka need an embedding model: set --pooling")
    return plan or read_classifier(directory)


def build_embedder(settings: EngineSettings) -> EmbedderParts | None:
    """Load a model that embeds or classifies; return None if the model generates text.

    Raises:
        StartupError: The settings conflict with the model or the machine.
        UnsupportedModelError: The engine cannot serve the model.
        ModelError: The model cannot be read.
        OSError: There is no such model.
    """
    with mapping_large():
        path = Path(resolve(settings.source, packed=keeps_blocks(settings)))
    if (plan := read_purpose(settings, path)) is None:
        return None
    # The priority of this thread, which computes, and of OpenMP's, which it starts. 32 streams of
    # an engine on the same two cores ran beside bulk embedding: at this priority, the p99 of the
    # gaps between tokens grew by 1 to 15%, at the normal one by 75% and more; bulk embedded 13 to
    # 25 texts a second, and 80.
    lower_priority()
    # Imported here because transformers is slow to import.
    from octavo.engine.embedding.load import load_encoder  # noqa: PLC0415

    threads = set_threads()
    path, _ = find_model(settings)
    loaded = load_encoder(settings, path, plan)
    return_freed()
    device = torch.device("cpu")
    warning = device_warning(device)
    log.info(
        "classifier loaded" if isinstance(plan, ClassifierPlan) else "embedding model loaded",
        model=settings.model,
        pooling=loaded.encoder.pooling,
        dimensions=loaded.encoder.dimensions,
        max_tokens=loaded.encoder.max_tokens,
    )
    return EmbedderParts(
        path=path,
        encoder=loaded.encoder,
        vocab_size=loaded.vocab_size,
        max_num_seqs=settings.max_num_seqs or CPU_SEQS,
        max_num_batched_tokens=settings.max_num_batched_tokens or BATCHED_TOKENS,
        dtype=str(loaded.dtype).removeprefix("torch."),
        kernels=kernel_path(device),
        warnings=() if warning is None else (warning,),
        threads=threads,
    )
