"""Dashboard, alerts and guide use existing metrics and match each other."""

import importlib.util
import json
import re

import pytest
import yaml

from tests.deployment import dashboard
from tests.deployment.composed import DOCKER
from tests.deployment.metric_names import exported_names, names
from tests.deployment.prometheus import promtool
from tools import metric_table

PROMETHEUS = DOCKER / "prometheus"
GUIDE = DOCKER.parent / "docs" / "operating.md"
OF_PROMETHEUS = {"ALERTS", "up"}


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return exported_names()


def rules() -> list[dict]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return group["rules"]


def test_the_dashboard_asks_for_what_there_is(exported):
    asked = {
        n for panel in dashboard.panels("1m") for _, query in panel.queries for n in names(query)
    }
    assert asked <= exported | OF_PROMETHEUS
    variables = json.loads(dashboard.FILE.read_text())["templating"]["list"]
    for variable in variables[1:]:
        name, label = re.search(
            r"label_values\((\w+).*, (\w+)\)", variable["query"]["query"]
        ).groups()
        assert name in exported
        assert label in {"model", "instance"}


def test_the_dashboard_is_the_script_s():
    spec = importlib.util.spec_from_file_location("made", DOCKER.parent / "tools" / "dashboard.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    now = json.loads(dashboard.FILE.read_text())
    assert now == made.dashboard(), "python tools/dashboard.py"


def test_panels_do_not_overlap():
    taken = set()
    for panel in dashboard.panels("1m"):
        x, y, width, height = panel.place
        cells = {(column, row) for column in range(x, x + width) for row in range(y, y + height)}
        assert not cells & taken
        assert x + width <= 24
        taken |= cells


def test_what_is_provisioned_is_where_compose_puts_it():
    grafana = DOCKER / "grafana"
    (provider,) = yaml.safe_load((grafana / "provisioning/dashboards/octavo.yaml").read_text())[
        "providers"
    ]
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in service["volumes"])
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{dashboard.FILE.name}"
    (source,) = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"]


def test_alerts_ask_for_what_there_is(exported):
    for rule in rules():
        expression = rule["expr"].replace('{__name__=~"octavo_(engine|router)_info"}', "")
        assert names(expression) <= exported | OF_PROMETHEUS, rule["alert"]


def test_the_guide_has_every_metric(exported):
    text = GUIDE.read_text()
    assert metric_table.PLACE.insert(text, metric_table.markdown()) == text, "make docs"
    assert set(re.findall(r"`(octavo_(?:router|engine)_\w+)`", text)) <= {
        *exported,
        *(name.removesuffix("_bucket") for name in exported),
    }


@pytest.mark.parametrize(
    "check", [("config", "prometheus.yml"), ("rules", "alerts.yml")], ids=lambda check: check[0]
)
def test_promtool_checks(check):
    promtool("check", *check, directory=PROMETHEUS)


def test_alerts_fire_where_they_should():
    promtool("test", "rules", "alerts_test.yml", directory=PROMETHEUS)
    tested = (PROMETHEUS / "alerts_test.yml").read_text()
    assert all(f"alertname: {rule['alert']}\n" in tested for rule in rules())
