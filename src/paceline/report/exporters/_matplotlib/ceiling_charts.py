"""Charts of the machine's ceilings: rates over size, one line per dtype, way or backend, named at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.exporters._matplotlib.canvas import PALETTE, End, canvas, name_ends, thousands
from paceline.report.tables.ceilings import GIGA, scale_for
from paceline.report.text.measurements import format_brief
from paceline.wording import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT_IN = 4.2
# Rates further apart than this are drawn on a logarithmic axis, where all of them can be read.
LINEAR_RANGE = 20
_COPIES = ("copy_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Line:
    """One series by size; whole is False for the second of a pair (pageable, backward), drawn in dashes."""

    name: str
    colour: int
    whole: bool
    points: tuple[Measurement, ...]


def _swept(report: Report, metrics: Sequence[str]) -> list[Measurement]:
    """Measured points of the first cell that has such a sweep: another cell is another machine or model."""
    found = [
        m
        for m in report.measurements
        if m.metric in metrics and m.axes.get("size") is not None and m.axes.get("rank") is None and m.value is not None
    ]
    return [m for m in found if m.cell == found[0].cell and "kernel" in m.axes]


def _lines(
    points: Sequence[Measurement], name: Callable[[Measurement], str], family: Callable[[Measurement], str]
) -> list[Line]:
    """Lines of one family share a colour; only those with two sizes say anything."""
    families = list(dict.fromkeys(map(family, points)))
    lines = []
    for text in dict.fromkeys(map(name, points)):
        ours = tuple(sorted((m for m in points if name(m) == text), key=_size))
        whole = str(ours[0].axes["variant"]) != "pageable" and ours[0].axes["kernel"] != "attention_backward"
        if len(ours) > 1:
            lines.append(Line(text, families.index(family(ours[0])), whole, ours))
    return lines


def _size(m: Measurement) -> float:
    size = m.axes["size"]
    return float(size) if isinstance(size, int | float) else 0.0


def products(report: Report) -> list[Line]:
    found = _swept(report, ("matmul_flops_per_s",))
    return _lines(found, lambda m: str(m.axes["dtype"]), lambda m: str(m.axes["dtype"]))


def copies(report: Report) -> list[Line]:
    named = {"copy": "memory copy", "h2d": "host to device", "d2h": "device to host"}
    found = _swept(report, _COPIES)
    return _lines(
        found,
        lambda m: f"{named[str(m.axes['kernel'])]} {m.axes['variant']}".strip(),
        lambda m: str(m.axes["kernel"]),
    )


def attention(report: Report) -> list[Line]:
    found = _swept(report, ("attention_flops_per_s",))
    return _lines(
        found,
        lambda m: f"{m.axes['variant']} {str(m.axes['kernel']).removeprefix('attention_')}",
        lambda m: str(m.axes["variant"]),
    )


def draw_products(report: Report, lines: Sequence[Line]) -> Figure:
    scale = scale_for(m for line in lines for m in line.points)
    about = "square products of random data, median iteration"
    return _draw("Matrix products", about, lines, scale, "side of the matrices", str)


def draw_copies(report: Report, lines: Sequence[Line]) -> Figure:
    about = "memory copies count every byte twice, read and written"
    return _draw("Copies", about, lines, GIGA, "size", _bytes_text)


def draw_attention(report: Report, lines: Sequence[Line]) -> Figure:
    first = lines[0].points[0]
    model = describe(first.axes, ("model",)).partition(", ")[2]
    about = f"{model}, {first.axes['dtype']}; causal FLOPs, a backward counts as two forwards"
    return _draw("Attention", about, lines, scale_for(m for line in lines for m in line.points), "sequence length", str)


def _bytes_text(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _draw(title: str, about: str, lines: Sequence[Line], scale: Scale, what: str, text: Callable[[int], str]) -> Figure:
    figure, (axes,) = canvas(title, about, HEIGHT_IN)
    for line in lines:
        y = [scale.apply(m.value) or 0.0 for m in line.points]
        style = "-" if line.whole else (0, (4, 2))
        colour = PALETTE[line.colour % len(PALETTE)]
        axes.plot(
            [_size(m) for m in line.points], y, color=colour, linestyle=style, linewidth=1.8, marker="o", markersize=4
        )
    sizes = sorted({int(_size(m)) for line in lines for m in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [text(size) for size in sizes])
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    values = [m.value for line in lines for m in line.points if m.value]
    far_apart = max(values) > LINEAR_RANGE * min(values)
    if far_apart:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.minorticks_off()
    thousands(axes.yaxis)
    axes.grid(axis="y")
    axes.set(xlabel=what, ylabel=scale.unit + (", logarithmic" if far_apart else ""))
    name_ends(axes, [_end(line, scale) for line in lines])
    return figure


def _end(line: Line, scale: Scale) -> End:
    last = line.points[-1]
    text = f"{line.name}  {format_brief(last, scale)}"
    return End(scale.apply(last.value) or 0.0, text, PALETTE[line.colour % len(PALETTE)])
