"""Two result folders as text: one sentence first, then changes by their size, each beside what else differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from paceline.analysis.findings import BETTER, EQUAL, HIGHER, INCONCLUSIVE, WORSE, Between, Change, Differing, Lost
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.report.text.cells import THROUGHPUT
from paceline.wording import (
    direction,
    format_number,
    format_parts,
    metric_words,
    places,
    scale_of,
    short_percent,
    verdict_text,
)

MEMORY, RATE, STEP = "peak_memory_bytes", "max_rate_per_s", "step_time_s"
MOST_ROWS = 30
MOST_NAMED = 3
DIGITS_OF_PERCENT = 1
_TONES = {BETTER: "good", WORSE: "bad"}
# Words for worse and better.
_SPEED, _SIZE, _LEVEL = ("slower", "faster"), ("more peak memory", "less peak memory"), ("lower", "higher")
SERVED = {
    RATE: "highest rate within the limits",
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "TPOT p99",
}
_NAMES = {"gpus.name": "GPU", "cuda": "CUDA", "gpus.power_limit_w": "power limit", "gpus.sm_clock_max_hz": "GPU clock"}
_UNITS = {"gpus.power_limit_w": ("W", 1.0), "gpus.sm_clock_max_hz": ("MHz", 1e-6)}
# Facts that are recorded as digests, which tell a reader nothing.
_DIGESTS = {"code of the script": "code of the script", "settings.rates": "schedule of learning rates"}
_BARE = ("versions.", "environment.", "switches.", "settings.")


# --- one difference, one change ---


def differing_text(d: Differing) -> str:
    """`driver 580 -> 590`; a side that has no such fact reads `none`."""
    name = _NAMES.get(d.path, d.path.replace("gpus.", "GPU "))
    for prefix in _BARE:
        name = name.removeprefix(prefix)
    if d.path in _DIGESTS:
        return _DIGESTS[d.path]
    return f"{name} {_value(d.path, d.first)} -> {_value(d.path, d.second)}"


def _value(path: str, text: str | None) -> str:
    if text is None:
        return "none"
    unit, factor = _UNITS.get(path, ("", 1.0))
    try:
        return f"{float(text) * factor:g} {unit}" if unit else text
    except ValueError:
        return text


def differences_text(found: Sequence[Differing], most: int = MOST_NAMED, glue: str = "; ") -> str:
    """The first few, which explain most often, and how many more there are."""
    named = [differing_text(d) for d in found[:most]]
    rest = len(found) - len(named)
    return glue.join((*named, *((f"{rest} more",) if rest else ())))


def percent_text(ratio: float, low: float | None, high: float | None) -> tuple[str, str]:
    """The distance from 1 without its sign, `4.2 %`, and its interval, `3.9 to 4.5 %`, rounded by that."""
    value, sign = (ratio - 1) * 100, 1 if ratio >= 1 else -1
    ends = None if low is None or high is None else sorted((sign * (low - 1) * 100, sign * (high - 1) * 100))
    digits = min(places(value, *(ends or (None, None))), DIGITS_OF_PERCENT)
    interval = " to ".join(format_number(end, digits) for end in ends) + " %" if ends else ""
    return f"{format_number(abs(value), digits)} %", interval


def change_text(c: Change) -> str:
    """`ddp, tiny, 2 processes: tokens_per_s 12.1 % lower (95 % interval 11.0 to 13.2 %)`."""
    size, interval = percent_text(c.ratio, c.low, c.high)
    way = "lower" if c.ratio < 1 else "higher"
    name = c.label if c.row is None else f"{c.label}, {c.row}"
    level = f"; equal work: {c.level}" if c.level else ""
    return f"{name}: {c.metric} {size} {way}" + (f" (95 % interval {interval})" if interval else "") + level


# --- the sentence ---


def sentence(found: Between) -> str:
    """The whole answer: how much, in how many cells, what else differs, and what was lost."""
    parts = _clauses([c for c in found.changes if c.metric == THROUGHPUT], "cell", _SPEED)
    # Each metric of served models separately: latency and throughput may move in opposite directions.
    for metric, name in SERVED.items():
        ours = [c for c in found.changes if c.metric == metric]
        noun = "load" if len(ours) > 1 and metric != RATE else "cell"
        parts += (f"{name}: {text}" for text in _clauses(ours, noun, _LEVEL if metric == RATE else _SPEED))
    parts += _clauses([c for c in found.changes if c.row is not None and c.metric not in SERVED], "row", _SPEED)
    # Only changes of memory; the table has the rest.
    memory = [c for c in found.changes if c.metric == MEMORY]
    parts += (_clause(side, len(memory), "cell", words) for side, words in _decided(memory, _SIZE))
    parts += _undecided(memory, "cell", _SIZE)
    unequal = len({c.cell for c in found.changes if c.did_other_work})
    if unequal:
        cells = len({c.cell for c in found.changes})
        where = "" if cells == 1 else f" in {unequal} of {cells} cells"
        parts.insert(0, f"B did other work than A{where}, so there is no verdict{' on these' if where else ''}")
    parts = parts or ["nothing could be compared"]
    if found.changes and found.occasions:
        parts.append(found.occasions)
    if found.changes and found.disturbed:
        parts.append(found.disturbed)
    if found.changes and found.shared:
        parts.append(f"{differences_text(found.shared, glue=' and ')} differ{'s' if len(found.shared) == 1 else ''}")
    elif found.changes:
        own = any(c.differences for c in found.changes)
        parts.append(f"nothing recorded differs {'in all cells' if own else 'between them'}")
    if found.lost:
        count = len(found.lost)
        was, now = ("was", "is") if count == 1 else ("were", "are")
        parts.append(f"{count} {_plural('cell', count)} that {was} ok in A {now} missing or not ok in B")
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _clauses(changes: Sequence[Change], noun: str, words: tuple[str, str]) -> list[str]:
    if not changes:
        return []
    parts = [_clause(side, len(changes), noun, word) for side, word in _decided(changes, words)]
    for verdict, text in ((EQUAL, "B and A are equal in"), (INCONCLUSIVE, "the difference is inconclusive in")):
        count = sum(c.verdict == verdict for c in changes)
        if count == len(changes):
            parts.append(f"{text} {'the' if count == 1 else f'all {count}'} {_plural(noun, count)}")
        elif count:
            parts.append(f"{text} {count} {_plural(noun, count)}")
    return [*parts, *_undecided(changes, noun, words)]


def _undecided(changes: Sequence[Change], noun: str, words: tuple[str, str]) -> list[str]:
    """How many have no verdict, and the worst change among them."""
    found = [c for c in changes if c.verdict is None and not c.did_other_work]
    if not found:
        return []
    about = " on peak memory" if words == _SIZE else ""
    text = f"{len(found)} {_plural(noun, len(found))} without a verdict{about}"
    worst = max(found, key=lambda c: c.ratio if c.better != HIGHER else 1 / c.ratio)
    if worst.ratio == 1 or (worst.ratio > 1) == (worst.better == HIGHER):
        return [text]
    return [f"{text}, at worst {percent_text(worst.ratio, None, None)[0]} {words[0].removesuffix(' peak memory')}"]


def _decided(changes: Sequence[Change], words: tuple[str, str]) -> Iterator[tuple[list[Change], str]]:
    """Changes for the worse, then for the better, each with its word."""
    for verdict, word in zip((WORSE, BETTER), words, strict=True):
        side = [c for c in changes if c.verdict == verdict]
        if side:
            yield side, word


def _clause(side: Sequence[Change], total: int, noun: str, word: str) -> str:
    sizes = [percent_text(c.ratio, c.low, c.high)[0] for c in sorted(side, key=lambda c: abs(c.ratio - 1))]
    size = sizes[0] if sizes[0] == sizes[-1] else f"{sizes[0].removesuffix(' %')} to {sizes[-1]}"
    where = f"the {noun}" if total == 1 else f"{len(side)} of {total} {noun}s"
    return f"B is {size} {word} than A in {where}" if "memory" not in word else f"B needs {size} {word} in {where}"


# --- tables ---


def distinct(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Changes without those of the step time that say the same as tokens/s of their cell."""
    rates = {(c.cell, c.row): c.verdict for c in changes if c.metric == THROUGHPUT}
    return tuple(c for c in changes if c.metric != STEP or rates.get((c.cell, c.row), "") != c.verdict)


