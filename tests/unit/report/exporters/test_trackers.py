"""What trackers of experiments are given is read back with their own readers, and is there once however often."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.analysis.findings import Report
from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.report.exporters import _cells
from paceline.report.exporters._folder import OWNER, replacing

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
BLOCK = 32768


def changed(report: Report) -> Report:
    """The same report after ddp on two processes became slower."""
    first, *rest = report.measurements
    assert (first.metric, first.axes["strategy"]) == ("tokens_per_s", "ddp")
    return dataclasses.replace(report, measurements=(dataclasses.replace(first, value=9000.0), *rest))


# --- what all of them are given ---


def test_every_cell_is_there_with_its_end_and_only_known_numbers(report: Report) -> None:
    cells = {cell.name.rpartition(" (")[0]: cell for cell in _cells.tracked_cells(report)}
    assert len(cells) == 8
    ddp = cells["ddp, gpt-tiny, 2 processes"]
    assert ddp.scalars["tokens_per_s"] == 12345.0
    assert ddp.scalars["tokens_per_s.low"] == pytest.approx(12345 * 0.9955)
    assert "mfu_ratio" not in ddp.scalars
    assert (ddp.certified, ddp.status, ddp.steps_s) == (True, "ok", report.distributions[ddp.cell])
    invalid = cells["zero:stage=3, gpt-tiny, 2 processes"]
    assert (invalid.certified, invalid.status) == (False, "invalid")
    burst = cells["ddp, gpt-13b, 2 processes"]
    assert (dict(burst.scalars), burst.reasons) == ({}, ("out of memory on rank 1 in backward",))


def test_a_sweep_within_a_cell_keeps_its_points_apart(report: Report) -> None:
    first = report.measurements[0]
    points = tuple(
        dataclasses.replace(first, metric="matmul_flops_per_s", value=size * 1e9, axes={**first.axes, "size": size})
        for size in (256, 512)
    )
    scalars = _cells.tracked_cells(dataclasses.replace(report, measurements=points))[0].scalars
    assert {name for name in scalars if "." not in name} == {
        "matmul_flops_per_s/size 256",
        "matmul_flops_per_s/size 512",
    }


def test_a_number_that_is_not_finite_is_no_number(report: Report) -> None:
    first = dataclasses.replace(report.measurements[0], value=math.inf, low=math.nan, high=None)
    assert _cells.tracked_cells(dataclasses.replace(report, measurements=(first,)))[0].scalars == {}


def test_the_digest_follows_the_findings_and_nothing_else(report: Report) -> None:
    digests = [cell.digest for cell in _cells.tracked_cells(report)]
    later = dataclasses.replace(report, created_at=report.created_at + 60)
    assert [cell.digest for cell in _cells.tracked_cells(later)] == digests
    other = [cell.digest for cell in _cells.tracked_cells(changed(report))]
    assert [a == b for a, b in zip(digests, other, strict=True)] == [False] + [True] * 7


# --- folders that are replaced whole ---


def test_a_folder_that_somebody_else_made_is_refused_and_kept(tmp_path: Path, golden: object) -> None:
    theirs = tmp_path / "tensorboard"
    theirs.mkdir()
    (theirs / "precious").write_text("1")
    with pytest.raises(RequestError) as caught, replacing(theirs):
        raise AssertionError("must not be entered")
    assert str(caught.value) == golden
    assert (theirs / "precious").read_text() == "1"


def test_after_an_error_the_old_folder_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    with replacing(folder) as fresh:
        (fresh / "file").write_text("old")
    with contextlib.suppress(OSError), replacing(folder) as fresh:
        (fresh / "file").write_text("new")
        raise OSError("disk full")
    assert (folder / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"tensorboard"}


def test_what_a_killed_export_left_is_swept_by_the_next_and_that_of_a_living_one_is_kept(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f".wandb.{gone.pid}.tmp", f".wandb.{gone.pid}.old", f".wandb.{os.getppid()}.tmp", ".wandb.mine.tmp"):
        (tmp_path / name).mkdir()
    with replacing(tmp_path / "wandb"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"wandb", f".wandb.{os.getppid()}.tmp", ".wandb.mine.tmp"}


# --- a tracker that does not answer ---


NO_SERVER = "http://someone:secret@127.0.0.1:1"


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("mlflow", {"MLFLOW_TRACKING_URI": NO_SERVER}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "bogus://x"}),
        ("wandb", {"WANDB_MODE": "online"}),
        ("wandb", {"WANDB_MODE": "bogus"}),
    ],
)
def test_a_tracker_that_cannot_be_used_is_one_sentence_and_nothing_is_written(
    name: str,
    variables: dict[str, str],
    tmp_path: Path,
    make_run: Any,
    make_spec: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: object,
) -> None:
    pytest.importorskip(name, reason=f"pip install 'paceline[{name}]'")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the login of whoever runs the tests is not meant
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    make_run(tmp_path, make_spec())
    before = set(tmp_path.rglob("*"))
    assert cli.main(["report", str(tmp_path), "--format", "csv", "--format", name]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("paceline: ")
    assert error == golden
    assert "secret" not in error
    assert set(tmp_path.rglob("*")) == before


def test_a_server_that_is_not_there_is_given_up_soon_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'paceline[mlflow]'")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    # Set and deleted, so that what the exporter sets is undone at the end.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    plugins.load("exporters", "mlflow")._client("http://127.0.0.1:1")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"


@pytest.mark.parametrize(("content", "known_by"), [(b"my notes", "check"), (b"SQLite format 3\0broken", "export")])
def test_a_database_that_is_none_is_one_sentence_and_stays(
    content: bytes, known_by: str, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'paceline[mlflow]'")
    pytest.importorskip("alembic", reason="pip install 'paceline[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").write_bytes(content)
    exporter = plugins.load("exporters", "mlflow")
    # What the first bytes do not tell is found out by the export alone.
    attempt = {"check": lambda: exporter.check(tmp_path), "export": lambda: exporter.export(report, tmp_path)}[known_by]
    with pytest.raises(RequestError) as caught:
        attempt()
    assert str(caught.value) == golden
    assert "mlflow.db" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "mlflow.db").read_bytes() == content


# --- a package that is missing ---


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_one_sentence_and_nothing_is_written(
    name: str,
    tmp_path: Path,
    make_run: Any,
    make_spec: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
    golden: object,
) -> None:
    make_run(tmp_path, make_spec())
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    before = set(tmp_path.rglob("*"))
    assert cli.main(["report", str(tmp_path), "--format", "csv", "--format", name]) == 2
    error = capsys.readouterr().err
    assert error == golden
    assert f"{name}" in error
    assert error.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", PACKAGES)
def test_loading_an_exporter_does_not_import_its_package(name: str) -> None:
    code = f"import sys; from paceline.experiment.plugins import load; load('exporters', {name!r}); "
    code += f"print({name!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- TensorBoard ---


def test_tensorboard_reads_what_was_measured(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'paceline[tensorboard]'")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.util.tensor_util import make_ndarray

    (folder,) = plugins.load("exporters", "tensorboard").export(report, tmp_path)
    read = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(folder)).Reload()
    runs = {name.rpartition(" (")[0]: name for name in read.Runs()}
    assert len(runs) == 8
    ddp = runs["ddp, gpt-tiny, 2 processes"]
    (event,) = read.Tensors(ddp, "tokens_per_s/value")
    assert make_ndarray(event.tensor_proto).item() == 12345.0
    assert event.wall_time == report.created_at
    curve = [make_ndarray(e.tensor_proto).item() for e in read.Tensors(ddp, "step_time_s/steps")]
    assert tuple(curve) == report.distributions["ddp-2-cell"]
    assert "mfu_ratio/value" not in read.Runs()[ddp]["tensors"]
    assert tensorboard_hyperparameters(read, ddp)["strategy"] == "ddp"
    assert tensorboard_hyperparameters(read, ddp)["world_size"] == 2.0


def tensorboard_hyperparameters(read: Any, run: str) -> dict[str, Any]:
    from tensorboard.plugins.hparams import metadata

    content = read.SummaryMetadata(run, metadata.SESSION_START_INFO_TAG).plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def test_tensorboard_files_are_the_same_twice_and_follow_a_change(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'paceline[tensorboard]'")
    export = plugins.load("exporters", "tensorboard").export

    def content() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("events.*")}

    export(report, tmp_path)
    first = content()
    export(report, tmp_path)
    assert content() == first
    assert (tmp_path / "tensorboard" / OWNER).is_file()
    export(changed(report), tmp_path)
    assert content().keys() == first.keys()
    assert content() != first


# --- MLflow ---


def mlflow_runs(directory: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "quick"]
    runs = client.search_runs([experiment.experiment_id])
    assert len({r.info.run_name for r in runs}) == len(runs)
    return {r.info.run_name.rpartition(" (")[0]: r for r in runs}


def test_mlflow_holds_each_cell_once_and_as_it_is_now(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'paceline[mlflow]'")
    pytest.importorskip("alembic", reason="pip install 'paceline[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    export = plugins.load("exporters", "mlflow").export
    assert export(report, tmp_path) == [tmp_path / "mlflow.db"]
    first = mlflow_runs(tmp_path)
    assert len(first) == 8
    ddp = first["ddp, gpt-tiny, 2 processes"]
    assert (ddp.data.metrics["tokens_per_s"], ddp.data.params["world_size"]) == (12345.0, "2")
    assert (ddp.data.tags["paceline.certified"], ddp.info.status) == ("true", "FINISHED")
    assert first["ddp, gpt-13b, 2 processes"].info.status == "FAILED"
    assert "mfu_ratio" not in ddp.data.metrics

    export(report, tmp_path)
    assert {r.info.run_id for r in mlflow_runs(tmp_path).values()} == {r.info.run_id for r in first.values()}

    export(changed(report), tmp_path)
    after = mlflow_runs(tmp_path)
    assert after["ddp, gpt-tiny, 2 processes"].data.metrics["tokens_per_s"] == 9000.0
    assert after["ddp, gpt-tiny, 2 processes"].info.run_id != ddp.info.run_id
    kept = {name for name in first if after[name].info.run_id == first[name].info.run_id}
    assert kept == set(first) - {"ddp, gpt-tiny, 2 processes"}


# --- Weights & Biases ---


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a LevelDB log (crc, length and type before each piece) of W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture
def two_cells(report: Report) -> Report:
    """Each wandb run starts a process of its own: two tell as much as eight."""
    kept = ("ddp-2-cell", "ddp-13b-cell")
    return dataclasses.replace(report, runs=tuple(r for r in report.runs if r.cell in kept))


def test_wandb_writes_offline_runs_that_its_messages_read(
    two_cells: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="pip install 'paceline[wandb]'")
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    export = plugins.load("exporters", "wandb").export
    export(two_cells, tmp_path)
    export(two_cells, tmp_path)
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    records = {run.display_name: list(wandb_records(file)) for file in files for run in [first_run(file)]}
    ddp = next(found for name, found in records.items() if name.startswith("ddp, gpt-tiny"))
    summary = {u.key: u.value_json for r in ddp if r.HasField("summary") for u in r.summary.update}
    assert float(summary["tokens_per_s"]) == 12345.0
    steps = [i.value_json for r in ddp if r.HasField("history") for i in r.history.item if curve_key(i)]
    assert tuple(map(float, steps)) == two_cells.distributions["ddp-2-cell"]
    config = {u.key: u.value_json for r in ddp if r.HasField("run") for u in r.run.config.update}
    assert config["strategy"] == '"ddp"'
    everything = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert str(tmp_path).encode() not in everything
    assert str(Path.cwd()).encode() not in everything


def first_run(path: Path) -> Any:
    return next(record.run for record in wandb_records(path) if record.HasField("run"))


def curve_key(item: Any) -> bool:
    return (item.key or ".".join(item.nested_key)) == _cells.STEP_CURVE


def test_names_that_no_file_system_takes_are_shortened_and_stay_apart() -> None:
    from paceline.report.exporters import tensorboard

    long = [tensorboard.safe_name(f"{'x' * 300}{end}{'y' * 100}") for end in "ab"]
    assert len(set(long)) == 2
    assert max(len(name.encode()) for name in (*long, tensorboard.safe_name("\u00fc" * 300))) <= 200
    assert tensorboard.safe_name("../../etc (abc)") == ".._.._etc (abc)"


# --- addresses and names that are not as they should be ---


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server of MLflow that sends everybody to another one, whose requests these are."""
    asked: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None: ...

    class Given(Other):
        def do_POST(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{other.server_address[1]}{self.path}")
            self.end_headers()

    other, given = (http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Other, Given))
    for server in (other, given):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{given.server_address[1]}")
    yield asked
    for server in (other, given):
        server.shutdown()
        server.server_close()


