"""`paceline stream`: running campaigns to trackers and collectors, from the run directories alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from paceline.campaign.live.metrics_endpoint import campaign_families, named_views, node_families
from paceline.campaign.live.nodes import CampaignWatch, Look, RunWatch, Step
from paceline.campaign.live.progress import title
from paceline.errors import PacelineError
from paceline.report.exporters._stream import Stream, StreamedPoint, StreamedRun
from paceline.results import campaign_file
from paceline.results.campaign_file import CampaignView
from paceline.results.records import Status


@dataclass
class _Followed:
    """One campaign and the run of it that is streamed."""

    watch: CampaignWatch
    run: RunWatch | None = None
    about: StreamedRun | None = None


@dataclass
class Streaming:
    """Sends to every stream. What one of them does not take is reported once and does not stop the others."""

    out: Path
    streams: Mapping[str, Stream]
    notify: Callable[[str], None]
    _campaigns: dict[str, _Followed] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)

    def look(self) -> bool:
        """Send what is new; False if nothing is running any more."""
        views = named_views(campaign_file.read_views(self.out), self.out)
        running = {name: view for name, view in views.items() if view.running}
        for name, view in running.items():
            self._campaigns.setdefault(name, _Followed(CampaignWatch(view.experiment)))
        looks: dict[str, Look] = {}
        for name, followed in list(self._campaigns.items()):
            look = followed.watch.look()
            if followed.run is not None and followed.watch.run is not followed.run:
                self._end(followed)
            if look is not None:
                looks[name] = look
                self._write(name, followed, look)
            if name not in running:
                self._end(followed)
                del self._campaigns[name]
        self._gauges(views, looks)
        return bool(running)

    def _write(self, name: str, followed: _Followed, look: Look) -> None:
        if followed.about is None or followed.about.run != look.pulse.spec.run_id:
            spec = look.pulse.spec
            followed.run = followed.watch.run
            followed.about = StreamedRun(
                experiment=name, run=spec.run_id, title=title(spec), axes=spec.axes(), began_at=look.pulse.began_at
            )
        about = followed.about
        points = points_of(look.steps, look)
        system = system_values(look)
        if system:
            points.append(StreamedPoint(look.pulse.step, time.time(), system))
        if points:
            self._each(lambda stream: stream.write(about, points))

    def _end(self, followed: _Followed) -> None:
        """The last steps of a run that is over, and how it ended."""
        run, about = followed.run, followed.about
        followed.run = followed.about = None
        if run is None or about is None:
            return
        rest = [_point(step, run.spec.tokens_per_step if run.spec.is_trained else 0) for step in run.last_steps()]
        end = campaign_file.read_end(run.run_dir)
        is_ok = end is not None and end.status == Status.OK
        if rest:
            self._each(lambda stream: stream.write(about, rest))
        self._each(lambda stream: stream.end(about, is_ok))

    def _gauges(self, views: Mapping[str, CampaignView], looks: Mapping[str, Look]) -> None:
        families = [*campaign_families(views), *node_families(looks)]
        self._each(lambda stream: stream.gauges(families, time.time()))

    def close(self) -> None:
        for followed in self._campaigns.values():
            self._end(followed)
        self._each(lambda stream: stream.close())

    def _each(self, call: Callable[[Stream], None]) -> None:
        for name, stream in self.streams.items():
            try:
                call(stream)
            except PacelineError as error:
                if (text := f"{name}: {error}") not in self._reported:
                    self._reported.add(text)
                    self.notify(text)


def points_of(steps: Sequence[Step], look: Look) -> list[StreamedPoint]:
    spec = look.pulse.spec
    return [_point(step, spec.tokens_per_step if look.pulse.tokens_per_s else 0) for step in steps]


def _point(step: Step, tokens: int) -> StreamedPoint:
    values = {"step_time_s": step.duration_s}
    if step.loss is not None:
        values["loss"] = step.loss
    if tokens and step.duration_s > 0:
        values["tokens_per_s"] = tokens / step.duration_s
    return StreamedPoint(step.step, time.time(), values)


def system_values(look: Look) -> dict[str, float]:
    """All GPUs of a run in a few numbers; a collector of gauges has each of them."""
    gpus = [gpu for node in look.nodes for gpu in node.gpus]

    def known(name: str) -> list[float]:
        return [value for gpu in gpus if (value := getattr(gpu, name)) is not None]

    chosen: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
        ("gpu_utilisation_ratio.mean", "utilisation_ratio", fmean),
        ("gpu_memory_used_bytes.max", "memory_used_bytes", max),
        ("gpu_power_w.sum", "power_w", sum),
        ("gpu_temperature_c.max", "temperature_c", max),
        ("gpu_sm_clock_hz.min", "sm_clock_hz", min),
    )
    values = {metric: reduce(found) for metric, name, reduce in chosen if (found := known(name))}
    if any(gpu.throttle_reasons is not None for gpu in gpus):
        values["gpus_throttled"] = float(sum(bool(gpu.throttle_reasons) for gpu in gpus))
    cpu = [node.cpu_ratio for node in look.nodes if node.cpu_ratio is not None]
    return values | ({"host_cpu_ratio.mean": fmean(cpu)} if cpu else {})
