"""The look of every chart: colours, style, an empty canvas, and text where it is wanted."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, QUIET, GRID, PAPER = "#1f2328", "#6e7781", "#d8dee4", "#ffffff"
# Okabe and Ito (2008): told apart under every common colour blindness; the yellow is left out, too pale for lines.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
STYLE: dict[str, Any] = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": QUIET,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": QUIET,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
CLEAR = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
WIDTH_IN = 8.2
LABEL_PITCH_PT = 12.5
KEY_CHARACTERS = 96  # of a line of the key
# Of a line over the axes, which labels push to the right: layout gives a longer one the room of the axes, until they
# are gone.
LINE_CHARACTERS, LINE_PT = 84, 13
# A launcher may have a page of options: as a heading it would push its panel out of the figure.
MOST_LINES = 4
NAME_CHARACTERS = 51


class End(NamedTuple):
    """Where a line ends, on the scale of its axes, and how it is called there."""

    y: float
    text: str
    colour: str


def canvas(title: str, subtitle: str, *heights_in: float) -> tuple[Figure, list[Axes]]:
    """Panels of these heights under one title, from top to bottom."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(WIDTH_IN, sum(heights_in)), layout=layout)
    axes = list(figure.subplots(len(heights_in), 1, squeeze=False, height_ratios=heights_in)[:, 0])
    if title:
        entitle(axes[0], title, subtitle)
    return figure, axes


def say(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], on: str = "data", **how: Any
) -> None:
    """Text at a point, moved by `offset` points; on is `data`, `axes fraction`, `side` (x in axes, y in data) or
    `foot` (x in data, y in axes)."""
    mixed = {"side": ("axes fraction", "data"), "foot": ("data", "axes fraction")}
    coordinates: Any = mixed.get(on, on)
    how.setdefault("va", "center_baseline")
    axes.annotate(text, at, offset, coordinates, "offset points", annotation_clip=False, **how)


def entitle(axes: Axes, title: str, subtitle: str, heading: str = "") -> None:
    """The chart's title and what it shows; a heading stands close over the panel, as over the others below it."""
    above, below = _lines(subtitle), _lines(heading)
    rise = 3 + LINE_PT * len(below) if below and title else 0
    if title:
        axes.set_title(title, loc="left", pad=11 + LINE_PT * len(above) + rise)
        say(axes, "\n".join(above), (0, 1), (0, 8 + rise), "axes fraction", color=QUIET, va="bottom")
    if below:
        say(axes, "\n".join(below), (0, 1), (0, 5), "axes fraction", color=QUIET, fontsize=9, va="bottom")


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS, max_lines=MOST_LINES, placeholder=" ...")


def brief(name: str) -> str:
    """A name beside the axes, without its middle where it would take their room: what tells names apart stands at
    either end, and the tables have all of it."""
    if len(name) <= NAME_CHARACTERS:
        return name
    half = (NAME_CHARACTERS - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def name_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Names beside the ends of their lines, in their order from the top, pushed apart where they would touch.

    Call it when scale and limits of the axes are final: what is apart on one scale touches on another.
    """
    axes.get_ylim()  # limits that follow the data are brought up to date by asking for them
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [float(to_axes.transform((1.0, end.y))[1]) for end in ends]
    order = sorted(range(len(ends)), key=lambda i: -places[i])
    gap = LABEL_PITCH_PT / _height_pt(axes)
    for above, below in pairwise(order):
        places[below] = min(places[below], places[above] - gap)
    floor = 0.0
    for i in reversed(order):  # what was pushed out of the axes comes back from below
        places[i] = max(places[i], floor)
        floor = places[i] + gap
    for place, end in zip(places, ends, strict=True):
        say(axes, end.text, (1, place), (6, 0), "axes fraction", color=end.colour)


def _height_pt(axes: Axes) -> float:
    """About the height that layout will leave to the axes: titles and ticks take a quarter."""
    figure: Any = axes.get_figure()
    spec = axes.get_subplotspec()
    rows = spec.get_gridspec().nrows if spec else 1
    return float(figure.get_figheight()) / rows * 72 * 0.75


def key(figure: Figure, words: Sequence[tuple[str, str]], **patch: Any) -> None:
    """What the colours mean, in a strip of its own under the chart."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=word, linewidth=0, **patch) for word, colour in words]
    longest = max((len(word) for word, _ in words), default=1)
    columns = max(1, min(len(patches), KEY_CHARACTERS // (longest + 5)))
    figure.legend(
        handles=patches, loc="outside lower left", ncols=columns, frameon=False, fontsize=9, borderaxespad=0.1
    )


def thousands(axis: Axis) -> None:
    """Ticks as 12,000; never 1.2e4 nor an offset."""
    axis.set_major_formatter(lambda x, _: f"{x:,.10g}")
