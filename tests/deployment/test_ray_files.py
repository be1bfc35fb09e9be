"""The files of examples/ for Ray's cluster launcher and for KubeRay."""

import kubernetes_validate
import pytest
import yaml

from octavo.cli.serve_settings import ServeSettings
from tests.deployment.composed import DOCKER
from tests.deployment.test_chart import VERSION

EXAMPLES = DOCKER.parent / "examples"


def test_ray_up_takes_its_file():
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((EXAMPLES / "ray_cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))


def test_kuberay_gets_a_cluster_that_a_deployment_joins():
    cluster, deployment, service = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    for resource in (deployment, service):
        kubernetes_validate.validate(resource, VERSION, strict=True)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command = container["command"][-1]
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in command
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert f"--ray-max-engines {workers['maxReplicas']}" in command
    environment = {each["name"]: each["value"] for each in container["env"]}
    asked = ServeSettings(ray=True, ray_resources=environment["OCTAVO_RAY_RESOURCES"])
    (engine,) = workers["template"]["spec"]["containers"]
    assert asked.ray_resources == {"CPU": float(engine["resources"]["limits"]["cpu"])}