def tables(found: Between, *, brief: bool = False, reasons: bool = True) -> tuple[Table, ...]:
    """Cells, rows of sweeps, what differs, what is lost; each only if there is something to show.

    brief: without rows that are equal, which `equal_lines` counts, and without those that repeat another.
    reasons: with the reason of every verdict, else only of missing ones.
    """
    changes = [c for c in distinct(found.changes) if c.verdict != EQUAL] if brief else found.changes
    shared: tuple[Filled[Differing], ...] = (
        (Column("differs in every cell"), lambda d: d.path),
        (Column("A", prose=True), lambda d: d.first or "none"),
        (Column("B", prose=True), lambda d: d.second or "none"),
    )
    lost: tuple[Filled[Lost], ...] = (
        (Column("cell"), lambda x: x.label),
        (Column("in B"), lambda x: Cell(x.status, "", "bad")),
        (Column("reason", prose=True), lambda x: x.reason),
    )
    wanted = (
        _changes("Cells, B over A", [c for c in changes if c.row is None], reasons),
        _changes("Rows of sweeps and ceilings, B over A", [c for c in changes if c.row is not None], reasons),
        filled("What else differs", found.shared, shared),
        filled("Ok in A, not in B", found.lost, lost),
    )
    return tuple(table for table in wanted if table)


