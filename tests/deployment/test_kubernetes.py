"""deploy/kubernetes matches Kubernetes' schemas, and every reference resolves."""

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from octavo.common.rpc import LIVENESS
from octavo.common.settings import ENV_PREFIX, Settings
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from tests.deployment.composed import DOCKER
from tests.deployment.metric_names import exported_names, names
from tests.deployment.prometheus import promtool

ROOT = DOCKER.parent / "deploy" / "kubernetes"
CUSTOM = {"LeaderWorkerSet", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
KEDA = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: octavo
resources: [../base]
components: [../components/autoscaling-keda]
"""
OURS = {"octavo-router": RouterSettings, "octavo-engine": EngineSettings}
VERSION = "1.31"
NAME = "app.kubernetes.io/name"
ANYONE = "anyone"
AUTOSCALING = """
# No requests for ten minutes; then 60 requests a minute, each of which waits 3 seconds.
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: octavo_router_queue_time_seconds_sum{namespace="octavo"}
        values: 0x10 0+180x10
      - series: octavo_router_queue_time_seconds_count{namespace="octavo"}
        values: 0x10 0+60x10
      - series: octavo_engine_kv_cache_usage_ratio{namespace="octavo", instance="a"}
        values: 0.5x20
      - series: octavo_engine_kv_cache_usage_ratio{namespace="octavo", instance="b"}
        values: 1x20
    promql_expr_test:
      - {expr: query_0, eval_time: 8m, exp_samples: [{labels: query_0, value: 0}]}
      - {expr: query_0, eval_time: 19m, exp_samples: [{labels: query_0, value: 3}]}
      - {expr: query_1, eval_time: 8m, exp_samples: [{labels: query_1, value: 0.75}]}
"""

Resource = dict[str, Any]


def read(path: Path) -> list[Resource]:
    return list(yaml.safe_load_all(path.read_text()))


@functools.cache
def built(name: str) -> list[Resource]:
    """Return the objects of `kubectl apply -k`; "keda" is the base scaled by KEDA."""
    if name != "keda":
        return kustomized(ROOT / name)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "kubernetes"
        shutil.copytree(ROOT, copy)
        (copy / "keda").mkdir()
        (copy / "keda" / "kustomization.yaml").write_text(KEDA)
        return kustomized(copy / "keda")


def kustomized(directory: Path) -> list[Resource]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=["base", "example", "keda"])
def resources(request) -> list[Resource]:
    return built(request.param)


def of(resources: list[Resource], kind: str) -> dict[str, Resource]:
    """Return the objects of a kind, by name."""
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def workloads(resources: list[Resource]) -> dict[str, Resource]:
    return of(resources, "Deployment") | of(resources, "StatefulSet")


def container(workload: Resource) -> Resource:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("kustomization.yaml")), ids=lambda path: path.parent.name
)
def test_all_that_is_listed_is_there_and_of_the_schema(path):
    (listed,) = read(path)
    files = [*listed.get("resources", []), *listed.get("components", [])]
    files += [patch["path"] for patch in listed.get("patches", []) if "path" in patch]
    assert all((path.parent / file).exists() for file in files)
    unlisted = {f.name for f in path.parent.glob("*.yaml")} - {*files, path.name}
    assert not unlisted
    for name in listed.get("resources", []):
        for resource in read(path.parent / name) if name.endswith(".yaml") else []:
            if resource["kind"] not in CUSTOM:
                kubernetes_validate.validate(resource, VERSION, strict=True)


def test_what_is_built_is_of_the_schema(resources):
    for resource in resources:
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, VERSION, strict=True)
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "octavo"


def test_selectors_and_ports_lead_somewhere(resources):
    services, running = of(resources, "Service"), workloads(resources)
    assert services.keys() == running.keys() == OURS.keys()
    for name, workload in running.items():
        template = workload["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels
        assert services[name]["spec"]["selector"].items() <= labels
        for port in services[name]["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]
        budget = of(resources, "PodDisruptionBudget")[name]["spec"]
        assert budget["selector"]["matchLabels"].items() <= labels
        for spread in template["spec"]["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"].items() <= labels
    for name, monitor in of(resources, "ServiceMonitor").items():
        labels = services[name]["metadata"]["labels"].items()
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
        named = {port["name"] for port in services[name]["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= named
    scalers = of(resources, "HorizontalPodAutoscaler") | of(resources, "ScaledObject")
    for scaler in scalers.values():
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in of(resources, target["kind"])[target["name"]]["spec"]


def test_engines_are_reached_by_routers_only_and_metrics_by_prometheus():
    resources = built("example")
    policies = of(resources, "NetworkPolicy")
    assert policies.keys() == OURS.keys()
    routers = {"podSelector": {"matchLabels": {NAME: "octavo-router"}}}
    prometheus = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    callers = {}
    for name, policy in policies.items():
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        assert spec["podSelector"]["matchLabels"] == {NAME: name}
        pod = workloads(resources)[name]["spec"]["template"]["metadata"]["labels"]
        assert {NAME: name}.items() <= pod.items()
        for rule in spec["ingress"]:
            callers |= {(name, port["port"]): rule.get("from", ANYONE) for port in rule["ports"]}
    assert callers == {
        ("octavo-engine", "grpc"): [routers],
        ("octavo-engine", "metrics"): [prometheus],
        ("octavo-router", "grpc"): ANYONE,
        ("octavo-router", "http"): ANYONE,
        ("octavo-router", "metrics"): [prometheus],
    }
    declared = {
        (name, port["name"])
        for name, workload in workloads(resources).items()
        for port in container(workload)["ports"]
    }
    assert callers.keys() == declared


def test_engines_on_gpus_are_scheduled_to_nodes_that_have_one():
    (engines,) = of(built("example"), "StatefulSet").values()
    pod = engines["spec"]["template"]["spec"]
    assert container(engines)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_keda_and_the_autoscaler_of_kubernetes_do_the_same():
    (keda,) = of(built("keda"), "ScaledObject").values()
    (own,) = of(built("example"), "HorizontalPodAutoscaler").values()
    keda, own = keda["spec"], own["spec"]
    advanced = keda["advanced"]["horizontalPodAutoscalerConfig"]
    assert advanced["behavior"] == own["behavior"]
    assert keda["scaleTargetRef"] == own["scaleTargetRef"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (
        own["minReplicas"],
        own["maxReplicas"],
    )
    targets = [metric["external"]["target"]["value"] for metric in own["metrics"]]
    assert targets == ["2", "700m"]
    assert [float(t["metadata"]["threshold"]) for t in keda["triggers"]] == [2, 0.7]


def test_autoscalers_ask_for_metrics_that_there_are():
    (own,) = of(built("example"), "HorizontalPodAutoscaler").values()
    named = {metric["external"]["metric"]["name"] for metric in own["spec"]["metrics"]}
    rules = adapter_rules()
    assert {rule["name"]["as"] for rule in rules} == named
    (keda,) = of(built("keda"), "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"]]
    in_namespace = [
        q.replace("<<.LabelMatchers>>", 'namespace="octavo"') for q in queries_of(rules)
    ]
    assert in_namespace == queries
    exported = exported_names()
    asked = set().union(*(names(query) for query in queries))
    assert asked
    assert asked <= exported
    assert {rule["seriesQuery"] for rule in rules} <= exported


def test_autoscalers_read_numbers_before_the_first_request_too(tmp_path):
    (keda,) = of(built("keda"), "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"]]
    rules = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(queries)]
    groups = {"groups": [{"name": "autoscaling", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(groups))
    (tmp_path / "test.yml").write_text(AUTOSCALING)
    promtool("test", "rules", "test.yml", directory=tmp_path)


def adapter_rules() -> list[Resource]:
    """The Prometheus adapter's rules in the guide."""
    guide = (DOCKER.parent / "docs" / "operating.md").read_text()
    (block,) = re.findall(r"```yaml\n(rules:\n.*?)```", guide, re.DOTALL)
    return yaml.safe_load(block)["rules"]["external"]


def queries_of(rules: list[Resource]) -> list[str]:
    return [rule["metricsQuery"] for rule in rules]


def test_routers_find_engines_by_the_name_of_their_service(resources):
    (engines,) = of(resources, "StatefulSet").values()
    service = of(resources, "Service")[engines["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    router = environment(resources, "octavo-router")
    (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert router["OCTAVO_ENGINE"] == f"dns:///{service['metadata']['name']}:{port}"


@pytest.mark.parametrize("name", OURS)
def test_settings_and_ports_are_those_of_the_command(resources, name):
    settings: type[Settings] = OURS[name]
    values = environment(resources, name)
    fields = {key.removeprefix(ENV_PREFIX).lower() for key in values if key.startswith(ENV_PREFIX)}
    assert fields <= settings.model_fields.keys()
    settings.load(**{key: values[f"{ENV_PREFIX}{key.upper()}"] or None for key in fields})
    ours = container(workloads(resources)[name])
    assert ours["args"] == [name.removeprefix("octavo-")]
    ports = {port["name"]: port["containerPort"] for port in ours["ports"]}
    assert ports.pop("grpc") == settings.model_fields["port"].default
    assert ports.pop("metrics") == settings.model_fields["metrics_port"].default
    assert [str(port) for port in ports.values()] == [
        value for key, value in values.items() if key == "OCTAVO_HTTP_PORT"
    ]


@pytest.mark.parametrize("name", OURS)
def test_a_pod_has_the_time_to_drain(resources, name):
    workload = workloads(resources)[name]
    hooks = container(workload).get("lifecycle", {}).get("preStop", {"exec": {"command": [0]}})
    grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    drain = float(environment(resources, name)["OCTAVO_DRAIN_TIMEOUT"])
    assert grace >= float(hooks["exec"]["command"][-1]) + drain + 10


def test_probes_ask_what_they_are_for(resources):
    for name, workload in workloads(resources).items():
        ours = container(workload)
        tls = "OCTAVO_TLS_CERT" in environment(resources, name)
        assert asks(ours["livenessProbe"], tls=tls) == LIVENESS
        assert asks(ours["readinessProbe"], tls=tls) == ""
        if not tls:
            port = OURS[name].model_fields["port"].default
            assert ours["readinessProbe"]["grpc"]["port"] == port


def asks(probe: Resource, *, tls: bool) -> str:
    """Return the health service name that a probe checks."""
    if not tls:
        return probe["grpc"].get("service", "")
    assert "grpc" not in probe
    command = probe["exec"]["command"]
    assert command[:2] == ["octavo", "health"]
    return LIVENESS if "--live" in command else ""


def test_volumes_are_there_and_caches_writable(resources):
    for workload in workloads(resources).values():
        pod = workload["spec"]["template"]["spec"]
        claims = workload["spec"].get("volumeClaimTemplates", [])
        there = {v["name"] for v in pod.get("volumes", [])} | {
            c["metadata"]["name"] for c in claims
        }
        mounts = {m["name"]: m["mountPath"] for m in container(workload)["volumeMounts"]}
        assert mounts.keys() == there
        assert {"/cache", "/tmp"} <= set(mounts.values())
        assert container(workload)["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]


def test_secrets_are_where_the_settings_look_for_them():
    resources = built("example")
    values = environment(resources, "octavo-router")
    mounts = container(workloads(resources)["octavo-router"])["volumeMounts"]
    places = {Path(mount["mountPath"]) for mount in mounts}
    for key in ("OCTAVO_TENANTS", "OCTAVO_TLS_CERT", "OCTAVO_TLS_KEY"):
        assert Path(values[key]).parent in places
    assert not any("subPath" in mount for mount in mounts)  # they would never change


def test_the_alerts_are_those_of_prometheus():
    (rule,) = read(ROOT / "components" / "monitoring" / "alerts.yaml")
    (alerts,) = read(DOCKER / "prometheus" / "alerts.yml")
    assert rule["spec"] == alerts


def environment(resources: list[Resource], name: str) -> dict[str, str]:
    """Return the data of a workload's ConfigMaps."""
    maps = of(resources, "ConfigMap")
    sources = container(workloads(resources)[name])["envFrom"]
    found: dict[str, str] = {}
    for source in sources:
        found |= maps[source["configMapRef"]["name"]]["data"]
    return found
