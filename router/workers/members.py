"""The workers that the parent process can call."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from octavo.router.workers import wire
from octavo.router.workers.worker_slot import WorkerSlot
from octavo.v1 import admin_pb2_grpc


@dataclass(slots=True, eq=False)
class Member:
    """A worker that can be called, until its process ends.

    Attributes:
        number: Number of the worker.
        channel: Channel to the worker.
        admin: Stub of the worker's AdminService.
    """

    number: int
    channel: grpc.aio.Channel
    admin: "admin_pb2_grpc.AdminServiceAsyncStub" = field(init=False)

    def __post_init__(self) -> None:
        stub: Any = admin_pb2_grpc.AdminServiceStub(self.channel)  # async stub on the channel
        self.admin = stub


class Members:
    """The callable workers, by number."""

    def __init__(self) -> None:
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter([self._members[number] for number in sorted(self._members)])

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: Member) -> bool:
        return self._members.get(member.number) is member

    def add(self, slot: WorkerSlot) -> Member:
        """Add a worker that listens for its parent."""
        member = Member(slot.number, wire.channel(slot.socket))
        self._members[slot.number] = member
        return member

    async def remove(self, number: int) -> None:
        """Remove a worker, if present."""
        member = self._members.pop(number, None)
        if member is not None:
            await member.channel.close()
