"""Compressed gradients and other declared approximations: bytes, speed and loss beside an exact strategy."""

from __future__ import annotations

from paceline.analysis.findings import BETTER, EQUAL, INCONCLUSIVE, WORSE, Relative, Report, Tradeoff
from paceline.analysis.findings.cell_axes import axis_text, distinguishing_axes
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_parts, speed_clause

MB = Scale("MB", 1e-6)
NETWORK = "network_mbit"
_TONES = {BETTER: "good", WORSE: "bad"}
SPEED_WORDS = {BETTER: "faster", WORSE: "slower", EQUAL: "equal", INCONCLUSIVE: "inconclusive"}
_NOTES = (
    "These strategies change the arithmetic, so they are not equal work and take no part in the ranking. Bytes are "
    "counted: those that the busiest rank sends per optimizer step.",
    "Loss after the same tokens: mean over the last steps, pairs of the same seed and data. After the same time: at "
    "the moment at which the faster run of a pair ended. Intervals are 95 % over seeds.",
)
_PRECISION_NOTES = (
    "Another precision is not equal work, so speed is shown together with the loss. Each run is certified by a "
    "reference of its own precision.",
    _NOTES[1],
)


def tables(report: Report) -> tuple[Table, ...]:
    """The comparisons, and where each strategy begins to pay if networks of several rates were emulated."""
    kinds = (_compared(report, "strategy", _NOTES), _compared(report, "precision", _PRECISION_NOTES))
    return tuple(table for table in (*kinds, _pays(report)) if table is not None)


def _compared(report: Report, axis: str, notes: tuple[str, ...]) -> Table | None:
    rows = [row for row in report.tradeoffs if row.axis == axis]
    sends = any(row.wire_bytes for row in rows)
    named = [name for name in distinguishing_axes([row.axes for row in rows]) if name not in ("model", "world_size")]
    columns: tuple[Filled[Tradeoff], ...] = (
        (Column(axis), lambda row: row.strategy),
        *((Column(_heading(name)), lambda row, name=name: _setting(name, row)) for name in named),
        *(_BYTES if sends else ()),
        (numeric("speed, times"), lambda row: _speed(row.speed)),
        (numeric("loss after the same tokens, %"), lambda row: _loss(row.loss)),
        (numeric("loss after the same time, %", 1), lambda row: _loss(row.loss_in_time)),
        (numeric("seeds", 2), lambda row: str(row.seeds)),
        (Column("what it does", priority=3, prose=True), lambda row: row.approximation),
    )
    baselines = ", ".join(sorted({row.baseline for row in rows}))
    return filled(f"Compared with {baselines}", rows, columns, notes, lambda row: row.cells)


def _pays(report: Report) -> Table | None:
    """One row per strategy, one column per rate; None unless networks of several rates were emulated."""
    rates = sorted({float(str(row.axes[NETWORK])) for row in report.tradeoffs if row.axes.get(NETWORK)})
    strategies = list(dict.fromkeys(row.strategy for row in report.tradeoffs if row.axes.get(NETWORK)))
    if len(rates) < 2:
        return None

    def cell(strategy: str, rate: float) -> Cell:
        row = next((r for r in report.tradeoffs if r.strategy == strategy and r.axes.get(NETWORK) == rate), None)
        return _speed(row.speed) if row else Cell(MISSING)

    columns: list[Filled[str]] = [(Column("strategy"), lambda name: name)]
    columns += [(numeric(rate_words(rate)), lambda name, rate=rate: cell(name, rate)) for rate in rates]  # type: ignore[misc]
    columns.append((Column("pays", prose=True), lambda name: pays(report, name)))
    note = "Speed over that of the exact strategy on the same network; a rate is an upper limit of each link."
    return filled("Where it begins to pay", strategies, columns, (note,))


def pays(report: Report, strategy: str) -> str:
    """`up to 1 Gbit/s`, by the rates at which it is faster."""
    rows = [r for r in report.tradeoffs if r.strategy == strategy and r.axes.get(NETWORK) and r.speed]
    faster = [float(str(r.axes[NETWORK])) for r in rows if r.speed and r.speed.verdict == BETTER]
    unclear = any(r.speed and r.speed.verdict == INCONCLUSIVE for r in rows)
    if not faster:
        return "inconclusive" if unclear else "at none of these rates"
    return f"up to {rate_words(max(faster))}{', above that inconclusive' if unclear else ''}"


def rate_words(mbit: float) -> str:
    """
    >>> rate_words(100.0), rate_words(2500)
    ('100 Mbit/s', '2.5 Gbit/s')
    """
    return f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"


def _heading(name: str) -> str:
    return "network" if name == NETWORK else name.replace("_", " ")


def _setting(name: str, row: Tradeoff) -> str:
    value = row.axes.get(name)
    if name == NETWORK:
        return "not limited" if value is None else rate_words(float(str(value)))
    return axis_text(name, row.axes) if value is not None else MISSING


def _fewer(row: Tradeoff) -> str:
    if not row.wire_bytes or not row.baseline_wire_bytes:
        return MISSING
    return f"{row.baseline_wire_bytes / row.wire_bytes:.3g}"


def _speed(found: Relative | None) -> Cell:
    if found is None:
        return Cell(MISSING)
    interval = f"[{found.low:.2f}, {found.high:.2f}] " if found.low is not None and found.high is not None else ""
    return Cell(f"{found.value:.2f}", f"{interval}{SPEED_WORDS[found.verdict]}", _TONES.get(found.verdict, ""))


def _loss(found: Relative | None) -> Cell:
    if found is None:
        return Cell(MISSING)
    low, high = found.low, found.high
    interval = f"[{_percent(low)}, {_percent(high)}] " if low is not None and high is not None else ""
    return Cell(_percent(found.value), f"{interval}{found.loss_word}", _TONES.get(found.verdict, ""))


def _percent(ratio: float) -> str:
    return f"{round((ratio - 1) * 100, 1) + 0.0:+.1f}"


_BYTES: tuple[Filled[Tradeoff], ...] = (
    (numeric("bytes, MB/step"), lambda row: format_parts(row.wire_bytes, None, None, MB)[0]),
    (numeric("fewer bytes, times"), _fewer),
)


def best_first(report: Report) -> list[Tradeoff]:
    """Most speed first, among those whose loss is not shown to be higher; then the others."""
    return sorted(report.tradeoffs, key=lambda r: (r.loss.verdict == WORSE, -(r.speed.value if r.speed else 0.0)))


def headline(report: Report) -> str:
    """`powersgd: 80 % faster than ddp at 1 Gbit/s, loss +0.4 % (inconclusive)`; empty without a trade."""
    row = next(iter(best_first(report)), None)
    if row is None or row.speed is None:
        return ""
    where = f" at {rate_words(float(str(row.axes[NETWORK])))}" if row.axes.get(NETWORK) else ""
    speed = f"{speed_clause(row.speed.verdict, row.speed.value, row.baseline)}{where}"
    return f"{row.strategy}: {speed}, loss {_percent(row.loss.value)} % ({row.loss.loss_word})"