def test_results_go_to_the_given_address_only(elsewhere: list[str], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="error code 307"):
        plugins.load("exporters", "mlflow").check(tmp_path)
    assert elsewhere == []


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/?api_key=a1b2c3d4e5f6g7h8",
        "postgresql://u:a1b2c3d4e5f6g7h8 x@h/db",
        "x://u:a1b2c3d4e5f6g7h8@h",
    ],
)
def test_no_error_repeats_a_key_of_the_address(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RequestError) as caught:
        plugins.load("exporters", "mlflow").check(tmp_path)
    assert "a1b2c3d4e5f6g7h8" not in str(caught.value)


def test_axes_of_any_name_and_length_reach_mlflow(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    odd = {"lr[0]": 1, "../../x": 2, "/etc/passwd": "y" * 10_000, "z" * 400: 3, "\u00b2\n": 4}
    first = next(run for run in report.runs if not run.is_reference)
    runs = (dataclasses.replace(first, axes={**first.axes, **odd}),)
    plugins.load("exporters", "mlflow").export(dataclasses.replace(report, runs=runs), tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == report.title]
    (run,) = client.search_runs([experiment.experiment_id])
    assert {"lr_0_": "1", "__/__/x": "2", "__": "4"}.items() <= run.data.params.items()
    assert len(run.data.params["etc/passwd"]) == 6000
