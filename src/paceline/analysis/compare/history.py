"""Each cell over time: one value per launch in the order they started, and where its level changed.

The same run repeated on another day counts as another launch. Every campaign is certified by itself, with a reference
from another one if it has none.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple, TypeVar

import numpy as np

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.cells import title_of, untitled_axes
from paceline.analysis.compare.comparable import is_search, rate_searched, status_of
from paceline.analysis.findings import BETTER, HIGHER, WORSE, ChangePoint, HistoryPoint, HistorySeries
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.ceilings import device_of
from paceline.analysis.served import equal_work, estimates, measurements, rate_search
from paceline.analysis.statistics import changepoints
from paceline.analysis.statistics.intervals import Array, seed_of, student_t
from paceline.analysis.training.certificate import certify_all
from paceline.analysis.training.metrics import BY_NAME, unit_of
from paceline.analysis.training.window import LAUNCH_COLUMNS, STEP_COLUMNS, Window, open_window
from paceline.errors import Scalar
from paceline.results.records import RunRecord, Status

SPEED, MEMORY = "tokens_per_s", "peak_memory_bytes"
# A chart of fewer launches shows no more than the table of cells.
FEWEST_SHOWN = 4
NOTHING_FOUND = "the search found no rate within its limits"

T = TypeVar("T")


def analyse(
    windows: Iterable[Window], fewest: int = FEWEST_SHOWN, asked: Iterable[RunRecord] = ()
) -> tuple[HistorySeries, ...]:
    """A series per cell, kind of device and metric with at least `fewest` launches; the caller passes valid ones.

    asked are launches of inference runs.
    """
    trained = _grouped(((w.record, w) for w in windows if len(w.steps)), fewest)
    answered = _grouped(((record, record) for record in asked), fewest)
    named = untitled_axes([each[0].record.spec.axes() for each in trained] + [r[0].axes() for r in answered])
    series = (s for found in trained for s in _cell(found, fewest, named))
    return (*series, *(s for found in answered for s in _served_cell(found, fewest, named)))


def _grouped(launches: Iterable[tuple[RunRecord, T]], fewest: int) -> list[list[T]]:
    """Launches by cell, kind of device and served model."""
    groups: defaultdict[tuple[object, ...], dict[tuple[str, float], T]] = defaultdict(dict)
    for record, launch in launches:
        # A copied folder contains the same launch again.
        # Another model behind the same address is another series.
        groups[record.spec.cell, device_of(record), record.other_model][record.spec.run_id, record.started_at] = launch
    return [list(found.values()) for found in groups.values() if len(found) >= fewest]


@dataclass(frozen=True, slots=True)
class Launches:
    """Valid launches (asked: inference runs), and the number of others for each reason."""

    windows: list[Window]
    dropped: Mapping[str, int]
    asked: list[RunRecord] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.windows) + len(self.asked)


def judge(launches: Sequence[RunRecord], lenders: Sequence[RunRecord] = ()) -> Launches:
    """Every certified kind of launch, judged with the newest ok reference if its campaign has none, and every inference
    launch.
    """
    by_start = sorted((*launches, *lenders), key=lambda record: record.started_at)
    proving = [record for record in by_start if _can_prove(record)]
    newest = {r.spec.group_work: campaign_of(r) for r in proving if not r.is_supplement}
    windows, asked, dropped = [], [], Counter[str]()
    for campaign in grouped(sorted(launches, key=lambda record: record.started_at), campaign_of).values():
        members = list({record.spec.run_id: record for record in campaign}.values())
        own = {r.spec.group_work for r in members if _can_prove(r) and not r.is_supplement}
        wanted = {r.spec.group_work for r in members} - own
        lent = [r for r in proving if r.spec.group_work in wanted and campaign_of(r) == newest.get(r.spec.group_work)]
        certificates = certify_all([*members, *lent])
        for record in filter(is_kept, members):
            status, reason = status_of(record, certificates.get(record.spec.run_id))
            if status is not Status.OK:
                dropped[": ".join(filter(None, (str(status), reason)))] += 1
            elif not record.steps and not record.requests:
                dropped["no step was recorded"] += 1
            elif is_search([record]) and rate_search.bracket(rate_searched([record])) is None:
                dropped[NOTHING_FOUND] += 1
            elif record.spec.serving:
                asked.append(record)
            else:
                windows.append(open_window(record))
    return Launches(windows, dict(dropped.most_common()), asked)


def is_kept(record: RunRecord) -> bool:
    """Whether launches of this kind are followed over time."""
    return (record.spec.is_certified or record.spec.serving is not None) and not record.proves_only


def _can_prove(record: RunRecord) -> bool:
    """A failed reference proves nothing and must not replace one from another campaign."""
    return record.proves_only and record.status is Status.OK


def campaign_of(record: RunRecord) -> str:
    return str(PurePath(record.path).parent)


# --- one cell ---


def _cell(windows: Sequence[Window], fewest: int, named: Sequence[str]) -> Iterator[HistorySeries]:
    ordered = sorted(windows, key=lambda w: (w.record.started_at, w.run))
    for metric in (SPEED, MEMORY):
        if metric == SPEED and any(w.record.shares_gpu for w in ordered):
            continue
        values = []
        for w in ordered:
            tokens, wall = (float(w.steps[:, STEP_COLUMNS.index(name)].sum()) for name in ("tokens", "wall"))
            column = "allocated" if w.record.spec.topology.device == "cuda" else "resident"
            memory = float(w.launch[0, LAUNCH_COLUMNS.index(column)])
            values.append(memory if metric == MEMORY else tokens / wall if wall > 0 else math.nan)
        known = [(w, v) for w, v in zip(ordered, values, strict=True) if math.isfinite(v) and v > 0]
        if len(known) >= fewest:
            about = unit_of(metric, ordered[0].record), BY_NAME[metric].better
            yield _series(metric, about, [w.record for w, _ in known], np.array([v for _, v in known]), named)


def _served_cell(records: Sequence[RunRecord], fewest: int, named: Sequence[str]) -> Iterator[HistorySeries]:
    """For a search its result; for any other run each load, of which a sweep has several."""
    ordered = sorted(records, key=lambda r: (r.started_at, r.spec.run_id))
    pairs = ((record, each) for record in ordered for each in _followed(record))
    for (load, metric), points in grouped(pairs, lambda pair: (pair[1].load, pair[1].metric)).items():
        if len(points) >= fewest:
            values = np.array([each.value for _, each in points])
            about = measurements.METRICS[metric]
            yield _series(metric, about, [r for r, _ in points], values, named, (load, points[0][1].axes))


class Followed(NamedTuple):
    """One number of one launch; load is None if it is the only one."""

    load: str | None
    metric: str
    value: float
    axes: Mapping[str, Scalar]


def _followed(record: RunRecord) -> Iterator[Followed]:
    if record.shares_gpu:
        return
    searched = rate_searched([record])
    if searched is not None and searched.value is not None:
        yield Followed(None, rate_search.METRIC, searched.value, searched.axes)
    for load in () if is_search([record]) else measurements.reliable_loads([record]):
        # Its position among the loads of one launch does not identify it over time.
        axes = {name: value for name, value in load.axes().items() if name != "stage"}
        for metric in equal_work.metrics_of(load):
            value = estimates.value(load, metric)
            if value is not None and value > 0:
                yield Followed(load.name, metric, value, axes)


def _series(
    metric: str,
    about: tuple[str, str],
    records: Sequence[RunRecord],
    values: Array,
    named: Sequence[str],
    of_load: tuple[str | None, Mapping[str, Scalar] | None] = (None, None),
) -> HistorySeries:
    """about is the metric's unit and direction; of_load the name and axes of one of several loads of a cell."""
    spec, (unit, better), (load, axes) = records[0].spec, about, of_load
    found = changepoints.splits(np.log(values), seed_of(*filter(None, (spec.cell, load, metric, "history"))))
    bounds = [0, *(split.at for split in found), len(values)]
    segments = np.searchsorted(bounds[1:-1], np.arange(len(values)), side="right")
    return HistorySeries(
        metric=metric,
        unit=unit,
        better=better,
        cell=spec.cell,
        label=", ".join(filter(None, (title_of(records[0].axes(), named), load))),
        axes=axes or records[0].axes(),
        points=tuple(
            HistoryPoint(
                run=record.spec.run_id,
                campaign=campaign_of(record),
                started_at=record.started_at,
                value=float(value),
                segment=int(segment),
            )
            for record, value, segment in zip(records, values, segments, strict=True)
        ),
        changes=tuple(
            _change(records, values, (bounds[i], split, bounds[i + 2]), better) for i, split in enumerate(found)
        ),
        note=None
        if len(values) >= changepoints.FEWEST
        else f"too few launches to search for a change: {len(values)}, expected at least {changepoints.FEWEST}",
    )


def _change(
    records: Sequence[RunRecord], values: Array, cut: tuple[int, changepoints.Split, int], better: str
) -> ChangePoint:
    start, (index, p_value), end = cut
    # Level after over level before, with Welch's 95 % interval of the logarithms, single outliers replaced.
    cleaned = changepoints.without_outliers(np.log(values))
    levels = before, after = cleaned[start:index], cleaned[index:end]
    errors = [float(x.var(ddof=1)) / len(x) for x in levels]
    penalty = sum(e * e / (len(x) - 1) for e, x in zip(errors, levels, strict=True))
    freedom = sum(errors) ** 2 / penalty if penalty > 0 else math.inf
    middle, half = float(after.mean() - before.mean()), student_t(freedom) * math.sqrt(sum(errors))
    throughout = fingerprint.separating(records[start:index], records[index:end])
    around = fingerprint.differences(records[index - 1 : index], records[index : index + 1])
    return ChangePoint(
        index=index,
        before_at=records[index - 1].started_at,
        after_at=records[index].started_at,
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        p_value=p_value,
        verdict=BETTER if (math.exp(middle) > 1) == (better == HIGHER) else WORSE,
        differences=throughout or around,
        throughout=bool(throughout),
    )
