"""wandb/: an offline Weights & Biases run per cell, for `wandb sync`; online only if WANDB_MODE=online says so."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.analysis.findings import Report
from paceline.errors import RequestError
from paceline.host import redaction
from paceline.report.exporters._cells import STEP_CURVE, require_package, tracked_cells
from paceline.report.exporters._folder import check_owned, mark_owned, replacing
from paceline.report.exporters._stream import StreamedPoint, StreamedRun
from paceline.report.exporters.prometheus import Family

FOLDER, LIVE_FOLDER = "wandb", "wandb-live"
MODES = ("offline", "online")


def check(directory: Path) -> None:
    """Reject an unknown mode and a missing login before anything is written."""
    require_package("wandb", "wandb")
    check_owned(directory / FOLDER)
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in MODES:
        raise RequestError(f"WANDB_MODE: got {mode!r}, expected {' or '.join(MODES)}.")
    if mode == "online":
        import wandb

        with _named_failures():
            # Never prompts; if there is a key, checks it with the server.
            has_key = bool(wandb.login(prompt=False))
        if not has_key:
            raise RequestError("WANDB_MODE=online: got no API key. Run `wandb login`, or set WANDB_API_KEY.")


def export(report: Report, directory: Path) -> list[Path]:
    """The folder of runs, one per cell. Ids follow from the findings, so syncing twice gives one run on the server."""
    check(directory)
    import wandb

    with _named_failures(), replacing(directory / FOLDER) as fresh:
        settings = _settings()
        for cell in tracked_cells(report):
            about = {"cell": cell.cell, "runs": list(cell.runs), "paceline_version": report.paceline_version}
            run = wandb.init(
                id=cell.digest,
                name=cell.name,
                project=os.environ.get("WANDB_PROJECT", "paceline"),
                group=report.title,
                config={**cell.axes, **about},
                tags=[cell.status[:64], "certified" if cell.certified else "not certified"],
                notes="; ".join(cell.reasons) or None,
                dir=str(fresh),
                mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
                settings=settings,
            )
            for name, value in cell.scalars.items():
                run.summary[name] = value
            for seconds in cell.steps_s:
                run.log({STEP_CURVE: seconds})
            run.finish(exit_code=0 if cell.status == "ok" else 1)
        # Keep what `wandb sync` reads: debug logs and links are about the exporting machine and a folder now gone.
        inner = fresh / FOLDER  # wandb makes a folder of its own inside the one it is given
        for path in inner.glob("*run-*-*"):
            path.rename(fresh / path.name)
            for part in ("logs", "tmp"):
                shutil.rmtree(fresh / path.name / part, ignore_errors=True)
        shutil.rmtree(inner, ignore_errors=True)
    return [directory / FOLDER]


def _settings() -> Any:
    """Findings alone: no code, command line, environment, console or gauges of the machine that exports."""
    import wandb

    return wandb.Settings(
        silent=True,
        quiet=True,
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )


def stream(directory: Path) -> WandbStream:
    """A run per running run: offline below wandb-live/, or online as WANDB_MODE says."""
    check(directory)
    check_owned(directory / LIVE_FOLDER)
    return WandbStream(directory / LIVE_FOLDER)


class WandbStream:
    """Runs that grow, under ids that follow from ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def write(self, run: StreamedRun, points: Sequence[StreamedPoint]) -> None:
        with _named_failures():
            if run.run not in self._runs:
                self._runs[run.run] = self._started(run)
            for point in points:
                # wandb takes steps in their order only; later values of a step are added to it.
                self._last[run.run] = max(self._last.get(run.run, 0), point.step)
                self._runs[run.run].log(dict(point.values), step=self._last[run.run])

    def _started(self, run: StreamedRun) -> Any:
        import wandb

        mark_owned(self._folder)
        return wandb.init(
            id=hashlib.sha256(f"{run.run} {run.began_at}".encode()).hexdigest()[:16],
            name=run.title,
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            group=run.experiment,
            config={**run.axes, "run": run.run},
            dir=str(self._folder),
            mode="online" if os.environ.get("WANDB_MODE") == "online" else "offline",
            settings=_settings(),
            reinit="create_new",
        )

    def gauges(self, families: Sequence[Family], at_s: float) -> None: ...

    def end(self, run: StreamedRun, is_ok: bool) -> None:
        if (known := self._runs.pop(run.run, None)) is not None:
            with _named_failures():
                known.finish(exit_code=0 if is_ok else 1)

    def close(self) -> None: ...


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Turn errors of wandb into one sentence; it rejects its own settings (WANDB_...) with a ValueError."""
    from wandb.errors import Error

    try:
        yield
    except (Error, ValueError) as error:
        reason = ", ".join(line.strip() for line in str(error).splitlines()[:3])
        raise RequestError(redaction.clean_text(f"--format wandb: wandb could not write ({reason})")) from None
