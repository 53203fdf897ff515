"""`paceline stream`: a run in progress reaches TensorBoard, MLflow, W&B and an OpenTelemetry collector."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.campaign.live.streaming import Streaming
from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.report.exporters import otlp
from paceline.report.exporters._stream import Stream, StreamedRun
from paceline.report.exporters.prometheus import Family
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample, Status


@pytest.fixture
def run_dir(make_spec: Callable[..., Any], tmp_path: Path) -> Path:
    """A run in progress, whose controller is this process."""
    spec = make_spec(steps=100)
    folder = store.create(tmp_path / "results", spec)
    campaign_file.write_plan(folder.parent, [spec])
    store.ProgressFile(folder, 0).mark(2, "forward")
    gauges = [
        GaugeSample(rank=0, host="node-a", at_s=1.0, device=gpu, power_w=300.0, throttle_reasons=()) for gpu in range(2)
    ]
    (folder / "samples-gauges-0.jsonl").write_text("".join(map(store.sample_line, gauges)))
    return folder


@pytest.fixture
def add_steps(run_dir: Path, make_step: Callable[..., Any]) -> Callable[..., None]:
    def add(*steps: int) -> None:
        with (run_dir / "samples-0.jsonl").open("a") as file:
            file.write("".join(store.sample_line(make_step(step=i, loss=5.0 - i, duration_s=0.5)) for i in steps))

    return add


def streaming(run_dir: Path, name: str, said: list[str] | None = None) -> Streaming:
    out = run_dir.parent.parent
    stream: Stream = plugins.load("exporters", name).stream(out)
    return Streaming(out, {name: stream}, (said if said is not None else []).append)


def end(run_dir: Path) -> None:
    """As a controller does, which replaces the lines of steps."""
    store.seal(run_dir, Status.OK, None, 100.0, 160.0, steps=store.read_unsealed(run_dir, 160.0, 100.0).steps)
    assert not (run_dir / "samples-0.jsonl").exists()


def test_tensorboard_grows_while_the_run_lasts(run_dir: Path, add_steps: Callable[..., None]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = run_dir.parent.parent / "tensorboard-live"

    def losses() -> list[tuple[int, float]]:
        (run,) = (path for path in folder.iterdir() if path.is_dir())
        events = accumulator.EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
        return [(e.step, float(e.tensor_proto.double_val[0])) for e in events.Tensors("loss/value")]

    add_steps(0, 1)
    sending = streaming(run_dir, "tensorboard")
    assert sending.look()
    assert losses() == [(0, 5.0), (1, 4.0)]
    add_steps(2)
    assert sending.look()
    assert losses() == [(0, 5.0), (1, 4.0), (2, 3.0)]
    add_steps(3)
    end(run_dir)
    assert not sending.look()
    sending.close()
    assert losses() == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 2.0)]


def test_mlflow_has_steps_parameters_and_the_end(run_dir: Path, add_steps: Callable[..., None]) -> None:
    mlflow = pytest.importorskip("mlflow")
    add_steps(0, 1)
    for _ in range(2):  # a stream that is started again replaces its run
        sending = streaming(run_dir, "mlflow")
        assert sending.look()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("test, live").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "RUNNING"
    assert run.data.metrics["gpu_power_w.sum"] == 600.0
    assert run.data.params["strategy"] == "ddp"
    end(run_dir)
    assert not sending.look()
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 5.0), (1, 4.0)]


def test_wandb_writes_an_offline_run(
    run_dir: Path, add_steps: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    add_steps(0, 1)
    sending = streaming(run_dir, "wandb")
    assert sending.look()
    end(run_dir)
    assert not sending.look()
    (file,) = (run_dir.parent.parent / "wandb-live").glob("wandb/offline-run-*/*.wandb")
    # A process of W&B's own writes it.
    deadline = time.monotonic() + 60
    while b"tokens_per_s" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"tokens_per_s" in content
    assert run_dir.name.encode() in content


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A server that takes OTLP over HTTP, and what it got."""
    found: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            found.append({"path": self.path, "key": self.headers.get("x-key"), "body": json.loads(text)})
            found[-1]["user"] = self.headers.get("Authorization")
            self.send_response(302 if "elsewhere" in self.path else 200)
            self.send_header("Location", "/stolen")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_GET(self) -> None:
            found.append({"path": self.path, "key": self.headers.get("x-key")})

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(otlp.ENDPOINT, f"http://127.0.0.1:{server.server_address[1]}/")
    monkeypatch.setenv(otlp.HEADERS, "x-key=a%20key")
    yield found
    server.shutdown()
    server.server_close()


