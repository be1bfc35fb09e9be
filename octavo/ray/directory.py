"""A named actor with the addresses of a model's engines, where routers look them up."""

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError as RayFailure
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from octavo.common.background import call_in_thread
from octavo.ray.cluster import NAMESPACE, RayError, connect

TIMEOUT_SECONDS = 5.0


class Directory:
    """The actor: stores the addresses of the engines that accept requests."""

    def __init__(self) -> None:
        self._addresses: list[str] | None = None

    def set(self, addresses: list[str]) -> None:
        """Replace the addresses."""
        self._addresses = addresses

    def get(self) -> list[str] | None:
        """Return the addresses; None after Ray restarted this actor, until they are set again."""
        return self._addresses


def make_directory(name: str) -> Any:  # noqa: ANN401 - Ray's actor handles have no types
    """Start a directory with this name on this node; it ends with this process.

    Raises:
        RayError: The cluster already has a directory with this name.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    try:
        return ray.remote(Directory).options(name=name, namespace=NAMESPACE, **options).remote()
    except ValueError as error:
        raise RayError(
            f"the Ray cluster has engines of the name {name!r} already, from another `octavo serve"
            " --ray`: end that, or give this one another --ray-name"
        ) from error


async def look_up(name: str) -> set[str]:
    """Return HOST:PORT of every engine that accepts requests.

    Args:
        name: The --ray-name of the engines.

    Raises:
        OSError: They cannot be found now.
    """
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await call_in_thread(connect)
            directory = await call_in_thread(ray.get_actor, name, NAMESPACE)
            addresses = await directory.get.remote()
    except ValueError:
        raise OSError(f"the Ray cluster has no engines of the name {name!r}") from None
    except (RayError, RayFailure, TimeoutError) as error:
        raise OSError(str(error).strip() or "the Ray cluster does not answer") from error
    if addresses is None:
        raise OSError("the engines' addresses are not known yet")
    return set(addresses)
