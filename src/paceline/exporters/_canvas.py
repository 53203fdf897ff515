"""The look of every chart: colours, style, an empty canvas, and text where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def canvas(title: str, subtitle: str, height_in: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(WIDTH_IN, height_in), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    entitle(axes[0], title, subtitle)
    return figure, axes


def say(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], on: str = "data", **how: Any
) -> None:
    """Text at a point, moved by `offset` points; on is `data`, `axes fraction`, or `side`: x in axes, y in data."""
    coordinates: Any = ("axes fraction", "data") if on == "side" else on
    how.setdefault("va", "center_baseline")
    axes.annotate(text, at, offset, coordinates, "offset points", annotation_clip=False, **how)


def entitle(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=24)
    say(axes, subtitle, (0, 1), (0, 8), "axes fraction", color=QUIET, va="bottom")


def short_names(series: Sequence[str]) -> dict[str, str]:
    """Each series by the words that the others lack; the first word where it has none of its own."""
    words = {name: name.split(", ") for name in series}
    shared = set.intersection(*map(set, words.values()))
    return {name: ", ".join(w for w in found if w not in shared) or found[0] for name, found in words.items()}
