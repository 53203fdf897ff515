"""Charts of the fabric: bandwidth and latency over size with their fits, pairs of a tournament, the loss of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.analysis.findings import CollectiveFit, CollectiveRow, Pair, Report, ScalingExplanation
from paceline.report.exporters._matplotlib.canvas import (
    CLEAR,
    GRID,
    PALETTE,
    QUIET,
    WIDTH_IN,
    brief,
    canvas,
    key,
    say,
    thousands,
)
from paceline.report.tables.fabric_links import fabric_name
from paceline.wording import format_number, format_size, places, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERED_RANKS, MOST_POINTS = 16, 24
LONGEST_TITLE = 48  # of what stands after the chart's own words; a longer one would leave the picture
# Cells of the matrix keep their colours in the dark theme, so the numbers on them must not follow it.
ON_PALE, ON_DEEP = "#111111", "#fdfdfd"


class Panel(NamedTuple):
    """One operation: its rows by dtype, out-of-place where both places were measured, and the fit of each."""

    operation: str
    rows: dict[str, list[CollectiveRow]]
    fits: dict[str, CollectiveFit]


def panels(report: Report) -> list[Panel]:
    """Operations with a bandwidth, of the cell with most rows, then of most ranks; the tables hold the others too."""
    return [p for p in _panels(report) if any(r.busbw_bytes_per_s for rows in p.rows.values() for r in rows)]


def lines(report: Report) -> list[Panel]:
    """Operations over at least two sizes."""
    return [p for p in _panels(report) if any(len(rows) > 1 for rows in p.rows.values())]


def _panels(report: Report) -> list[Panel]:
    timed = [r for r in report.collectives if r.status == "ok" and r.time_s]
    measured = [r for r in timed if r.mode == "single"] or [r for r in timed if r.mode == timed[0].mode]
    if not measured:
        return []
    cells = [r.cell for r in measured]
    size = {r.cell: r.world_size for r in measured}
    cell = max(dict.fromkeys(cells), key=lambda c: (cells.count(c), size[c]))
    found: dict[str, dict[str, dict[bool, list[CollectiveRow]]]] = {}
    for r in measured:
        if r.cell == cell:
            found.setdefault(r.operation, {}).setdefault(r.dtype, {}).setdefault(r.in_place, []).append(r)
    return [_panel(report, operation, dtypes) for operation, dtypes in found.items()]


def _panel(report: Report, operation: str, dtypes: dict[str, dict[bool, list[CollectiveRow]]]) -> Panel:
    rows = {
        dtype: sorted(by_place.get(False) or by_place[True], key=lambda r: r.size_bytes)
        for dtype, by_place in dtypes.items()
    }
    fits: dict[str, CollectiveFit] = {}
    for dtype, ours in rows.items():
        key = (operation, dtype, ours[0].world_size, ours[0].in_place, ours[0].axes)
        known = [f for f in report.fits if (f.operation, f.dtype, f.world_size, f.in_place, f.axes) == key]
        fits |= {dtype: known[0]} if known else {}
    return Panel(operation, rows, fits)


def _colours(found: Sequence[Panel]) -> dict[str, str]:
    names = dict.fromkeys(dtype for p in found for dtype in p.rows)
    return {dtype: PALETTE[i % len(PALETTE)] for i, dtype in enumerate(names)}


def _where(report: Report, found: Sequence[Panel]) -> str:
    """The fabric, and what must be known before its numbers are read."""
    first = next(iter(found[0].rows.values()))[0]
    shared = "; shared GPU: not a speed" if "shared GPU" in (first.note or "") else ""
    name = fabric_name(report, first.axes)
    room = LONGEST_TITLE - len(shared)
    return (name if len(name) <= room else f"{name[: room - 1]}\u2026") + shared


# --- bandwidth ---


def draw_bandwidth(report: Report, found: Sequence[Panel]) -> Figure:
    """One panel per operation on common axes: measured dots, the fit as a line."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(len(found), 2)
    height = -(-len(found) // columns)
    figure = Figure(figsize=(WIDTH_IN, 0.8 + 2.1 * height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    grid = figure.subplots(height, columns, squeeze=False, sharex=True, sharey=True).ravel()
    measured = [r.busbw_bytes_per_s or 0.0 for p in found for rows in p.rows.values() for r in rows]
    scale = scale_of("bytes/s", "", measured)
    colours = _colours(found)
    for axes, panel in zip(grid, found, strict=False):
        _bandwidth_panel(axes, panel, colours, scale.factor)
    # Common to all panels, so set once: each panel's own limits would be the first one's.
    grid[0].set_ylim(0, 1.08 * max(measured) * scale.factor)
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes in grid[max(len(found) - columns, 0) : len(found)]:
        axes.tick_params(labelbottom=True)
    _over_all(
        figure,
        f"Bus bandwidth over size, {_where(report, found)}",
        f"{scale.unit}, higher is better; dots: measured, out-of-place if any; lines: fit t = \u03b1 + S\u00b7f/\u03b2",
    )
    _legend(grid[0], colours)
    return figure


def _over_all(figure: Figure, title: str, subtitle: str) -> None:
    figure.suptitle(f"{title}\n", x=0.012, ha="left", fontsize=12, fontweight="bold")
    figure.text(0.012, 1 - 0.36 / figure.get_figheight(), subtitle, color=QUIET, va="top")


def _bandwidth_panel(axes: Axes, panel: Panel, colours: dict[str, str], factor: float) -> None:
    for dtype, rows in panel.rows.items():
        known = [r for r in rows if r.busbw_bytes_per_s]
        sizes = [r.size_bytes for r in known]
        axes.plot(sizes, [(r.busbw_bytes_per_s or 0) * factor for r in known], "o", ms=3.2, color=colours[dtype])
        if (fit := panel.fits.get(dtype)) and known:
            first = known[-1]
            ratio = (first.busbw_bytes_per_s or 0.0) / (first.algbw_bytes_per_s or 1.0)
            drawn = [s * ratio / (fit.alpha_s + s * ratio / fit.beta_bytes_per_s) * factor for s in sizes]
            axes.plot(sizes, drawn, color=colours[dtype], linewidth=1.1)
    axes.set_xscale("log", base=2)
    axes.set_title(panel.operation, loc="left", fontsize=9.5, fontweight="normal", pad=4)
    axes.grid(axis="y")
    _size_ticks(axes)


def _size_ticks(axes: Axes) -> None:
    """Every fifth power of two: 32 B, 1 KiB, 32 KiB, 1 MiB, ..."""
    axes.set_xticks([2**k for k in range(0, 41, 5) if axes.get_xlim()[0] <= 2**k <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(lambda x, _: format_size(x))
    axes.xaxis.set_minor_locator(_nothing())


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _legend(axes: Axes, colours: dict[str, str]) -> None:
    """Names in their own colour, inside the first panel where curves begin low."""
    for i, (name, colour) in enumerate(colours.items()):
        say(axes, name, (0, 1), (6, -10 - 12 * i), "axes fraction", color=colour, fontweight="bold", fontsize=9)


# --- latency ---


def draw_latency(report: Report, found: Sequence[Panel]) -> Figure:
    """Time of one operation over size in the first dtype; at the left end stands what a start costs."""
    dtype = next(iter(found[0].rows))
    shown = [p for p in found if dtype in p.rows] or list(found)
    subtitle = "lower is better; slowest rank; names in the order of their smallest size, slowest first"
    figure, (axes,) = canvas(f"Time over size, {dtype}, {_where(report, found)}", subtitle, 4.2)
    ranked = sorted(shown, key=lambda p: -(p.rows[dtype][0].time_s or 0.0))
    for i, panel in enumerate(ranked):
        rows = panel.rows[dtype]
        colour = PALETTE[i % len(PALETTE)]
        style = "-" if i < len(PALETTE) else "--"
        axes.plot([r.size_bytes for r in rows], [(r.time_s or 0) * 1e6 for r in rows], style, color=colour, lw=1.6)
        name = f"{panel.operation}  {_brief((rows[0].time_s or 0) * 1e6)} \u00b5s"
        say(axes, name, (1, 1), (8, -8 - 13 * i), "axes fraction", color=colour, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("\u00b5s")
    thousands(axes.yaxis)
    axes.yaxis.set_minor_locator(_nothing())
    axes.grid(axis="y")
    _size_ticks(axes)
    return figure


# --- pairs ---


def draw_pairs(report: Report, found: Sequence[Pair]) -> Figure:
    """Bandwidth of every pair, coloured by its share of what pairs of its kind usually reach."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    run = found[0].run
    pairs = [p for p in found if p.run == run]
    ranks = sorted({r for p in pairs for r in p.ranks})
    at = {rank: i for i, rank in enumerate(ranks)}
    share = np.full((len(ranks), len(ranks)), np.nan)
    for p in pairs:
        a, b = (at[r] for r in p.ranks)
        share[a, b] = share[b, a] = p.ratio
    runs = len({p.run for p in found})
    beside = f"; the first of {runs} runs" if runs > 1 else ""
    subtitle = f"{format_size(pairs[0].size_bytes)}; colour: share of what pairs of the same kind reach{beside}"
    figure, (axes,) = canvas("Pair tournament", subtitle, 1.5 + min(max(len(ranks) * 0.42, 2.4), 6.5))
    colours = LinearSegmentedColormap.from_list("pace", [PALETTE[1], "#f3d9c4", "#dbe9f4", "#9cc7e4"])
    mesh = axes.pcolormesh(share, cmap=colours, vmin=0.5, vmax=1.1, edgecolors="white", linewidth=1.5)
    bar = figure.colorbar(mesh, ax=axes, format=lambda x, _: f"{x:.0%}", fraction=0.03, pad=0.02)
    bar.outline.set_visible(False)
    _pair_axes(axes, pairs, ranks, at)
    return figure


def _pair_axes(axes: Axes, pairs: Sequence[Pair], ranks: Sequence[int], at: dict[int, int]) -> None:
    hosts = {rank: host for p in pairs for rank, host in zip(p.ranks, p.hosts, strict=True)}
    scale = scale_of("bytes/s", "", [p.bandwidth_bytes_per_s for p in pairs])
    several = len(set(hosts.values())) > 1
    names = [f"{hosts[r]}  {r}" if several else f"rank {r}" for r in ranks]
    middle = [i + 0.5 for i in range(len(ranks))]
    few = len(ranks) <= MOST_NUMBERED_RANKS
    axes.set_yticks(middle if few else middle[:: len(ranks) // 8], names if few else names[:: len(ranks) // 8])
    axes.set_xticks(axes.get_yticks(), [str(ranks[int(y)]) for y in axes.get_yticks()])
    axes.invert_yaxis()
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"rank; numbers in {scale.unit}" if few else "rank")
    for p in pairs if few else ():
        a, b = (at[r] + 0.5 for r in p.ranks)
        colour = ON_DEEP if p.ratio < 0.62 else ON_PALE
        for x, y in ((a, b), (b, a)):
            text = _brief(p.bandwidth_bytes_per_s * scale.factor)
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=8.5)


# --- the loss of scaling ---


def draw_scaling_loss(report: Report, found: Sequence[ScalingExplanation]) -> Figure:
    """A bar per point: the ideal step, what exposed communication adds, and the rest."""
    shown = sorted(found, key=lambda e: (e.kind, e.series, e.world_size))[:MOST_POINTS]
    figure, (axes,) = canvas(
        "Where the step time goes", "measured step: the ideal one and what came on top", 1.9 + 0.5 * len(shown)
    )
    named = (("ideal", GRID), ("exposed communication", PALETTE[1]), ("rest", PALETTE[0]), ("not measured", QUIET))
    used = set()
    for y, e in enumerate(shown):
        used |= _loss_bar(axes, -y, e, dict(named))
    axes.set_yticks([-y for y in range(len(shown))], [brief(_point_name(e)) for e in shown])
    axes.set_ylim(-len(shown) + 0.4, 0.6)
    axes.set_xlim(0, max(max(e.step_s, e.ideal_s) for e in shown) * 1e3 * 1.3)
    axes.set_xlabel("ms per optimizer step")
    axes.grid(axis="x")
    key(figure, [(word, colour) for word, colour in named if word in used])
    if len(found) > len(shown):
        say(axes, f"and {len(found) - len(shown)} more, in the tables", (0, 0), (0, -34), "axes fraction", color=QUIET)
    return figure


def _loss_bar(axes: Axes, y: float, e: ScalingExplanation, colours: dict[str, str]) -> set[str]:
    """Parts never reach beyond the measured step: communication that a faster step made up for is not drawn."""
    loss = max(e.loss_s, 0.0)
    if e.exposed_loss_s is None:
        parts = {"ideal": min(e.ideal_s, e.step_s), "not measured": loss}
    else:
        exposed = min(max(e.exposed_loss_s, 0.0), loss)
        parts = {"ideal": min(e.ideal_s, e.step_s), "exposed communication": exposed, "rest": loss - exposed}
    left = 0.0
    for word, seconds in parts.items():
        axes.barh(y, seconds * 1e3, left=left, height=0.6, color=colours[word], linewidth=0)
        left += seconds * 1e3
    share = "" if e.exposed_share_ratio is None else f"; {e.exposed_share_ratio:.0%} of the loss is communication"
    say(axes, f"{e.ideal_s / e.step_s:.0%} efficient{share}", (left, y), (7, 0), fontsize=9, bbox=CLEAR)
    return {word for word, seconds in parts.items() if seconds > 0}


def _point_name(e: ScalingExplanation) -> str:
    return f"{e.series.partition(',')[0]}, {e.kind}, {e.baseline_world_size} \u2192 {e.world_size}"


def _brief(value: float) -> str:
    return format_number(value, min(places(value, None, None), 2))
