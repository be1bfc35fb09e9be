"""Models that are loaded when a request names them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from octavo.v1 import generation_pb2

OnLoading = Callable[[int], Awaitable[None]]
"""Tells a client that its request waits until the model is loaded, and its queue position."""


class OnDemandModels(Protocol):
    """Loads models when requests name them, and unloads them."""

    def offered(self) -> Mapping[str, Sequence[str]]:
        """Return the aliases of each model that can be loaded, by its name."""

    def hold(
        self, model: str, on_loading: OnLoading | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Load a model, and keep it loaded within the block; do nothing if it is not offered.

        Args:
            model: The model.
            on_loading: Called while it is not loaded: at once, and every few seconds.

        Raises:
            rpc.RpcError: UNAVAILABLE if it fails to load, FAILED_PRECONDITION if it does not fit
                into the memory.
        """

    def state(self, model: str) -> generation_pb2.ModelState.ValueType:
        """Return a model's state."""

    async def unload(self, model: str) -> None:
        """Unload a model once its requests are complete; wait until its memory is free.

        Raises:
            rpc.RpcError: NOT_FOUND if it is not offered, FAILED_PRECONDITION if it is pinned.
        """
