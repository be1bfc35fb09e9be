"""Watches a cluster's Pods with given labels: each ready Pod is an engine."""

import json
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from octavo.common.ports import Listener
from octavo.router.settings import KUBERNETES_SCHEME

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory with a Pod's token, namespace and certificate authority."""
WATCH_SECONDS = 300
"""Seconds after which the API server ends a watch; the next one continues there."""
READ_SECONDS = WATCH_SECONDS + 30.0

Pod = dict[str, Any]


class PodWatch:
    """The addresses of the ready Pods with given labels, in this Pod's own namespace.

    Args:
        target: Labels and port, with `KUBERNETES_SCHEME`.

    Attributes:
        selector: The labels in the API's form.

    Raises:
        OSError: This process is not in a Pod, or the Pod has no service account.
    """

    def __init__(self, target: str) -> None:
        labels, _, port = target.removeprefix(KUBERNETES_SCHEME).rpartition(":")
        self._port = int(port)
        self.selector = labels.replace("&", ",")
        try:
            host = os.environ["KUBERNETES_SERVICE_HOST"]
            api = os.environ["KUBERNETES_SERVICE_PORT"]
        except KeyError:
            raise OSError(f"{target} needs the Kubernetes API, but runs outside a Pod") from None
        namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
        self._url = f"https://{Listener(host, int(api)).address}/api/v1/namespaces/{namespace}/pods"
        self._pods: dict[str, Pod] = {}

    async def addresses(self) -> AsyncIterator[set[str]]:
        """Yield HOST:PORT of all ready Pods, first at once, then after each change, forever.

        Raises:
            OSError: The API cannot be reached or refuses the service account.
        """
        trusted = ssl.create_default_context(cafile=SERVICE_ACCOUNT / "ca.crt")
        # Certificates of clusters may lack what Python 3.13 and later ask for by default.
        trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
        try:
            async with httpx2.AsyncClient(
                verify=trusted, timeout=READ_SECONDS, trust_env=False
            ) as client:
                version = await self._list(client)
                while True:
                    yield self._ready()
                    async for kind, pod in self._watch(client, version):
                        version = pod["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            self._apply(kind, pod)
                            yield self._ready()
        except httpx2.HTTPError as error:
            raise OSError(f"{self._url}: {error!r}") from error

    async def _list(self, client: httpx2.AsyncClient) -> str:
        """Read all Pods; return the version from which to start a watch."""
        answer = await client.get(self._url, params=self._parameters(), headers=self._headers())
        answer.raise_for_status()
        listed = answer.json()
        self._pods = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        version: str = listed["metadata"]["resourceVersion"]
        return version

    async def _watch(
        self, client: httpx2.AsyncClient, version: str
    ) -> AsyncIterator[tuple[str, Pod]]:
        """Yield the changes since a version until the API server ends the watch.

        Raises:
            OSError: The API server does not know the version any more.
        """
        more = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        parameters = {**self._parameters(), **more, "timeoutSeconds": str(WATCH_SECONDS)}
        stream = client.stream("GET", self._url, params=parameters, headers=self._headers())
        async with stream as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise OSError(f"{self._url}: the watch ended: {event['object']}")
                yield event["type"], event["object"]

    def _parameters(self) -> dict[str, str]:
        return {"labelSelector": self.selector}

    def _headers(self) -> dict[str, str]:
        """Authenticate with the token, which the kubelet renews every hour."""
        return {"Authorization": f"Bearer {(SERVICE_ACCOUNT / 'token').read_text().strip()}"}

    def _apply(self, kind: str, pod: Pod) -> None:
        if kind == "DELETED":
            self._pods.pop(pod["metadata"]["uid"], None)
        else:
            self._pods[pod["metadata"]["uid"]] = pod

    def _ready(self) -> set[str]:
        hosts = [pod["status"]["podIP"] for pod in self._pods.values() if _is_ready(pod)]
        return {Listener(host, self._port).address for host in hosts}


def _is_ready(pod: Pod) -> bool:
    """Return whether a Pod's probes pass and it is not being deleted, as for a Service."""
    status = pod.get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
    deleted = "deletionTimestamp" in pod["metadata"]
    return bool(status.get("podIP")) and conditions.get("Ready") == "True" and not deleted
