"""Charts of the proof: losses over the reference with their tolerance, and one profiled step rank by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import Report, RunFinding
from paceline.analysis.findings.cell_axes import describe
from paceline.analysis.findings.training import RankStep
from paceline.experiment.layout import DIMENSIONS
from paceline.report.charts.chart import (
    AREA,
    COLOURS,
    GREY,
    LINES,
    PARTS,
    STACK,
    TRAIL,
    Axis,
    Chart,
    Point,
    Series,
    parts,
    strategies,
    thinned,
)
from paceline.report.text.cells import axes_of, cell_name, groups, kind_of, varying_axes, without_shared
from paceline.wording import format_number, places

BAND = "accepted"
MOST_STEPS = 200
MOST_PANELS = 6
MOST_RANKS = 64
# More parts than these are drawn as totals: a page of thousands of small rectangles is slow.
MOST_PARTS = 3000
COMPUTE, EXPOSED, IDLE = "compute", "communication that nothing hides", "idle"


def loss(report: Report) -> Iterator[Chart]:
    """A panel per group of equal work: every run's loss over that of the reference, with the band it must stay in."""
    colours = {s.name: s.colour for s in strategies(report)}
    labels = {row.cell: row.label for group in groups(report) for row in group.rows}
    works = list(dict.fromkeys(c.work for c in report.certificates if c.loss))[:MOST_PANELS]
    points: list[Point] = []
    names: dict[str, int] = {}
    curves = {work: [c for c in report.certificates if c.work == work and c.loss] for work in works}
    titles = {work: _work_name(report, ours[0].cell) for work, ours in curves.items()}
    panels, shared = without_shared(titles.values())
    for work, ours in curves.items():
        panel = panels[titles[work]] if len(works) > 1 else ""
        widest: dict[int, float] = {}
        for certificate in ours:
            curve = certificate.loss
            assert curve is not None
            name = labels.get(certificate.cell) or describe(axes_of(report, certificate.cell) or {}, ())
            names.setdefault(name, colours.get(name, GREY))
            steps = list(zip(curve.steps, curve.losses, curve.reference, curve.limits, strict=True))
            for step, own, base, limit in thinned(steps, MOST_STEPS):
                widest[step] = max(widest.get(step, 0.0), limit)
                points.append(
                    Point(
                        x=step,
                        y=100 * (own / base - 1) if base else 0.0,
                        group=panel,
                        series=name,
                        label=f"{name}, step {step}",
                        detail=f"loss {own:.5g}, reference {base:.5g}\naccepted within {limit:.2g}, relative",
                        drawn=TRAIL,
                        cells=(certificate.cell,),
                        runs=(certificate.run,),
                    )
                )
        band = Point(y=0.0, group=panel, series=BAND, drawn=AREA, cells=tuple(dict.fromkeys(c.cell for c in ours)))
        points += [
            replace(band, x=step, y=100 * limit, low=-100 * limit, high=100 * limit)
            for step, limit in sorted(widest.items())
        ]
    # Of several groups, the panels say it.
    kind = _kind(report, curves[works[0]][0].cell).removesuffix(": ") if len(works) == 1 else ""
    yield Chart(
        name="loss",
        title="Loss over the reference",
        subtitle=f"Every run{f' of the {kind}' if kind else ''} beside the one-process reference, in % of its loss; "
        "shaded: the deviation that rounding explains, by which a run is certified."
        f"{f' All panels: {shared}.' if shared else ''}",
        kind=LINES,
        x=Axis(label="step", ticks="round", shared=False),
        y=Axis(label="% of the reference", unit="%", zero=False, shared=False),
        points=tuple(points),
        series=(*(Series(name=n, colour=c) for n, c in names.items()), Series(name=BAND, colour=GREY)) if names else (),
    )


def _work_name(report: Report, cell: str) -> str:
    axes = axes_of(report, cell) or {}
    shown = [name for name in varying_axes(report) if axes.get(name) is not None]
    return _kind(report, cell) + describe({**axes, "strategy": None, "workload": None}, shown)


def _kind(report: Report, cell: str) -> str:
    return next((kind_of(run) for run in report.runs if run.cell == cell), "")


