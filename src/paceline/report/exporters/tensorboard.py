"""tensorboard/: an event file per cell with its scalars, curve of step times and hyperparameters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.exporters._cells import STEP_CURVE, require_package, tracked_cells
from paceline.report.exporters._folder import check_owned, mark_owned, replacing
from paceline.report.exporters._stream import StreamedPoint, StreamedRun
from paceline.report.exporters.prometheus import Family

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"
LIVE_FOLDER = "tensorboard-live"
LONGEST_NAME_BYTES = 200


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
            run = fresh / safe_name(cell.name)
            run.mkdir()
            with (run / f"events.out.tfevents.{at_s:.0f}.paceline").open("wb") as file:
                writer = RecordWriter(file)
                for event in events:
                    writer.write(event.SerializeToString())
    return [directory / FOLDER]


def stream(directory: Path) -> TensorboardStream:
    """An event file per running run, below tensorboard-live/."""
    require_package("tensorboard", "tensorboard")
    check_owned(directory / LIVE_FOLDER)
    return TensorboardStream(directory / LIVE_FOLDER)


class TensorboardStream:
    """Event files that grow. A stream that is started again writes those of its runs again, from their first step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, IO[bytes]] = {}

    def write(self, run: StreamedRun, points: Sequence[StreamedPoint]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [
            Event(wall_time=point.at_s, step=point.step, summary=_scalar(name, value))
            for point in points
            for name, value in point.values.items()
        ]
        if run.run not in self._files:
            mark_owned(self._folder)
            folder = self._folder / safe_name(f"{run.experiment} {run.title}")
            folder.mkdir(parents=True, exist_ok=True)
            self._files[run.run] = (folder / f"events.out.tfevents.{run.began_at:.0f}.{run.run}").open("wb")
            events.insert(0, Event(wall_time=run.began_at, file_version="brain.Event:2"))
        writer = RecordWriter(self._files[run.run])
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()

    def gauges(self, families: Sequence[Family], at_s: float) -> None: ...

    def end(self, run: StreamedRun, is_ok: bool) -> None:
        if file := self._files.pop(run.run, None):
            file.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def safe_name(text: str) -> str:
    """TensorBoard names a run by its folder; a path of several parts would make a tree of runs. A file system takes 255
    bytes: of a longer name the beginning and the end are kept, which differ, and a digest.

    >>> safe_name("ddp ../x"), len(safe_name("x" * 300))
    ('ddp .._x', 197)
    """
    name = re.sub(r"[^\w.,:=() -]", "_", text)
    if len(name.encode()) <= LONGEST_NAME_BYTES:
        return name
    begin, end = name.encode()[:120].decode(errors="ignore"), name.encode()[-60:].decode(errors="ignore")
    return f"{begin}_{hashlib.sha256(name.encode()).hexdigest()[:15]}_{end}"


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
