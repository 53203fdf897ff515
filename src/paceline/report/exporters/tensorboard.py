"""tensorboard/: an event file per cell with its scalars, curve of step times and hyperparameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.exporters._cells import STEP_CURVE, require_package, tracked_cells
from paceline.report.exporters._folder import check_owned, replacing

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"


def check(directory: Path) -> None:
    require_package("tensorboard", "tensorboard")
    check_owned(directory / FOLDER)


def export(report: Report, directory: Path) -> list[Path]:
    """The folder of event files; the same report gives the same bytes, and a second export replaces the first."""
    check(directory)
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    at_s = report.created_at
    with replacing(directory / FOLDER) as fresh:
        for cell in tracked_cells(report):
            about = {"cell": cell.cell, "status": cell.status, "certified": cell.certified}
            settings = hparams_pb({**cell.axes, **about}, trial_id=cell.cell, start_time_secs=at_s)
            steps = enumerate(cell.steps_s)
            events = [
                Event(wall_time=at_s, file_version="brain.Event:2"),
                Event(wall_time=at_s, step=0, summary=settings),
                *(Event(wall_time=at_s, step=0, summary=_scalar(n, value)) for n, value in cell.scalars.items()),
                *(Event(wall_time=at_s, step=step, summary=_scalar(STEP_CURVE, s)) for step, s in steps),
            ]
            # TensorBoard names a run by its folder; a path of several parts would make a tree of runs.
            run = fresh / re.sub(r"[^\w.,:=() -]", "_", cell.name)
            run.mkdir()
            with (run / f"events.out.tfevents.{at_s:.0f}.paceline").open("wb") as file:
                writer = RecordWriter(file)
                for event in events:
                    writer.write(event.SerializeToString())
    return [directory / FOLDER]


def _scalar(name: str, value: float) -> Summary:
    """A rank-0 tensor marked for the scalars dashboard, in doubles: floats would round what metrics.csv says.

    TensorBoard groups tags by the part before the first slash: a metric and its bounds share a group.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE

    stem, _, bound = name.partition(".")
    tag = name if "/" in name else f"{stem}/{bound or 'value'}"
    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = SummaryMetadata(plugin_data=plugin, data_class=1)
    tensor = TensorProto(dtype=DT_DOUBLE, double_val=[value])
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