def equal_table(found: Between) -> Table | None:
    """The rows that `tables` leaves out when brief because they are equal."""
    return _changes("Equal", [c for c in distinct(found.changes) if c.verdict == EQUAL])


def equal_lines(found: Between) -> tuple[str, ...]:
    """`equal: tokens/s in 3 of 4 cells, peak memory in all 4; --verbose lists them`; empty where nothing is equal."""
    changes = distinct(found.changes)
    totals = Counter(c.metric for c in changes)
    equal = Counter(c.metric for c in changes if c.verdict == EQUAL)
    parts = [
        f"{metric_words(metric)} in {f'all {n}' if n == totals[metric] and n > 1 else f'{n} of {totals[metric]}'}"
        for metric, n in equal.items()
    ]
    return (f"equal: {', '.join(parts)}; --verbose lists them",) if parts else ()


def _reason(c: Change) -> str:
    """Without the size of the effect, which the ratio beside it says; `max(r, 1/r) - 1` would be another number."""
    size, mark, rest = c.reason.partition(" %; ")
    return rest if mark and size.startswith("a difference of ") else c.reason


def _changes(title: str, changes: Sequence[Change], reasons: bool = True) -> Table | None:
    """All changes with a verdict, and at least MOST_ROWS; a note counts the rows left out."""

    def values(c: Change) -> str:
        scale = scale_of(c.unit, c.metric, (c.first, c.second))
        return " -> ".join(format_parts(x, None, None, scale)[0] for x in (c.first, c.second)) + f" {scale.unit}"

    def ratio(c: Change) -> Cell:
        word = direction(c.metric, c.ratio)
        return Cell(
            *verdict_text(c.verdict, c.ratio, c.low, c.high, word, None if reasons else c.detectable_ratio),
            _TONES.get(c.verdict or "", "quiet"),
        )

    own: tuple[Filled[Change], ...] = ((Column("differs here", prose=True), lambda c: differences_text(c.differences)),)
    why: tuple[Filled[Change], ...] = ((Column("reason", priority=4, prose=True), _reason),)
    detectable: tuple[Filled[Change], ...] = (
        (
            numeric("detectable difference", 3),
            lambda c: "" if c.detectable_ratio is None else short_percent(c.detectable_ratio),
        ),
    )
    columns: tuple[Filled[Change], ...] = (
        (Column("what", prose=True), lambda c: c.label if c.row is None else f"{c.row} ({c.label})"),
        (Column("metric"), lambda c: metric_words(c.metric, c.unit)),
        (numeric("A -> B", 2), values),
        (Column("B over A"), ratio),
        *(detectable if reasons else ()),
        *(own if any(c.differences for c in changes) else ()),
        *(why if reasons or any(c.verdict is None for c in changes) else ()),
    )
    most = max(MOST_ROWS, sum(c.verdict in (BETTER, WORSE) for c in changes))
    left = changes[most:]
    without = sum(c.verdict is None for c in left)
    counts = ((len(left) - without, "equal or inconclusive"), (without, "without a verdict"))
    note = f"Not shown: {', '.join(f'{n} {word}' for n, word in counts if n)}; --format json has all."
    return filled(title, changes[:most], columns, (note,) if left else ())


def lines(found: Between) -> tuple[str, ...]:
    """Lines below the tables."""
    lost = {x.label for x in found.lost}
    return (
        *(f"note: {note}" for note in found.notes),
        *(f"only in A: {name}" for name in found.only_first if name not in lost),
        *(f"only in B: {name}" for name in found.only_second),
    )
