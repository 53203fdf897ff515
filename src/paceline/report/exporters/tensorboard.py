"""tensorboard/: an event file per cell with its scalars, curve of step times and hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.exporters._cells import STEP_CURVE, TrackedCell, require_package, tracked_cells
from paceline.report.exporters._folder import check_owned, replacing

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"


def check(directory: Path) -> None:
    require_package("tensorboard", "tensorboard")
    check_owned(directory / FOLDER)


def export(report: Report, directory: Path) -> list[Path]:
    """The folder of event files; the same report gives the same bytes, and a second export replaces the first."""
    check(directory)
    with replacing(directory / FOLDER) as fresh:
        for cell in tracked_cells(report):
            _write(cell, report, fresh)
    return [directory / FOLDER]


def _write(cell: TrackedCell, report: Report, folder: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    # TensorBoard names a run by its folder; a path of several parts would make a tree of runs.
    run = folder / re.sub(r"[^\w.,:=() -]", "_", cell.name)
    run.mkdir()
    path = run / f"events.out.tfevents.{report.created_at:.0f}.paceline"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in _events(cell, report.created_at):
            writer.write(event.SerializeToString())


def _events(cell: TrackedCell, at_s: float) -> Iterator[Event]:
    from tensorboard.compat.proto.event_pb2 import Event

    yield Event(wall_time=at_s, file_version="brain.Event:2")
    yield Event(wall_time=at_s, step=0, summary=_hyperparameters(cell, at_s))
    for name, value in cell.scalars.items():
        yield Event(wall_time=at_s, step=0, summary=_scalar(_tag(name), value))
    for step, seconds in enumerate(cell.steps_s):
        yield Event(wall_time=at_s, step=step, summary=_scalar(_tag(STEP_CURVE), seconds))


def _tag(name: str) -> str:
    """TensorBoard groups by what stands before the first slash: a metric and its bounds share one."""
    if "/" in name:
        return name
    stem, dot, bound = name.partition(".")
    return f"{stem}/{bound}" if dot else f"{stem}/value"


def _scalar(tag: str, value: float) -> Summary:
    """A rank-0 tensor marked for the scalars dashboard, in doubles: floats would round what metrics.csv says."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE

    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = SummaryMetadata(plugin_data=plugin, data_class=1)
    tensor = TensorProto(dtype=DT_DOUBLE, double_val=[value])
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _hyperparameters(cell: TrackedCell, at_s: float) -> Summary:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    about = {"cell": cell.cell, "status": cell.status, "certified": cell.certified}
    return hparams_pb({**cell.axes, **about}, trial_id=cell.cell, start_time_secs=at_s)
