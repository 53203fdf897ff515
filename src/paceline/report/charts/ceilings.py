"""Charts of the machine's ceilings: rates over size, one line per dtype, way or backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.charts.chart import COLOURS, LINEAR, LINES, LOG, LOG2, Axis, Chart, Series, measured_point
from paceline.report.tables.ceilings import GIGA, scale_for
from paceline.wording import Scale

# Rates further apart than this are drawn on a logarithmic axis, where all of them can be read.
LINEAR_RANGE = 20
COPIES = {"copy": "memory copy", "h2d": "host to device", "d2h": "device to host"}
Name = Callable[[Measurement], str]


def products(report: Report) -> Iterator[Chart]:
    found = _swept(report, ("matmul_flops_per_s",))
    about = "Square products of random data; median iteration."
    x = Axis(label="side of the matrices", scale=LOG2)

    def dtype(m: Measurement) -> str:
        return str(m.axes["dtype"])

    yield from _chart("ceilings_products", "Matrix products", about, found, scale_for(found), x, dtype, dtype)


def copies(report: Report) -> Iterator[Chart]:
    found = _swept(report, tuple(f"{kernel}_bytes_per_s" for kernel in COPIES))
    about = "Memory copies count every byte twice, read and written."
    x = Axis(label="size", scale=LOG2, ticks="bytes")

    def way(m: Measurement) -> str:
        return f"{COPIES[str(m.axes['kernel'])]} {m.axes['variant']}".strip()

    yield from _chart("ceilings_copies", "Copies", about, found, GIGA, x, way, lambda m: str(m.axes["kernel"]))


def attention(report: Report) -> Iterator[Chart]:
    found = _swept(report, ("attention_flops_per_s",))
    shape = f"{describe(found[0].axes, ('model',)).partition(', ')[2]}, {found[0].axes['dtype']}; " if found else ""
    about = f"{shape}causal FLOPs; a backward counts as two forwards."
    x = Axis(label="sequence length", scale=LOG2)

    def backend(m: Measurement) -> str:
        return f"{_variant(m)} {str(m.axes['kernel']).removeprefix('attention_')}"

    yield from _chart("ceilings_attention", "Attention", about, found, scale_for(found), x, backend, _variant)


def _swept(report: Report, metrics: Sequence[str]) -> list[Measurement]:
    """Measured points of the first cell that has such a sweep: another cell is another machine or model."""
    found = [
        m
        for m in report.measurements
        if m.metric in metrics and m.axes.get("size") is not None and m.axes.get("rank") is None and m.value is not None
    ]
    return [m for m in found if m.cell == found[0].cell and "kernel" in m.axes]


def _variant(m: Measurement) -> str:
    return str(m.axes["variant"])


def _chart(
    name: str, title: str, about: str, found: Sequence[Measurement], scale: Scale, x: Axis, line: Name, family: Name
) -> Iterator[Chart]:
    """Lines of one family share a colour; those with one size say nothing and are left out."""
    named = [line(m) for m in found]
    kept = [m for m in found if named.count(line(m)) > 1]
    if not kept:
        return
    families = list(dict.fromkeys(map(family, kept)))
    values = [m.value for m in kept if m.value]
    far_apart = max(values) > LINEAR_RANGE * min(values)
    yield Chart(
        name=name,
        title=title,
        subtitle=about,
        kind=LINES,
        x=x,
        y=Axis(label=scale.unit, unit=scale.unit, scale=LOG if far_apart else LINEAR, zero=not far_apart),
        points=tuple(
            replace(measured_point(m, scale), x=_size(m), series=line(m), label=f"{line(m)}, {m.axes['label']}")
            for m in sorted(kept, key=_size)
        ),
        series=tuple(
            Series(
                name=line(m),
                colour=min(families.index(family(m)), COLOURS - 1),
                dashed=(_variant(m) == "pageable" or m.axes["kernel"] == "attention_backward"),
            )
            for m in {line(m): m for m in kept}.values()
        ),
    )


def _size(m: Measurement) -> float:
    size = m.axes["size"]
    return float(size) if isinstance(size, int | float) else 0.0
