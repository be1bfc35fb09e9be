"""The chart renders what deploy/kubernetes builds, before it takes its place."""

import re
import subprocess
from typing import Any

import yaml

from tests.deployment.composed import DOCKER
from tests.deployment.test_chart import CHART, helm

OWN = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/part-of",
    "checksum/settings",
    "helm.sh/chart",
}


def meaning(thing: Any) -> Any:
    """A resource without what Helm adds and without the hashes in Kustomize's names."""
    if isinstance(thing, dict):
        found = {key: meaning(value) for key, value in thing.items() if key not in OWN}
        return {key: value for key, value in found.items() if value != {} or key == "emptyDir"}
    if isinstance(thing, list):
        return [meaning(each) for each in thing]
    if isinstance(thing, str):
        return re.sub(r"^(octavo-(?:engine|router))-[0-9a-z]{10}$", r"\1", thing)
    return thing


def by_name(resources: Any) -> dict[tuple[str, str], Any]:
    found = [meaning(each) for each in resources if each and each["kind"] != "Namespace"]
    for each in found:
        if each["kind"] == "ConfigMap":
            each["metadata"].pop("labels", None)  # Kustomize's generator sets none
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_the_default_rendering_is_the_base():
    base = DOCKER.parent / "deploy" / "kubernetes" / "base"
    command = ["kubectl", "kustomize", str(base)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render({}, name="octavo", namespace="octavo").values()
    rendered = [each for text in texts for each in yaml.safe_load_all(text)]
    assert by_name(rendered) == by_name(yaml.safe_load_all(built))
