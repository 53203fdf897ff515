"""The machine's ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.errors import Scalar
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, measured_cell, numeric, without_empty
from paceline.report.text.measurements import format_brief
from paceline.wording import MISSING, Scale, format_number

TERA, GIGA, PERCENT = Scale("TFLOP/s", 1e-12), Scale("GB/s", 1e-9), Scale("%", 100.0)
GIGAFLOPS = Scale("GFLOP/s", 1e-9)
PINNED, PAGEABLE = "pinned", "pageable"
DIRECTIONS = ("forward", "grad input", "grad weight")
# A device this far below the median of its peers is marked.
SLOW_DEVICE_RATIO = 0.95
MOST_REASONS = 4


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if the report has no such runs. One set per cell that measured kernels."""
    cells: dict[str, list[Measurement]] = {}
    for m in report.measurements:
        if "kernel" in m.axes:
            cells.setdefault(m.cell, []).append(m)
    found: list[Table | None] = []
    for measured in cells.values():
        suffix = f" ({describe(measured[0].axes)})" if len(cells) > 1 else ""
        model, whole = measured[0].axes["model"], [m for m in measured if m.axes["rank"] is None]
        found += (
            peaks(f"Ceilings: matrix products{suffix}", whole),
            products(f"Ceilings: products of {model}{suffix}", whole),
            copies(f"Ceilings: copies{suffix}", whole),
            attention(f"Ceilings: attention of {model}{suffix}", whole),
            devices(f"Ceilings by device{suffix}", measured),
        )
    return tuple(table for table in found if table and table.rows)


def sentence(report: Report) -> str:
    """The achievable peak of each dtype and the fastest copy of the first machine measured."""
    ours = [m for m in report.measurements if "kernel" in m.axes and m.axes["rank"] is None and m.value is not None]
    ours = [m for m in ours if m.cell == ours[0].cell]
    best = [m for m in ours if m.metric == "achievable_flops_per_s"]
    copies = [m for m in ours if m.metric == "copy_bytes_per_s"]
    said = []
    if best:
        scale = scale_for(best)
        peaks = ", ".join(f"{format_brief(m, scale)} in {m.axes['dtype']}" for m in best)
        said.append(f"Matrix products reach {peaks} ({scale.unit}).")
    if copies:
        # The largest: smaller ones may fit in a cache.
        largest = max(copies, key=lambda m: float(m.axes["size"] or 0))
        said.append(f"Memory is copied at {format_brief(largest, GIGA)} GB/s, reading and writing.")
    return " ".join(said)


def scale_for(measured: Iterable[Measurement]) -> Scale:
    """TFLOP/s where the fastest reaches one, else GFLOP/s: a CPU's numbers should not begin with 0.0."""
    return TERA if any((m.value or 0.0) >= 1e12 for m in measured) else GIGAFLOPS


def peaks(title: str, measured: Sequence[Measurement]) -> Table | None:
    """The best product of each dtype and the shape that reached it; a dtype without one says why."""
    best, shares, ridges = (
        {m.axes["dtype"]: m for m in measured if m.metric == metric}
        for metric in ("achievable_flops_per_s", "datasheet_share_ratio", "ridge_flops_per_byte")
    )
    scale = scale_for(best.values())
    dtypes = list(dict.fromkeys(m.axes["dtype"] for m in measured if m.axes["kernel"] == "matmul"))

    def reached_by(dtype: Scalar) -> str:
        if dtype in best:
            return str(best[dtype].axes["label"])
        missing = (m.note for m in measured if m.axes["dtype"] == dtype and m.value is None and m.note)
        return next(missing, MISSING)

    columns: tuple[Filled[Scalar], ...] = (
        (Column("dtype"), str),
        (numeric(f"achievable, {scale.unit}"), lambda dtype: measured_cell(best.get(dtype), scale)),
        (Column("reached by (m x n x k)", prose=True), reached_by),
        (numeric("of datasheet, %", 1), lambda dtype: _cell(shares.get(dtype), PERCENT)),
        (numeric("ridge, FLOP/byte", 2), lambda dtype: _cell(ridges.get(dtype), Scale("FLOP/byte"))),
    )
    notes = ["Best product measured, by its median iteration; random data."]
    if "fp8" in dtypes:
        notes[0] += " fp8: e4m3, bf16 result, fast accumulation."
    table = filled(title, dtypes, columns, (*notes, *_notes(best.values())))
    return table and without_empty(table)[0]