def test_a_collector_gets_every_gauge_as_the_protocol_says(
    run_dir: Path, add_steps: Callable[..., None], collector: list[dict[str, Any]]
) -> None:
    add_steps(0, 1)
    assert streaming(run_dir, "otlp").look()
    (request,) = collector
    assert (request["path"], request["key"]) == ("/v1/metrics", "a key")
    metrics = {m["name"]: m for m in request["body"]["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    power = metrics["paceline_run_gpu_power_watts"]["gauge"]["dataPoints"]
    assert [point["asDouble"] for point in power] == [300.0, 300.0]
    labels = {a["key"]: a["value"]["stringValue"] for a in power[1]["attributes"]}
    assert (labels["node"], labels["gpu"], labels["experiment"]) == ("node-a", "1", "test")
    # The schema of the protocol itself, if its package is there.
    parse = pytest.importorskip("google.protobuf.json_format").Parse
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    message = parse(json.dumps(request["body"]), service.ExportMetricsServiceRequest())
    assert len(message.resource_metrics[0].scope_metrics[0].metrics) == len(metrics)


def test_keys_go_to_the_given_collector_only(collector: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    here = otlp.address().removesuffix("//v1/metrics").removesuffix("/v1/metrics")
    monkeypatch.setenv(otlp.METRICS_ENDPOINT, f"{here}/elsewhere")
    with pytest.raises(RequestError, match="answered 302"):
        otlp.send([], 1.0)
    monkeypatch.setenv(otlp.METRICS_ENDPOINT, here.replace("//", "//me:made%20up@") + "/v1/metrics")
    otlp.send([], 1.0)
    assert [one["path"] for one in collector] == ["/elsewhere", "/v1/metrics"], "a redirect would take the key along"
    assert collector[1]["user"] == "Basic " + base64.b64encode(b"me:made up").decode()


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("http://me:madeup@[/v1", ""),
        ("http://me:madeup@127.0.0.1:x/v1", ""),
        ("me:madeup@collector", ""),
        ("http://me:madeup@127.0.0.1:9/v1", ""),
        ("http://127.0.0.1:9/v1", "x-key=made%0Amadeup"),
        ("http://127.0.0.1:9/v1?key=madeup", ""),
    ],
)
def test_no_error_of_a_collector_repeats_a_secret(address: str, headers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(otlp.METRICS_ENDPOINT, address)
    monkeypatch.setenv(otlp.HEADERS, headers)
    with pytest.raises(RequestError) as caught:
        otlp.send([], 1.0)
    assert "madeup" not in str(caught.value)


def test_a_collector_that_is_gone_is_reported_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(otlp.ENDPOINT, "http://127.0.0.1:9")
    said: list[str] = []
    sending = streaming(run_dir, "otlp", said)
    assert sending.look()
    assert sending.look()
    assert len(said) == 1
    assert said[0].startswith("otlp: otlp: cannot send to http://127.0.0.1:9/v1/metrics (")


def test_a_family_that_counts_is_a_sum() -> None:
    energy = Family("gpu_energy_joules_total", "Energy.", "counter")
    energy.add(5.0, {"gpu": 0})
    energy.add(float("nan"), {"gpu": 1})
    (metric,) = otlp.document([energy], 1.0)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert metric["sum"]["isMonotonic"]
    assert [point["asDouble"] for point in metric["sum"]["dataPoints"]] == [5.0]


def test_wrong_requests_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["stream", str(tmp_path), "--to", "html"]) == 2
    assert "--to: got 'html', expected one of mlflow, otlp, tensorboard, wandb." in capsys.readouterr().err
    assert cli.main(["stream", str(tmp_path), "--to", "otlp"]) == 2
    assert "where nothing runs" in capsys.readouterr().err


def test_a_foreign_name_stays_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    stream = plugins.load("exporters", "tensorboard").stream(tmp_path)
    run = StreamedRun(experiment="../..", run="r", title="/etc/<b>", axes={}, began_at=1.0)
    stream.write(run, [])
    stream.close()
    (file,) = tmp_path.glob("tensorboard-live/*/events*")
    assert file.parent.name == ".._.. _etc__b_"
