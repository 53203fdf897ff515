"""mlflow.db: an MLflow run per cell with parameters, metrics and tags; MLFLOW_TRACKING_URI names another store."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.errors import RequestError
from paceline.report.exporters._cells import STEP_CURVE, TrackedCell, require_package, tracked_cells

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

DATABASE = "mlflow.db"
DIGEST = "paceline.digest"
SQLITE = b"SQLite format 3\0"
# MLflow's limit of one request.
MOST_METRICS = 1000


def check(directory: Path) -> None:
    """SQLAlchemy and Alembic serve the local file; the folder store that needs neither is refused by MLflow 3.

    A store elsewhere is asked for an answer, so that one that gives none is known before anything is written.
    """
    asked = os.environ.get("MLFLOW_TRACKING_URI")
    for module in ("mlflow", *(() if asked else ("sqlalchemy", "alembic"))):
        require_package(module, "mlflow")
    if asked:
        with _named_failures(f"MLFLOW_TRACKING_URI: got {asked!r}, which MLflow cannot use"):
            _client(asked).search_experiments(max_results=1)
    else:
        _check_database(directory / DATABASE)


def _check_database(database: Path) -> None:
    if not database.is_file():
        return
    with database.open("rb") as file:
        begins = file.read(len(SQLITE))
    # SQLite takes an empty file for a new database.
    if begins not in (b"", SQLITE):
        raise RequestError(f"{database}: is no SQLite database; move it, and export again")


def export(report: Report, directory: Path) -> list[Path]:
    """A cell whose findings are there already is left alone; one whose findings changed replaces its older run."""
    check(directory)
    asked = os.environ.get("MLFLOW_TRACKING_URI")
    database = directory.resolve() / DATABASE
    directory.mkdir(parents=True, exist_ok=True)
    artifacts = None if asked else (directory.resolve() / "mlartifacts").as_uri()
    with _named_failures(f"{asked or database}: MLflow could not write there"):
        client = _client(asked or f"sqlite:///{database}")
        experiment = _experiment(client, report.title, artifacts)
        known = {run.data.tags.get("paceline.cell"): run for run in _runs(client, experiment)}
        for cell in tracked_cells(report):
            _settle(client, experiment, report, cell, known.get(cell.cell))
    return [] if asked else [directory / DATABASE]


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """What MLflow and its database raise becomes one sentence, without the password that an address may hold."""
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
        raise RequestError(re.sub(r"//\S*@", "//", f"{what} ({reason})")) from None


def _client(uri: str) -> MlflowClient:
    # MLflow reports its own use over the network unless told otherwise; an export must not.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # By default a server that is not there is asked for many minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _experiment(client: MlflowClient, title: str, artifacts: str | None) -> str:
    known = client.get_experiment_by_name(title)
    return str(known.experiment_id if known else client.create_experiment(title, artifact_location=artifacts))


def _runs(client: MlflowClient, experiment: str) -> Iterator[Run]:
    token = None
    while True:
        page = client.search_runs([experiment], max_results=MOST_METRICS, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _settle(client: MlflowClient, experiment: str, report: Report, cell: TrackedCell, known: Run | None) -> None:
    """The digest is written last, so a run that an interrupted export left is replaced by the next."""
    if known is not None and known.data.tags.get(DIGEST) == cell.digest:
        return
    if known is not None:
        client.delete_run(known.info.run_id)
    at_ms = int(report.created_at * 1000)
    run = client.create_run(experiment, start_time=at_ms, tags=_tags(report, cell), run_name=cell.name).info.run_id
    for name, value in cell.axes.items():
        client.log_param(run, name, value)
    metrics = _metrics(cell, at_ms)
    while batch := list(itertools.islice(metrics, MOST_METRICS)):
        client.log_batch(run, metrics=batch)
    client.set_tag(run, DIGEST, cell.digest)
    client.set_terminated(run, "FINISHED" if cell.status == "ok" else "FAILED", end_time=at_ms)


def _tags(report: Report, cell: TrackedCell) -> dict[str, str]:
    found = {
        "cell": cell.cell,
        "version": report.paceline_version,
        "status": cell.status,
        "certified": str(cell.certified).lower(),
        "runs": " ".join(cell.runs),
        "reasons": "; ".join(cell.reasons),
    }
    return {f"paceline.{name}": text for name, text in found.items() if text}


def _metrics(cell: TrackedCell, at_ms: int) -> Iterator[Metric]:
    from mlflow.entities import Metric

    for name, value in cell.scalars.items():
        # Letters, digits, and "_-. :/" are all that MLflow takes in a name.
        yield Metric(re.sub(r"[^\w. :/-]", "_", name), value, at_ms, 0)
    for step, seconds in enumerate(cell.steps_s):
        yield Metric(STEP_CURVE, seconds, at_ms, step)
