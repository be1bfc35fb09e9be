"""A rank other than 0: loads its part of the model and computes what rank 0 sends."""

import ctypes
import signal
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog

from octavo.common import logging
from octavo.common.models.checkpoint import check_checkpoint
from octavo.common.models.errors import ModelError
from octavo.common.shutdown import exit_at_once
from octavo.engine.compilation.load_forward import load_forward
from octavo.engine.execution.follower import Follower
from octavo.engine.execution.rank_adapters import FollowerAdapters
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors, peak_memory
from octavo.engine.models.resolve_or_convert import resolve
from octavo.engine.parallel.place import RankError, RankLeftError, RankPlace
from octavo.engine.parallel.processes import started_ranks
from octavo.engine.parallel.rank_signals import RankSignals
from octavo.engine.parallel.world import telling_failures
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.allocate import allocate
from octavo.engine.startup.cache_plan import count_pool
from octavo.engine.startup.capacity import StartupError, keeps_blocks, naming_uncompiled
from octavo.engine.startup.load import join_ranks, make_adapters
from octavo.engine.startup.record import recorder
from octavo.engine.startup.threads import set_threads
from octavo.kernels import cpu

PR_SET_PDEATHSIG = 1

log = structlog.get_logger(__name__)


def main() -> None:
    """Run the rank given by the environment, with the settings in the arguments."""
    if sys.platform == "linux":  # also ends a stopped process
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = EngineSettings.model_validate_json(sys.argv[1])
    logging.configure(settings.log_format, settings.log_level)
    run(settings)


def run(settings: EngineSettings) -> NoReturn:
    """Run the rank given by the environment, or another machine's ranks; then end the process."""
    try:
        text = settings.model_dump_json(exclude_unset=True)
        with started_ranks(settings.ranks, text, settings.machines) as (place, _):
            assert place is not None
            structlog.contextvars.bind_contextvars(rank=place.rank)
            follow(settings, place)
    except RankLeftError as error:  # that rank reports it
        log.info("a rank ends, as another one failed", why=str(error))
        exit_at_once(1)
    except (ModelError, StartupError, RankError, OSError) as error:  # rank 0 reports it too
        log.error("a rank cannot start", error=str(error))  # noqa: TRY400
        exit_at_once(1)
    except Exception:
        log.exception("a rank failed")
        exit_at_once(1)
    exit_at_once(0)


@telling_failures()
@naming_uncompiled()
def follow(settings: EngineSettings, place: RankPlace) -> None:
    """Compute the steps that rank 0 sends until it stops the engine.

    Once the model is loaded, a stop signal makes rank 0 drain first.

    Raises:
        StartupError: The settings conflict with each other, the model or the machine.
        ModelError: The model cannot be read.
        OSError: There is no such model.
    """
    threads = set_threads(place)
    model = resolve(settings.source, packed=keeps_blocks(settings))
    check_checkpoint(Path(model))
    world = join_ranks(settings, Path(model), place)
    loaded = load_forward(settings, model, world)
    layout = plan_layout(loaded.shape, settings.block_size, loaded.dtype, loaded.cache_dtype)
    block_bytes = layout.block_elements * loaded.cache_dtype.itemsize

    def count(probe: CacheTensors, graph_bytes: int) -> tuple[int, int]:
        taken = 0
        if loaded.device.type == "cuda":
            taken = peak_memory(loaded.device) - probe.device.nbytes + graph_bytes
        return count_pool(settings, loaded, block_bytes, taken, place)

    adapters = make_adapters(settings, loaded)
    if loaded.device.type == "cpu":
        cpu.pin_threads(threads.places)
    signals = RankSignals()
    Follower(
        world,
        loaded,
        lambda blocks, swap: allocate(layout, loaded, blocks, swap),
        count,
        recorder=partial(recorder, world),
        adapters=None if adapters is None else FollowerAdapters(*adapters),
        told_to_stop=signals.came,
    ).run()
    log.info("rank stopped")


if __name__ == "__main__":
    main()
