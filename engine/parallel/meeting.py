"""Brings an engine's ranks together when it starts.

Ranks find each other through a store, at rank 0. Each rank writes what it runs there, waits until
all others have, logs which are missing, and refuses an engine whose ranks run different things:
their collectives would never meet.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from octavo.engine.parallel.place import RankError, RankPlace

STORE = "OCTAVO_RANK_STORE"
"""Environment variable with the path of the file by which ranks on one machine find each other.
Without it, they use a launcher's MASTER_ADDR and MASTER_PORT."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torchrun: whether its agent has the store."""
MEETING_SECONDS = 1800.0
"""Maximum seconds to wait for the other ranks, as in torch.distributed: their machines may still
download the model."""
NOTICE_SECONDS = 30.0
"""Seconds between two log lines about ranks that are missing."""
POLL_SECONDS = 0.05
CONNECT_SECONDS = 5.0
STORE_SECONDS = 20.0
"""Maximum seconds for the store to answer."""
LEAVE_SECONDS = 5.0
"""Maximum seconds that rank 0 keeps the store after a refusal, for the other ranks to read it."""
SHOWN = 5
"""Maximum differences in a message."""
ARRIVALS, ARRIVAL, REFUSED = "octavo/arrivals", "octavo/arrival", "octavo/refused"
"""Keys: the number of ranks that came; what each runs, and whether it ends, by its order."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that has come.

    Attributes:
        rank: Its number.
        host: The name of its machine.
        facts: What all ranks must have alike, by name: version, model and flags.
    """

    rank: int
    host: str
    facts: Mapping[str, str]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def meet(
    place: RankPlace, facts: Mapping[str, str], seconds: float = MEETING_SECONDS
) -> tuple[Any, int, int]:
    """Wait until all ranks have come.

    Args:
        place: The place of this rank.
        facts: What all ranks must have alike, by name; the first that differs is reported alone if
            it is the version.
        seconds: Maximum seconds to wait.

    Returns:
        The store, and this rank's number and the number of ranks in it.

    Raises:
        RankError: Some do not come, or run something else.
    """
    waiting = _Waiting(place, seconds)
    store, rank, size = _open_store(place, waiting)
    try:
        _wait_for_all(store, Arrival(place.rank, socket.gethostname(), facts), place, waiting)
        store.set_timeout(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RankError(
            f"rank 0 at {waiting.address} has left while rank {place.rank} waited for the others:"
            " see its log"
        ) from error
    return store, rank, size


@dataclass(slots=True)
class _Waiting:
    """The wait of a rank: its end, and when to log about it.

    Attributes:
        place: The place of the rank.
        seconds: Maximum seconds to wait.
    """

    place: RankPlace
    seconds: float
    _began: float = field(default_factory=time.monotonic)
    _noted: float | None = None

    @property
    def address(self) -> str:
        """Where ranks find each other."""
        if (file := os.environ.get(STORE)) is not None:
            return file
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"

    @property
    def is_over(self) -> bool:
        """Whether the time is over. The first rank of a machine reports it, and ends the others."""
        grace = LEAVE_SECONDS if self.place.local_rank else 0.0
        return time.monotonic() > self._began + self.seconds + grace

    def note(self, text: str, **values: object) -> None:
        """Log at once if ranks are on other machines, and now and then later.

        Only the first rank of a machine logs.
        """
        now = time.monotonic()
        if self._noted is None:
            has_others = self.place.local_size < self.place.size
            self._noted = now - NOTICE_SECONDS if has_others else now
        if self.place.local_rank or now < self._noted + NOTICE_SECONDS:
            return
        self._noted = now
        waited = round(now - self._began)
        log.info(text, address=self.address, **values, waited=waited, limit=round(self.seconds))


def _open_store(place: RankPlace, waiting: _Waiting) -> tuple[Any, int, int]:
    """Return the store, and this rank's number and the number of ranks in it."""
    has_agent = os.environ.get(AGENT_STORE) == str(True)
    if (file := os.environ.get(STORE)) is not None or has_agent:
        method = "env://" if file is None else Path(file).as_uri()
        store, rank, size = next(rendezvous(method, place.rank, place.size))
        return store, rank, size
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if place.rank:
        _wait_for_listener(host, port, waiting)
    try:
        store = TCPStore(
            host,
            port,
            is_master=not place.rank,
            timeout=timedelta(seconds=STORE_SECONDS),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RankError(_unreachable(place, waiting.address, error)) from error
    return store, place.rank, place.size


def _unreachable(place: RankPlace, address: str, error: RuntimeError) -> str:
    """Return why a rank has no store."""
    why = str(error).splitlines()[0]
    if place.rank:
        return f"what listens at {address} (--master-addr, --master-port) is no rank 0: {why}"
    return (
        f"rank 0 cannot listen at {address}: --master-addr must be an address of machine 0, and"
        f" --master-port a free port there: {why}"
    )


def _wait_for_listener(host: str, port: int, waiting: _Waiting) -> None:
    """Wait until rank 0 listens.

    Raises:
        RankError: It does not in time.
    """
    while True:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
        except OSError as error:
            if waiting.is_over:
                raise RankError(
                    f"machine 0 does not answer at {waiting.address} after {waiting.seconds:g} s"
                    f" ({error}): start the engine there with --node-rank 0, or correct"
                    " --master-addr and --master-port"
                ) from error
            waiting.note("waiting for machine 0", error=str(error))
            time.sleep(10 * POLL_SECONDS)
        else:
            return


def _wait_for_all(store: Any, own: Arrival, place: RankPlace, waiting: _Waiting) -> None:  # noqa: ANN401 - torch's stores share no public class
    """Write what this rank runs, and wait until all ranks have come.

    Raises:
        RankError: Some do not come, or run something else.
        RuntimeError: The store has gone.
    """
    order = store.add(ARRIVALS, 1)
    text = json.dumps([own.rank, own.host, dict(own.facts)])
    store.set(f"{ARRIVAL}/{order}", text)
    present: dict[int, Arrival] = {}
    for arrival in _arrivals(store):
        if arrival is not None:
            if (why := _difference(own, arrival, present.get(arrival.rank))) is not None:
                _refuse(store, order, place)
                raise RankError(why)
            present[arrival.rank] = arrival
            if len(present) == place.size:
                return
            continue
        missing = sorted(set(range(place.size)) - set(present))
        if waiting.is_over:
            raise RankError(_late(missing, present, waiting))
        waiting.note("waiting for other ranks", present=sorted(present), missing=missing)
        time.sleep(POLL_SECONDS)


def _arrivals(store: Any) -> Iterator[Arrival | None]:  # noqa: ANN401
    """Yield the ranks that come, in order; None while there is no further one."""
    count = 0
    while True:
        key = f"{ARRIVAL}/{count + 1}"
        if store.check([key]):
            count += 1
            yield Arrival(*json.loads(store.get(key)))
        else:
            yield None


def _difference(own: Arrival, other: Arrival, same: Arrival | None) -> str | None:
    """Return why ranks cannot work together; None if they can.

    Args:
        own: This rank.
        other: Another one, or this one.
        same: A rank of the same number that came before.
    """
    if same is not None:
        return f"{other} came, but {same} was there: each machine needs its own --node-rank"
    names = list(dict.fromkeys((*own.facts, *other.facts)))
    pairs = {name: (other.facts.get(name), own.facts.get(name)) for name in names}
    differing = [name for name, (theirs, ours) in pairs.items() if theirs != ours]
    if not differing:
        return None
    shown = differing[:1] if differing[0] == names[0] else differing[:SHOWN]
    theirs, ours = (
        ", ".join(f"{name} {values[side]}" for name in shown for values in (pairs[name],))
        for side in (0, 1)
    )
    return (
        f"{other} has {theirs}, but {own} has {ours}: start the same version on each machine, with"
        " the same model and flags"
    )


def _refuse(store: Any, order: int, place: RankPlace) -> None:  # noqa: ANN401
    """Note that this rank ends; rank 0 keeps the store until all that have come noted the same."""
    with suppress(RuntimeError):
        store.set(f"{REFUSED}/{order}", "")
        if not place.rank:
            count = store.add(ARRIVALS, 0)
            keys = [f"{REFUSED}/{number}" for number in range(1, count + 1)]
            store.wait(keys, timedelta(seconds=LEAVE_SECONDS))


def _late(missing: list[int], present: Mapping[int, Arrival], waiting: _Waiting) -> str:
    """Return the error of ranks that did not come."""
    hosts = sorted({arrival.host for arrival in present.values()})
    here = ", ".join(map(str, sorted(present)))
    return (
        f"ranks {', '.join(map(str, missing))} did not come to {waiting.address} within"
        f" {waiting.seconds:g} s; ranks {here} came, on {', '.join(hosts)}: start the engine on"
        " each machine with its own --node-rank, where it reaches that address"
    )
