"""deploy/octavo, the Helm chart: of Kubernetes' schemas, and every reference leads somewhere."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from octavo.common.rpc import LIVENESS
from octavo.common.settings import ENV_PREFIX, Settings
from octavo.engine.settings import EngineSettings
from octavo.router.engines import kubernetes
from octavo.router.engines.kubernetes import PodWatch
from octavo.router.settings import RouterSettings
from tests.deployment.composed import DOCKER
from tests.deployment.metric_names import exported_names, names
from tests.deployment.prometheus import promtool

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk, which is for x86-64")

CHART = DOCKER.parent / "deploy" / "octavo"
VALUES = CHART.parent / "values"
SETS = ["default", "gpu", "keda", "ranks", "watch"]
RELEASE, NAMESPACE = "llm", "ai"
CUSTOM = {"LeaderWorkerSet", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
OURS = {"llm-router": RouterSettings, "llm-engine": EngineSettings}
VERSION = "1.31"
NAME = "app.kubernetes.io/name"
ANYONE = "anyone"
INSTANCE = "app.kubernetes.io/instance"
AUTOSCALING = """
# No requests for ten minutes; then 60 requests a minute, each of which waits 3 seconds.
rule_files: [rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: octavo_router_queue_time_seconds_sum{namespace="ai",service="llm-router"}
        values: 0x10 0+180x10
      - series: octavo_router_queue_time_seconds_count{namespace="ai",service="llm-router"}
        values: 0x10 0+60x10
      - series: octavo_engine_kv_cache_usage_ratio{namespace="ai",service="llm-engine",instance="a"}
        values: 0.5x20
      - series: octavo_engine_kv_cache_usage_ratio{namespace="ai",service="llm-engine",instance="b"}
        values: 1x20
    promql_expr_test:
      - {expr: query_0, eval_time: 8m, exp_samples: [{labels: query_0, value: 0}]}
      - {expr: query_0, eval_time: 19m, exp_samples: [{labels: query_0, value: 3}]}
      - {expr: query_1, eval_time: 8m, exp_samples: [{labels: query_1, value: 0.75}]}
"""

Resource = dict[str, Any]


@functools.cache
def rendered(name: str) -> list[Resource]:
    """What `helm install` would send for one of the sets of values."""
    file = VALUES / f"{name}.yaml"
    return render(yaml.safe_load(file.read_text()) if name != "default" else {})


def render(values: dict[str, Any]) -> list[Resource]:
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE).values()
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@pytest.fixture(params=SETS)
def resources(request) -> list[Resource]:
    return copy.deepcopy(rendered(request.param))


def of(resources: list[Resource], kind: str) -> dict[str, Resource]:
    """Return the objects of a kind, by name."""
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def workloads(resources: list[Resource]) -> dict[str, Resource]:
    """Router and engines; of a LeaderWorkerSet the Pods with rank 0, which routers speak with."""
    found = of(resources, "Deployment") | of(resources, "StatefulSet")
    for name, groups in of(resources, "LeaderWorkerSet").items():
        template = copy.deepcopy(groups["spec"]["leaderWorkerTemplate"]["leaderTemplate"])
        labels = template["metadata"]["labels"]
        labels["leaderworkerset.sigs.k8s.io/worker-index"] = "0"  # the controller sets it
        own = {"template": template, "selector": {"matchLabels": labels}}
        found[name] = {**groups, "spec": {**groups["spec"], **own}}
    return found


def selector(part: str) -> dict[str, str]:
    return {NAME: f"octavo-{part}", INSTANCE: RELEASE}


def container(workload: Resource) -> Resource:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


def test_a_rendering_is_of_the_schema(resources):
    for resource in resources:
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, VERSION, strict=True)
        assert resource["metadata"]["namespace"] == NAMESPACE
    for groups in of(resources, "LeaderWorkerSet").values():
        for template in ("leaderTemplate", "workerTemplate"):
            pod = {"metadata": {}, **groups["spec"]["leaderWorkerTemplate"][template]}
            pod = {"apiVersion": "v1", "kind": "Pod", **pod}
            kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_chart_has_no_errors():
    assert helm.lint(str(CHART))["errors"] == []


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"engines": {}}, "engines"),
        ({"engine": {"replicas": 0}}, "replicas"),
        ({"router": {"discovery": "consul"}}, "discovery"),
        ({"router": {"settings": {"PORT": 1}}}, "PORT"),
        ({"autoscaling": {"cacheUsage": 70}}, "cacheUsage"),
    ],
)
def test_wrong_values_are_refused_by_name(values, error):
    with pytest.raises(helm.HelmError, match=error):
        render(values)


def test_a_change_of_settings_restarts_the_pods():
    for name, part in (("llm-router", "router"), ("llm-engine", "engine")):
        changed = render({part: {"settings": {"OCTAVO_LOG_FORMAT": "console"}}})
        both = [workloads(each)[name] for each in (changed, rendered("default"))]
        sums = {w["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for w in both}
        assert len(sums) == 2


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
        for spread in template["spec"].get("topologySpreadConstraints", []):
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
    resources = rendered("gpu")
    policies = of(resources, "NetworkPolicy")
    assert policies.keys() == OURS.keys()
    routers = {"podSelector": {"matchLabels": selector("router")}}
    prometheus = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    callers = {}
    for name, policy in policies.items():
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        assert spec["podSelector"]["matchLabels"] == selector(name.removeprefix("llm-"))
        pod = workloads(resources)[name]["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= pod.items()
        for rule in spec["ingress"]:
            callers |= {(name, port["port"]): rule.get("from", ANYONE) for port in rule["ports"]}
    assert callers == {
        ("llm-engine", "grpc"): [routers],
        ("llm-engine", "metrics"): [prometheus],
        ("llm-router", "grpc"): ANYONE,
        ("llm-router", "http"): ANYONE,
        ("llm-router", "metrics"): [prometheus],
    }
    declared = {
        (name, port["name"])
        for name, workload in workloads(resources).items()
        for port in container(workload)["ports"]
    }
    assert callers.keys() == declared


def test_engines_on_gpus_are_scheduled_to_nodes_that_have_one():
    (engines,) = of(rendered("gpu"), "StatefulSet").values()
    pod = engines["spec"]["template"]["spec"]
    assert container(engines)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_keda_and_the_autoscaler_of_kubernetes_do_the_same():
    (keda,) = of(rendered("keda"), "ScaledObject").values()
    (own,) = of(rendered("gpu"), "HorizontalPodAutoscaler").values()
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
    (own,) = of(rendered("gpu"), "HorizontalPodAutoscaler").values()
    named = {metric["external"]["metric"]["name"] for metric in own["spec"]["metrics"]}
    rules = adapter_rules()
    assert {rule["name"]["as"] for rule in rules} == named
    (keda,) = of(rendered("keda"), "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"]]
    asked = []
    for rule, metric in zip(rules, own["spec"]["metrics"], strict=True):
        labels = {"namespace": NAMESPACE, **metric["external"]["metric"]["selector"]["matchLabels"]}
        matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
        asked.append(rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers))
    assert asked == queries
    exported = exported_names()
    asked = set().union(*(names(query) for query in queries))
    assert asked
    assert asked <= exported
    assert {rule["seriesQuery"] for rule in rules} <= exported


def test_autoscalers_read_numbers_before_the_first_request_too(tmp_path):
    (keda,) = of(rendered("keda"), "ScaledObject").values()
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


def test_routers_find_engines_by_the_name_of_their_service():
    for name in ("default", "ranks"):
        service = of(rendered(name), "Service")["llm-engine"]
        assert service["spec"]["clusterIP"] == "None"
        router = environment(rendered(name), "llm-router")
        (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
        assert router["OCTAVO_ENGINE"] == f"dns:///llm-engine:{port}"
    (engines,) = of(rendered("default"), "StatefulSet").values()
    assert engines["spec"]["serviceName"] == "llm-engine"


@pytest.mark.parametrize("ranks", [1, 2])
def test_routers_find_engines_by_the_labels_of_their_pods(ranks, monkeypatch, tmp_path):
    resources = render({"router": {"discovery": "kubernetes"}, "engine": {"ranks": ranks}})
    (tmp_path / "namespace").write_text(NAMESPACE)
    monkeypatch.setattr(kubernetes, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (target,) = RouterSettings(
        engine=[environment(resources, "llm-router")["OCTAVO_ENGINE"]]
    ).engine
    asked = dict(label.split("=") for label in PodWatch(target).selector.split(","))
    assert asked == workloads(resources)["llm-engine"]["spec"]["selector"]["matchLabels"]
    pod = workloads(resources)["llm-router"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"]
    (role,), (binding,) = of(resources, "Role").values(), of(resources, "RoleBinding").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == pod["serviceAccountName"]
    assert subject["name"] in of(resources, "ServiceAccount")


def test_ranks_are_one_engine_each_group():
    resources = rendered("ranks")
    (groups,) = of(resources, "LeaderWorkerSet").values()
    template = groups["spec"]["leaderWorkerTemplate"]
    ranks = environment(resources, "llm-engine")["OCTAVO_TENSOR_PARALLEL_SIZE"]
    assert ranks == str(template["size"])
    leader, worker = (
        container({"spec": {"template": template[name]}})
        for name in ("leaderTemplate", "workerTemplate")
    )
    probes = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {key for key in leader if leader[key] != worker.get(key)} == probes
    drain = environment(resources, "llm-engine")["OCTAVO_DRAIN_TIMEOUT"]
    killed = int(re.search(r"--shutdown-timeout (\d+)", worker["args"][0])[1])
    grace = template["workerTemplate"]["spec"]["terminationGracePeriodSeconds"]
    assert int(drain) < killed < grace
    closed = render({"engine": {"ranks": 2}, "networkPolicy": {"enabled": True}})
    callers = of(closed, "NetworkPolicy")["llm-engine"]["spec"]["ingress"]
    assert {"from": [{"podSelector": {"matchLabels": selector("engine")}}]} in callers


@pytest.mark.parametrize("name", OURS)
def test_settings_and_ports_are_those_of_the_command(resources, name):
    settings: type[Settings] = OURS[name]
    values = environment(resources, name)
    fields = {key.removeprefix(ENV_PREFIX).lower() for key in values if key.startswith(ENV_PREFIX)}
    assert fields <= settings.model_fields.keys()
    settings.load(**{key: values[f"{ENV_PREFIX}{key.upper()}"] or None for key in fields})
    ours = container(workloads(resources)[name])
    part = name.removeprefix("llm-")
    assert ours["args"] == [part] or f" octavo {part} " in ours["args"][0]
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
    resources = rendered("gpu")
    values = environment(resources, "llm-router")
    mounts = container(workloads(resources)["llm-router"])["volumeMounts"]
    places = {Path(mount["mountPath"]) for mount in mounts}
    for key in ("OCTAVO_TENANTS", "OCTAVO_TLS_CERT", "OCTAVO_TLS_KEY"):
        assert Path(values[key]).parent in places
    assert not any("subPath" in mount for mount in mounts)  # they would never change


def test_the_alerts_are_those_of_prometheus():
    (rule,) = of(rendered("gpu"), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((DOCKER / "prometheus" / "alerts.yml").read_text())


def environment(resources: list[Resource], name: str) -> dict[str, str]:
    """Return the data of a workload's ConfigMaps."""
    maps = of(resources, "ConfigMap")
    sources = container(workloads(resources)[name])["envFrom"]
    found: dict[str, str] = {}
    for source in sources:
        found |= maps[source["configMapRef"]["name"]]["data"]
    return found
