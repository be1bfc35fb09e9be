"""The Ray cluster that this machine belongs to."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import psutil
import ray

NAMESPACE = "octavo"
"""The namespace of the named actors."""
CPUS_OF_A_GPU_RANK = 4.0

Resources = Mapping[str, float]
"""Amounts by Ray's resource names: CPU, GPU, memory, or a custom resource of nodes."""


class RayError(Exception):
    """The Ray cluster cannot run the engines; the message names a remedy."""


def connect(*, show_logs: bool = False) -> None:
    """Connect this process to the cluster at `RAY_ADDRESS`; default: this machine's cluster.

    Do not call it in the main thread, where Ray would replace the handler of SIGTERM.

    Args:
        show_logs: Whether to print the actors' output.

    Raises:
        RayError: There is no cluster.
    """
    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address="auto",
            namespace=NAMESPACE,
            log_to_driver=show_logs,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayError(
            f"no Ray cluster ({str(error).splitlines()[0]}): run `ray start --head` here or `ray"
            " start --address=HOST:6379` to join one, or set RAY_ADDRESS"
        ) from error


def disconnect() -> None:
    """Disconnect; Ray ends the actors of this process."""
    ray.shutdown()


def rank_resources(asked: Resources, device: str, nodes: Collection[Resources]) -> Resources:
    """Return the resources of one rank.

    Args:
        asked: The value of --ray-resources; missing names get defaults.
        device: The value of --device.
        nodes: The resources of each node.

    Raises:
        RayError: An amount is wrong, or no node has a CPU, so there is no default.
    """
    if asked and (min(asked.values()) < 0 or not any(asked.values())):
        raise RayError("--ray-resources: no amount may be negative, and one must be above 0")
    on_gpu = asked.get("GPU", 0) > 0 or (
        "GPU" not in asked and device != "cpu" and any(node.get("GPU") for node in nodes)
    )
    if on_gpu or device not in {"cpu", "auto"}:
        return {"GPU": 1.0, "CPU": CPUS_OF_A_GPU_RANK, **asked}
    if "CPU" in asked:
        return dict(asked)
    cpus = [node["CPU"] for node in nodes if node.get("CPU")]
    if not cpus:
        raise RayError(
            "no node of the Ray cluster has a CPU, so there is no default for the CPUs of an"
            """ engine: set --ray-resources, such as '{"CPU": 8}'"""
        )
    return {"CPU": min(cpus), **asked}


def node_resources() -> list[Resources]:
    """Return the resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def actor_options(resources: Resources) -> dict[str, Any]:
    """Return the options of an actor that takes these resources."""
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    others = {name: amount for name, amount in resources.items() if name not in known}
    return {
        "num_cpus": 0,
        **{known[name]: amount for name, amount in resources.items() if name in known},
        "resources": others,
    }


def interface_of(address: str) -> str | None:
    """Return this machine's network interface with an IP address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    return None


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that drain before they are removed."""
    return set(ray._private.state.state.get_draining_nodes())  # noqa: SLF001 - as Ray Train does