def products(title: str, measured: Sequence[Measurement]) -> Table:
    """The decoder's own products: forward and the two of backward, by layer and dtype."""
    ours = [m for m in measured if m.metric == "matmul_flops_per_s" and m.axes["size"] is None]
    cells = {_product_of(m): m for m in ours}
    scale = scale_for(ours)
    layers, dtypes = (dict.fromkeys(key[i] for key in cells) for i in (0, 2))
    rows = tuple(
        (Cell(layer), Cell(dtype), *(_cell(cells.get((layer, way, dtype)), scale) for way in DIRECTIONS))
        for layer in layers
        for dtype in dtypes
        if any(m.value is not None for (_, _, of), m in cells.items() if of == dtype)
    )
    columns = (Column("layer"), Column("dtype"), *(numeric(f"{way}, {scale.unit}") for way in DIRECTIONS))
    forward = (str(m.axes["label"]) for (_, way, _), m in cells.items() if way == "forward")
    shapes = "; ".join(dict.fromkeys(label.replace(" forward,", "") for label in forward))
    notes = (f"Forward shapes (m x n x k): {shapes}.",) if shapes else ()
    return Table(title, columns, rows, (*notes, *_refusals(ours)))


def _product_of(m: Measurement) -> tuple[str, str, str]:
    """Layer, direction and dtype of `mlp in grad input, 512 x 768 x 3072`."""
    name = str(m.axes["label"]).partition(",")[0]
    way = next(way for way in DIRECTIONS if name.endswith(way))
    return name.removesuffix(way).strip(), way, str(m.axes["dtype"])


def copies(title: str, measured: Sequence[Measurement]) -> Table:
    """Copies by size: within memory (read + write), and over the bus with pinned and pageable host memory."""
    wanted = (("copy", ""), ("h2d", PINNED), ("h2d", PAGEABLE), ("d2h", PINNED), ("d2h", PAGEABLE))
    ours = {(m.axes["kernel"], m.axes["variant"], m.axes["size"]): m for m in measured if m.metric in _COPIES}
    labels = {m.axes["size"]: str(m.axes["label"]) for m in ours.values()}
    sizes = sorted((size for size in labels if isinstance(size, int)), key=int)
    rows = tuple(
        (Cell(labels[size]), *(_cell(ours.get((*way, size)), GIGA) for way in wanted))
        for size in sizes
        if any((m := ours.get((*way, size))) and m.value is not None for way in wanted)
    )
    named = {"copy": "memory copy", "h2d": "host to device", "d2h": "device to host"}
    heads = (f"{named[kernel]}{' ' if variant else ''}{variant}, GB/s" for kernel, variant in wanted)
    columns = (Column("size"), *(numeric(head) for head in heads))
    said = ("Memory copy counts every byte twice, read and written; the bus once. GB is 1e9 bytes.",)
    return without_empty(Table(title, columns, rows, (*said, *_refusals(ours.values()))))[0]


_COPIES = ("copy_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")