def ranks(report: Report) -> Iterator[Chart]:
    """One profiled optimizer step of every rank of the first run of each cell."""
    first: dict[str, RunFinding] = {}
    for run in report.runs:
        if run.rank_steps and not run.proves_only and run.status == "ok":
            first.setdefault(run.cell, run)
    named = varying_axes(report)
    first = {cell: run for cell, run in first.items() if len(run.rank_steps) > 1}
    lanes = [(cell_name(report, c, r.axes, named), step, r) for c, r in first.items() for step in r.rank_steps]
    lanes = lanes[:MOST_RANKS]
    short, shared = without_shared(name for name, _, _ in lanes)
    points: list[Point] = []
    shown = [step for _, step, _ in lanes]
    timed = all(step.timeline for step in shown) and sum(len(step.timeline) for step in shown) <= MOST_PARTS
    for name, step, run in lanes:
        if timed:
            points += _timeline(step, run, short[name])
            continue
        sent = {_over(dimension): s for dimension, s in step.by_dimension} or {EXPOSED: step.exposed_s}
        sizes = {COMPUTE: step.compute_s, **sent, IDLE: step.idle_s}
        drawn = [(word, 1e3 * s) for word, s in sizes.items() if s > 0]
        whole = sum(size for _, size in drawn)
        for i, (word, size) in enumerate(drawn):
            text = f"{format_number(whole, places(whole, None, None))} ms" if i == len(drawn) - 1 else ""
            hidden = f"\n{1e3 * step.hidden_s:.3g} ms of communication ran beside it" if word == COMPUTE else ""
            points.append(
                Point(
                    y=size,
                    label=f"rank {step.rank}",
                    group=short[name],
                    series=word,
                    text=text,
                    detail=f"{word}: {size:.3g} ms, {size / whole:.0%} of the step{hidden}",
                    cells=(run.cell,),
                    runs=(run.run,),
                )
            )
    dimensions = dict.fromkeys(p.series for p in points if p.series not in (COMPUTE, EXPOSED, IDLE))
    known = {point.series for point in points}
    # Idle time is the palest, like the ground.
    lull = [Series(name=IDLE, colour=COLOURS + PARTS - 1)] if IDLE in known else []
    steps = max((step.steps for step in shown), default=1)
    over = f"The timeline of {steps} step{'' if steps == 1 else 's'} under the profiler" if timed else "One step"
    yield Chart(
        name="ranks",
        title=f"{over}, rank by rank",
        subtitle="From the profile of a few steps after the measured window; the profiler itself adds some idle time."
        + (" All ranks begin together; each part is what filled most of 1 % of the time." if timed else "")
        + (" Communication that nothing hides, by dimension of the layout." if dimensions else "")
        + (f" All: {shared}." if shared else ""),
        kind=STACK,
        y=Axis(label="ms since the ranks lined up" if timed else "ms per optimizer step", unit="ms"),
        points=tuple(points),
        series=(*_coloured([word for word in (COMPUTE, EXPOSED, *dimensions) if word in known]), *lull),
        panel_px=560 if timed else 240,
    )


def _timeline(step: RankStep, run: RunFinding, group: str) -> Iterator[Point]:
    """The parts of a rank's steps in the order of time."""
    whole, at = sum(seconds for _, seconds in step.timeline), 0.0
    shares = {name: sum(s for other, s in step.timeline if other == name) / whole for name, _ in step.timeline}
    for i, (name, seconds) in enumerate(step.timeline):
        word = {"compute": COMPUTE, "communication": EXPOSED, "idle": IDLE}.get(name) or _over(name)
        last = i == len(step.timeline) - 1
        yield Point(
            y=1e3 * seconds,
            label=f"rank {step.rank}",
            group=group,
            series=word,
            text=f"{format_number(1e3 * whole, places(1e3 * whole, None, None))} ms" if last else "",
            detail=f"{word}: {1e3 * at:.3g} to {1e3 * (at + seconds):.3g} ms\n{shares[name]:.0%} of the time in all",
            cells=(run.cell,),
            runs=(run.run,),
        )
        at += seconds


def _coloured(words: Sequence[str]) -> tuple[Series, ...]:
    """Parts of a step that may be communication of many dimensions: what is more than the colours of parts, of which
    idle time has one, takes those of strategies, of which this chart has none."""
    own = PARTS - 1
    more = (Series(name=word, colour=COLOURS - 1 - i) for i, word in enumerate(words[own:]))
    return *parts(words[:own]), *more


def _over(dimension: str) -> str:
    return f"communication, {DIMENSIONS.get(dimension, dimension)}"
