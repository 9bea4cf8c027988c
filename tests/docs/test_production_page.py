"""Tests that the files in the how-to on production are taken as they are shown."""

import re
from pathlib import Path

import pytest

from kvcore_online.route_config import RouteConfig
from kvcore_online.traffic import Metrics

PAGE = (Path(__file__).parents[2] / "docs/how-to/run-in-production.md").read_text("utf-8")


def blocks(language):
    """Return the fenced blocks of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_configuration_is_taken(tmp_path):
    """The TOML file is one of `kvcore route`, and what waits for its end waits longer."""
    file = tmp_path / "route.toml"
    file.write_text(*blocks("toml"))
    config = RouteConfig.from_toml(file)
    assert [replica.name for replica in config.replicas] == ["left", "right"]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", PAGE, re.MULTILINE)
    (grace,) = re.findall(r"terminationGracePeriodSeconds: (\d+)$", PAGE, re.MULTILINE)
    (before,) = re.findall(r"preStop: {sleep: {seconds: (\d+)}}", PAGE)
    assert int(stop) > config.shutdown_timeout
    assert int(grace) > config.shutdown_timeout + int(before)
    (files,) = re.findall(r"^LimitNOFILE=(\d+)$", PAGE, re.MULTILINE)
    assert int(files) > 2 * config.connections


def test_metrics_of_alerts_exist():
    """Each metric that the page names is one that a proxy exports."""
    pytest.importorskip("prometheus_client")
    exported = {
        f"{name}{suffix}"
        for name in re.findall(r"^# TYPE (\S+)", Metrics().text().decode(), re.MULTILINE)
        for suffix in ("", "_bucket")
    }
    named = set(re.findall(r"kvcore_route_\w+", PAGE))
    assert len(named) >= 5
    assert named <= exported


def test_yaml_can_be_read():
    """The files for Kubernetes and Prometheus are YAML, and probes ask paths of the proxy."""
    yaml = pytest.importorskip("yaml")
    pod, scraped, alerts = map(yaml.safe_load, blocks("yaml"))
    (container,) = pod["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["httpGet"]["path"] == "/metrics"
    assert scraped["scrape_configs"]
    assert len(alerts["groups"][0]["rules"]) == 3