def attention(title: str, measured: Sequence[Measurement]) -> Table:
    """Forward and backward by sequence length, a column pair per backend."""
    ours = [m for m in measured if m.metric == "attention_flops_per_s"]
    cells = {(m.axes["variant"], m.axes["kernel"], m.axes["size"]): m for m in ours}
    labels = {m.axes["size"]: str(m.axes["label"]) for m in ours}
    backends = [
        b
        for b in dict.fromkeys(str(m.axes["variant"]) for m in ours)
        if any(m.value is not None for (variant, _, _), m in cells.items() if variant == b)
    ]
    kernels = ("attention_forward", "attention_backward")
    scale = scale_for(ours)
    rows = tuple(
        (Cell(label), *(_cell(cells.get((b, kernel, size)), scale) for b in backends for kernel in kernels))
        for size, label in labels.items()
        if backends
    )
    heads = (f"{b} {kernel.removeprefix('attention_')}, {scale.unit}" for b in backends for kernel in kernels)
    columns = (Column("tokens"), *(numeric(head) for head in heads))
    dtypes = ", ".join(dict.fromkeys(str(m.axes["dtype"]) for m in ours))
    said = f"{dtypes}; causal FLOPs: (s+1) keys' worth per two tokens; a backward counts as two forwards."
    return Table(title, columns, rows, (said, *_refusals(ours)))


def devices(title: str, measured: Sequence[Measurement]) -> Table | None:
    """Ceilings of each rank; one that is 5 % below the median of its peers is marked."""
    own: dict[str, dict[int, Measurement]] = {}
    for m in measured:
        if isinstance(rank := m.axes["rank"], int):
            own.setdefault(_ceiling_name(m), {})[rank] = m

    def column(name: str) -> Filled[int]:
        ours = own[name]
        scale = scale_for(ours.values()) if next(iter(ours.values())).unit == "FLOP/s" else GIGA
        middle = statistics.median(m.value for m in ours.values() if m.value is not None)

        def beside_peers(rank: int) -> Cell:
            m = ours.get(rank)
            if m is None or m.value is None:
                return Cell(MISSING)
            share = m.value / middle
            return Cell(format_brief(m, scale), format_number(share, 3), "bad" if share < SLOW_DEVICE_RATIO else "")

        return numeric(f"{name}, {scale.unit}"), beside_peers

    ranks = sorted({rank for ours in own.values() for rank in ours})
    columns: tuple[Filled[int], ...] = ((numeric("rank"), str), *map(column, own))
    return filled(title, ranks, columns, ("Smaller print: over the median of all ranks.",))


def _ceiling_name(m: Measurement) -> str:
    if m.metric == "achievable_flops_per_s":
        return f"matmul {m.axes['dtype']}"
    return " ".join(filter(None, (str(m.axes["kernel"]), str(m.axes["variant"]))))


def _cell(m: Measurement | None, scale: Scale) -> Cell:
    return Cell(MISSING if m is None or m.value is None else format_brief(m, scale))


def _notes(measured: Iterable[Measurement]) -> tuple[str, ...]:
    """Each note once, with its dtypes unless it applies to all."""
    said: dict[str, list[str]] = {}
    found = list(measured)
    for m in found:
        for note in filter(None, (m.note or "").split("; ")):
            said.setdefault(note, []).append(str(m.axes["dtype"]))
    return tuple(
        f"{'' if len(dtypes) == len(found) else ', '.join(dtypes) + ': '}{note.rstrip('.')}."
        for note, dtypes in said.items()
    )


def _refusals(measured: Iterable[Measurement]) -> tuple[str, ...]:
    """Why rows have no number: each reason once, with the rows it affects."""
    said: dict[str, list[str]] = {}
    for m in measured:
        if m.value is None and m.note:
            name = f"{_product_of(m)[0]} {m.axes['dtype']}" if m.axes["kernel"] == "matmul" else ""
            said.setdefault(m.note, []).append(name or str(m.axes["variant"] or m.axes["kernel"]))
    lines = [f"{', '.join(dict.fromkeys(what))}: {reason.rstrip('.')}." for reason, what in said.items()]
    more = [f"and {len(lines) - MOST_REASONS} more reasons"] if len(lines) > MOST_REASONS else []
    return (*lines[:MOST_REASONS], *more)
