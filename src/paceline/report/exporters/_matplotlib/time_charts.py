"""Charts of time: every measured step as a dot under its quartiles, and the phases of a step stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.analysis.findings import Report
from paceline.report.exporters._matplotlib.arrangement import Arrangement, Family, Mark, arrange, metric
from paceline.report.exporters._matplotlib.bar_charts import NUMBER_SIZE, frame, room_for, say_missing, slot, slots
from paceline.report.exporters._matplotlib.canvas import INK, PALETTE, key, say
from paceline.wording import format_number, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT = "ms per optimizer step"
MOST_VECTOR_POINTS = 400
STRAGGLER_RATIO = 1.35  # steps slower than this many times the slowest cell's 95th percentile are counted, not drawn
# In the order of a step; each the slowest rank's, so that they may add up to more than the step.
PHASES = {
    "data_wait_s": ("waiting for data", PALETTE[5]),
    "h2d_s": ("host to device", PALETTE[3]),
    "forward_s": ("forward", PALETTE[4]),
    "backward_s": ("backward", PALETTE[0]),
    "optimizer_s": ("optimizer", PALETTE[2]),
}
REST = ("not in a phase", PALETTE[7])


# --- distribution --------------------------------------------------------------------------------------------------


def steps(report: Report) -> Arrangement:
    return arrange(report, metric("step_time_s"), sampled=True)


def draw_steps(report: Report, found: Arrangement) -> Figure:
    """The axis stops where only stragglers are left, and says how many."""
    subtitle = "each dot is one step; box: middle half; whiskers: 5 to 95 %; number: median"
    title = "Step time: lower is better"
    return frame(found, title, f"{subtitle}; axes begin above 0", _boxes_over_sizes, _boxes_in_lanes, UNIT)


def _range(marks: list[Mark]) -> tuple[float, float]:
    """Limits in ms that hold every step but stragglers."""
    import numpy as np

    spread = [np.asarray(mark.samples) * 1e3 for mark in marks]
    limit = STRAGGLER_RATIO * max(np.percentile(x, 95) for x in spread)
    return float(min(x.min() for x in spread)), float(max(x[x <= limit].max() for x in spread))


def _boxes_over_sizes(axes: Axes, family: Family) -> None:
    low, high = _range(family.marks)
    places = slots(family)
    boxes = [
        (at, *_distribution(axes, at, mark, high, slot(family), upright=True))
        for at, mark in places
        if mark is not None
    ]
    fits, legible = room_for(family, [text.partition("\n")[0] for _, text, _ in boxes])
    for at, text, bottom in boxes if legible else ():
        how: dict[str, Any] = {"rotation": 0 if fits else 90, "va": "top", "ha": "center", "fontsize": NUMBER_SIZE}
        say(axes, text if fits else text.replace("\n", ", "), (at, bottom), (0, -4), in_layout=False, **how)
    say_missing(axes, places)
    room = (high - low) or high
    axes.set_ylim(max(low - (0.25 if fits else 0.5) * room, 0.0), high + 0.05 * room)


def _boxes_in_lanes(axes: Axes, lanes: list[tuple[float, Mark]]) -> None:
    low, high = _range([mark for _, mark in lanes])
    room = (high - low) * 0.04 or high * 0.05
    axes.set_xlim(low - room, high + room)
    for y, mark in lanes:
        text, _ = _distribution(axes, y, mark, high, 0.76, upright=False)
        say(axes, text, (1, y), (6, 0), "side")


def _distribution(axes: Axes, at: float, mark: Mark, limit: float, width: float, *, upright: bool) -> tuple[str, float]:
    """Box and dots side by side in one place; returns the median in words and the fastest step."""
    import numpy as np
    from matplotlib.patches import Rectangle

    def turn(along: Any, across: Any) -> tuple[Any, Any]:
        return (across, along) if upright else (along, across)

    x = np.asarray(mark.samples) * 1e3
    low, first, median, third, high = (float(q) for q in np.percentile(x, (5, 25, 50, 75, 95)))
    shown = x[x <= limit]
    box, half = (at - 0.2 * width, 0.17 * width) if upright else (at + 0.21 * width, 0.145 * width)
    side = 1 if upright else -1
    jitter = (np.arange(len(shown)) * 0.618034) % 1.0
    away = at + side * width * (0.05 + 0.36 * jitter) if upright else at - width * (0.16 + 0.34 * jitter)
    dots = axes.scatter(*turn(shown, away), s=5 if upright else 7, color=mark.colour, alpha=0.45, linewidths=0)
    dots.set_rasterized(len(shown) > MOST_VECTOR_POINTS)
    axes.plot(*turn([low, high], [box, box]), color=INK, linewidth=1.1)
    corner, size = turn(first, box - half), turn(third - first, 2 * half)
    axes.add_patch(Rectangle(corner, *size, facecolor=mark.colour, edgecolor=INK, linewidth=0.8, zorder=3))
    axes.plot(*turn([median, median], [box - 1.4 * half, box + 1.4 * half]), color=INK, linewidth=2.0, zorder=4)
    beyond = len(x) - len(shown)
    number = format_number(median, min(1, max(places(median, None, None), 0)))
    text = (number if upright else f"{number} ms") + (f"\n+{beyond} slower" if beyond else "")
    return text, float(x.min())


# --- phases --------------------------------------------------------------------------------------------------------


def phases(report: Report) -> Arrangement:
    """Cells with a step time and at least one phase of it; a lane each, because colours are the phases'."""
    found = arrange(report, metric("step_time_s"), together=False)
    known = [mark for mark in found.marks if _parts(mark)]
    return found if known else Arrangement((), ())


def _parts(mark: Mark) -> dict[str, float]:
    """Seconds by phase; a phase that was not measured is absent."""
    measured = mark.row.measurements
    return {name: m.value for name in PHASES if (m := measured.get(name)) and m.value}


def draw_phases(report: Report, found: Arrangement) -> Figure:
    """Up to the measured step: phases that overlap are cut there, what no phase holds is drawn as such."""
    subtitle = "mean step by phase, each of its slowest process; number: the whole step"
    title = "Where a step spends its time: shorter is better"
    figure = frame(found, title, subtitle, lambda *_: None, _stacks, UNIT)
    used = {name for mark in found.marks for name in _parts(mark)}
    words = [PHASES[name] for name in PHASES if name in used]
    key(figure, [*words, REST] if any(_rest(mark) for mark in found.marks) else words)
    return figure


def _stacks(axes: Axes, lanes: list[tuple[float, Mark]]) -> None:
    longest = 0.0
    for y, mark in lanes:
        step, left = (mark.measurement.value or 0.0) * 1e3, 0.0
        parts = [(PHASES[name][1], seconds * 1e3) for name, seconds in _parts(mark).items()]
        for colour, ms in (*parts, (REST[1], _rest(mark) * 1e3)):
            width = min(ms, step - left)
            axes.barh(y, width, 0.62, left, color=colour, linewidth=0)
            left += width
        say(axes, f"{format_number(step, min(1, max(places(step, None, None), 0)))} ms", (step, y), (7, 0))
        longest = max(longest, step)
    axes.set_xlim(0, longest * 1.16)


def _rest(mark: Mark) -> float:
    """Seconds of the step in no phase; all of it where none was measured, none under a percent."""
    step = mark.measurement.value or 0.0
    rest = step - sum(_parts(mark).values())
    return rest if rest > 0.01 * step else 0.0
