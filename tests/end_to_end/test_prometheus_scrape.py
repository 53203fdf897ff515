"""The shipped dashboard, alerts and scrape configuration against a real Prometheus that scrapes `paceline ui`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from testbed.ports import free_port

from paceline.campaign.ui.library import Library
from paceline.campaign.ui.routes import App
from paceline.campaign.ui.server import serving
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample, Status

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="needs prometheus (Debian: prometheus)")


def test_alerts_fire_when_they_should() -> None:
    """The rules and their own unit tests, by Prometheus's tool."""
    for command in (("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yaml")):
        subprocess.run([str(PROMTOOL), *command], cwd=DEPLOY / "prometheus", check=True, capture_output=True)
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", "alerts_test.yaml"],
        cwd=DEPLOY / "prometheus",
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rules = set(re.findall(r"alert: (\w+)", (DEPLOY / "prometheus" / "alerts.yaml").read_text()))
    tested = set(re.findall(r"alertname: (\w+)", (DEPLOY / "prometheus" / "alerts_test.yaml").read_text()))
    assert rules == tested


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory,
    make_spec: Callable[..., Any],
    make_run: Callable[..., Path],
    make_step: Callable[..., Any],
) -> Iterator[str]:
    """`paceline ui` over a campaign with a failed run and a running one: two ranks, one of them hot and late."""
    root = tmp_path_factory.mktemp("prometheus") / "results"
    spec, failed = make_spec(steps=100), make_spec(steps=100, repeat=1)
    make_run(root, failed, Status.FAILED, "it was made up")
    run_dir = store.create(root, spec)
    campaign_file.write_plan(run_dir.parent, [failed, spec])
    for rank in range(2):
        mark = store.ProgressFile(run_dir, rank)
        mark.loss = 3.5
        mark.mark(2, "forward" if rank else "backward")
    (run_dir / "samples-0.jsonl").write_text("".join(store.sample_line(make_step(step=i)) for i in range(2)))
    lines = []
    for second in range(2):
        about: dict[str, Any] = {"rank": 0, "host": "node-a", "at_s": 100.0 + second}
        traffic = {"received_bytes": 10**6 * second, "sent_bytes": 10**6 * second}
        lines.append(GaugeSample(**about, cpu_ratio=0.5, memory_used_bytes=2**33, **traffic))
        lines += [
            GaugeSample(
                **about,
                device=gpu,
                utilisation_ratio=0.9,
                memory_used_bytes=2**34,
                power_w=600.0,
                energy_j=5.0,
                temperature_c=60.0 + 30 * gpu,
                sm_clock_hz=1.9e9,
                memory_clock_hz=3e9,
                throttle_reasons=("software thermal slowdown",) if gpu else (),
            )
            for gpu in range(2)
        ]
    app = App(Library(root))
    with serving(app, "127.0.0.1:0") as url:
        views = {"test": campaign_file.read_view(run_dir.parent)}
        (run_dir / "samples-gauges-0.jsonl").write_text("".join(map(store.sample_line, lines[:3])))
        app._watches.looks(views)
        (run_dir / "samples-gauges-0.jsonl").write_text("".join(map(store.sample_line, lines)))
        for _ in range(30):  # a straggler is judged by many looks
            app._watches.looks(views)
        yield urlsplit(url).netloc


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the shipped configuration, but our address and a scrape each second."""
    folder = tmp_path_factory.mktemp("tsdb")
    text = (DEPLOY / "prometheus" / "prometheus.yaml").read_text()
    text = text.replace("127.0.0.1:8501", address).replace("5s", "1s")
    (folder / "prometheus.yaml").write_text(text)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError("Prometheus did not come to it")


def query(prometheus: str, expression: str) -> list[Any]:
    found = ask(f"{prometheus}/query?{urllib.parse.urlencode({'query': expression})}")
    return list(found["result"])


def test_every_panel_has_data_from_a_real_scrape(prometheus: str) -> None:
    wait_for(lambda: query(prometheus, "paceline_run_node_received_bytes_per_second"))
    dashboard = json.loads((DEPLOY / "grafana" / "paceline.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        assert query(prometheus, expression.replace("$experiment", ".*")), expression
    power = query(prometheus, "sum(paceline_run_gpu_power_watts)")
    assert power[0]["value"][1] == "1200"
    straggler = query(prometheus, "paceline_run_straggler")
    assert straggler[0]["metric"]["rank"] == "1"


def test_the_rules_are_evaluated_and_a_failed_run_fires(prometheus: str) -> None:
    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in ask(f"{prometheus}/alerts")["alerts"]}

    assert {"PacelineRunFailed", "PacelineGpuHot", "PacelineStraggler"} <= wait_for(
        lambda: found if "PacelineRunFailed" in (found := firing()) else None
    )
    rules = ask(f"{prometheus}/rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """Its structure; the schema of Grafana's own SDK accepts it too, which is not a dependency of the tests."""
    dashboard = json.loads((DEPLOY / "grafana" / "paceline.json").read_text())
    assert dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in ("stat", "timeseries", "table")
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "experiment"]
