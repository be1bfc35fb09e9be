"""Loads a draft model, and creates its drafter."""

from pathlib import Path

import structlog

from octavo.common.models.checkpoint import check_checkpoint
from octavo.engine.compilation.load_forward import load_forward
from octavo.engine.execution.draft_model import DraftModel
from octavo.engine.execution.executor import Executor
from octavo.engine.execution.graph_sizes import draft_model_sizes
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.model_shape import ModelShape
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.capacity import StartupError
from octavo.engine.startup.record import measure_recorded, record

log = structlog.get_logger(__name__)


class LoadedDraftModel:
    """A draft model without a cache.

    Attributes:
        block_bytes: Bytes per block of its cache, over all layers.
    """

    def __init__(self, settings: EngineSettings, name: str, shape: ModelShape) -> None:
        """Load the draft model.

        Args:
            settings: The engine's settings.
            name: A hub name, a directory or a GGUF file.
            shape: The large model's dimensions.

        Raises:
            StartupError: It cannot draft for the large model.
            UnsupportedModelError: The engine cannot serve the draft model.
            ModelError: The draft model cannot be read.
            OSError: There is no such model.
        """
        path = resolve(name)
        check_checkpoint(Path(path))
        changes = {"model": path, "lora": [], "enable_lora": False, "max_model_len": None}
        self._loaded = load_forward(settings.model_copy(update=changes), path)
        vocab_size = self._loaded.shape.vocab_size
        if vocab_size != shape.vocab_size:
            raise StartupError(
                f"--draft-model {name} has {vocab_size} tokens, and the model has"
                f" {shape.vocab_size}: choose one with the same tokens"
            )
        self._layout = plan_layout(
            self._loaded.shape, settings.block_size, self._loaded.dtype, self._loaded.cache_dtype
        )
        if any(group.state_blocks for group in self._layout.groups):
            raise StartupError(
                f"--draft-model {name} has layers that keep states, which cannot be rolled back to"
                " before a wrong draft: choose one with attention alone"
            )
        self._cuda_graphs = settings.cuda_graphs
        self.block_bytes = self._layout.block_elements * self._loaded.cache_dtype.itemsize
        log.info("draft model loaded", model=name, compiled=self._loaded.compiled)

    def start(self, num_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> DraftModel:
        """Allocate its cache; on a GPU, warm up and record its steps.

        Args:
            num_blocks: Blocks of its cache.
            max_num_seqs: Maximum sequences that it drafts for at a time.
            max_num_batched_tokens: Maximum tokens that it computes at a time.
        """
        most = self._loaded.shape.max_position
        executor = self._executor(num_blocks)
        if self._loaded.device.type == "cuda":
            executor.warm_up(most, max_num_batched_tokens)
            if self._cuda_graphs:
                record(executor, draft_model_sizes(max_num_seqs, max_num_batched_tokens), most)
        cache = KVCacheManager(
            num_blocks=num_blocks,
            groups=self._layout.groups,
            num_swap_blocks=0,
            prefix_caching=False,
            step_tokens=max_num_batched_tokens,
        )
        return DraftModel(
            executor,
            cache,
            max_model_len=most,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    def measure_graphs(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Return the bytes on a GPU that its recorded steps take; see `start`."""
        sizes = draft_model_sizes(max_num_seqs, max_num_batched_tokens)
        return measure_recorded(self._executor(1), sizes, self._loaded.shape.max_position)

    def _executor(self, num_blocks: int) -> Executor:
        loaded = self._loaded
        tensors = CacheTensors(
            self._layout,
            num_blocks=num_blocks,
            num_swap_blocks=0,
            dtype=loaded.cache_dtype,
            device=loaded.device,
            model_dtype=loaded.dtype,
        )
        return Executor(loaded, tensors)
