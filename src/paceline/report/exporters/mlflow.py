"""mlflow.db: an MLflow run per cell with parameters, metrics and tags; MLFLOW_TRACKING_URI selects another store."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.errors import RequestError, Scalar
from paceline.host import redaction
from paceline.report.exporters._cells import STEP_CURVE, TrackedCell, require_package, tracked_cells
from paceline.report.exporters._stream import StreamedPoint, StreamedRun
from paceline.report.exporters.prometheus import Family

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DATABASE = "mlflow.db"
DIGEST, RUN_TAG = "paceline.digest", "paceline_run"
SQLITE = b"SQLite format 3\0"
# MLflow's limit of one request.
MOST_METRICS = 1000
# Its limit of the value of a parameter.
LONGEST_VALUE = 6000


def check(directory: Path) -> None:
    """The local file needs SQLAlchemy and Alembic; MLflow 3 refuses the directory store that needs neither.

    A remote store is queried, so that a failure is known before anything is written.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    for module in ("mlflow", *(() if uri else ("sqlalchemy", "alembic"))):
        require_package(module, "mlflow")
    database = directory / DATABASE
    if uri:
        with _named_failures(f"MLFLOW_TRACKING_URI: got {uri!r}, which MLflow cannot use"):
            _client(uri).search_experiments(max_results=1)
    elif database.is_file():
        with database.open("rb") as file:
            begins = file.read(len(SQLITE))
        # SQLite takes an empty file for a new database.
        if begins not in (b"", SQLITE):
            raise RequestError(f"{database}: not an SQLite database. Move it and export again.")


def export(report: Report, directory: Path) -> list[Path]:
    """A cell whose findings are there already is left alone; one whose findings changed replaces its older run."""
    check(directory)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    database = directory.resolve() / DATABASE
    directory.mkdir(parents=True, exist_ok=True)
    artifacts = None if uri else (directory.resolve() / "mlartifacts").as_uri()
    with _named_failures(f"{uri or database}: MLflow could not write there"):
        client = _client(uri or f"sqlite:///{database}")
        existing = client.get_experiment_by_name(report.title)
        experiment = str(
            existing.experiment_id if existing else client.create_experiment(report.title, artifact_location=artifacts)
        )
        known: dict[str | None, Run] = {}
        token: str | None = None
        while page := client.search_runs([experiment], max_results=MOST_METRICS, page_token=token):
            known |= {run.data.tags.get("paceline.cell"): run for run in page}
            token = page.token
            if not token:
                break
        for cell in tracked_cells(report):
            _settle(client, experiment, report, cell, known.get(cell.cell))
    return [] if uri else [directory / DATABASE]


def stream(directory: Path) -> MlflowStream:
    """A run per running run, in the store of `export`."""
    check(directory)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return MlflowStream(uri or f"sqlite:///{directory.resolve() / DATABASE}")


class MlflowStream:
    """Runs that grow. A stream that is started again replaces its own unfinished ones."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._runs: dict[str, str] = {}

    def write(self, run: StreamedRun, points: Sequence[StreamedPoint]) -> None:
        from mlflow.entities import Metric

        with _named_failures(f"{self._uri}: MLflow could not write there"):
            client = _client(self._uri)
            if run.run not in self._runs:
                self._runs[run.run] = self._started(client, run)
            metrics = [
                Metric(name, value, int(point.at_s * 1000), point.step)
                for point in points
                for name, value in point.values.items()
            ]
            for start in range(0, len(metrics), MOST_METRICS):
                client.log_batch(self._runs[run.run], metrics=metrics[start : start + MOST_METRICS])

    def _started(self, client: MlflowClient, run: StreamedRun) -> str:
        title = f"{run.experiment}, live"
        existing = client.get_experiment_by_name(title)
        experiment = str(existing.experiment_id if existing else client.create_experiment(title))
        for old in client.search_runs([experiment], filter_string=f"tags.{RUN_TAG} = '{run.run}'"):
            client.delete_run(old.info.run_id)
        tags = {RUN_TAG: run.run}
        made = client.create_run(experiment, start_time=int(run.began_at * 1000), tags=tags, run_name=run.title)
        _log_parameters(client, made.info.run_id, run.axes)
        return str(made.info.run_id)

    def gauges(self, families: Sequence[Family], at_s: float) -> None: ...

    def end(self, run: StreamedRun, is_ok: bool) -> None:
        if (known := self._runs.pop(run.run, None)) is not None:
            with _named_failures(f"{self._uri}: MLflow could not write there"):
                _client(self._uri).set_terminated(known, "FINISHED" if is_ok else "FAILED")

    def close(self) -> None: ...


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """Turn errors of MLflow and its database into one sentence, without passwords and keys that the address has."""
    from mlflow.exceptions import MlflowException

    expected: tuple[type[Exception], ...] = (MlflowException, ImportError, OSError)
    if importlib.util.find_spec("sqlalchemy") and importlib.util.find_spec("alembic"):
        from alembic.util import CommandError
        from sqlalchemy.exc import SQLAlchemyError

        expected = (*expected, SQLAlchemyError, CommandError)
    try:
        yield
    except expected as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RequestError(redaction.clean_text(re.sub(r"//[^/]*@", "//", f"{what} ({reason})"))) from None


def _client(uri: str) -> MlflowClient:
    # MLflow reports its own use over the network by default; an export must not.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # By default an unreachable server is retried for many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    # Results go to the given address only.
    os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _accepted(name: str) -> str:
    """MLflow takes letters, digits and "_-. :/" in a name, no path that leads elsewhere, and at most 250 characters."""
    return re.sub(r"[^A-Za-z0-9_. :/-]", "_", name).strip("/").replace("..", "__").replace("//", "/")[:250] or "_"


def _log_parameters(client: MlflowClient, run: str, axes: Mapping[str, Scalar]) -> None:
    for name, value in axes.items():
        client.log_param(run, _accepted(name), str(value)[:LONGEST_VALUE])


def _settle(client: MlflowClient, experiment: str, report: Report, cell: TrackedCell, known: Run | None) -> None:
    """The digest is written last, so a run that an interrupted export left is replaced by the next."""
    from mlflow.entities import Metric

    if known is not None and known.data.tags.get(DIGEST) == cell.digest:
        return
    if known is not None:
        client.delete_run(known.info.run_id)
    facts = {
        "cell": cell.cell,
        "version": report.paceline_version,
        "status": cell.status,
        "certified": str(cell.certified).lower(),
        "runs": " ".join(cell.runs),
        "reasons": "; ".join(cell.reasons),
    }
    tags = {f"paceline.{name}": text for name, text in facts.items() if text}
    at_ms = int(report.created_at * 1000)
    run = client.create_run(experiment, start_time=at_ms, tags=tags, run_name=cell.name).info.run_id
    _log_parameters(client, run, cell.axes)
    metrics = [Metric(_accepted(name), value, at_ms, 0) for name, value in cell.scalars.items()]
    metrics += [Metric(STEP_CURVE, seconds, at_ms, step) for step, seconds in enumerate(cell.steps_s)]
    for start in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run, metrics=metrics[start : start + MOST_METRICS])
    client.set_tag(run, DIGEST, cell.digest)
    client.set_terminated(run, "FINISHED" if cell.status == "ok" else "FAILED", end_time=at_ms)
