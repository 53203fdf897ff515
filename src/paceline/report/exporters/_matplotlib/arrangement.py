"""Where ranked cells stand in a chart: side by side over the number of processes, or downwards in lanes.

Groups that differ in nothing but their size are one family and share a panel; all others keep a lane per cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.errors import Scalar
from paceline.report.exporters._matplotlib.canvas import PALETTE
from paceline.report.text.cells import Group, Row, groups

MOST_LANES, MOST_FAMILIES = 60, 4
_PLACES = ("world_size", "nodes")
_BATCH = ("micro_batch", "accumulation")


@dataclass(frozen=True, slots=True)
class Mark:
    """One cell: its number, and what is drawn beside it (a formula's number, another price) where there is one."""

    label: str
    colour: str
    row: Row
    measurement: Measurement
    beside: Measurement | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Marks by number of processes, then by strategy; strategies in the order of their colours."""

    title: str
    sizes: tuple[tuple[int, dict[str, Mark]], ...]
    strategies: dict[str, str]
    on_gpus: bool

    @property
    def marks(self) -> list[Mark]:
        return [mark for _, by_strategy in self.sizes for mark in by_strategy.values()]


@dataclass(frozen=True, slots=True)
class Lane:
    """A line of a chart: a mark, or without one the heading of its group."""

    y: float
    label: str
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    families: tuple[Family, ...]
    lanes: tuple[Lane, ...]
    left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.families or self.lanes)

    @property
    def marks(self) -> list[Mark]:
        in_lanes = [lane.mark for lane in self.lanes if lane.mark is not None]
        return [mark for family in self.families for mark in family.marks] + in_lanes


Pick = Callable[[Row], tuple[Measurement | None, Measurement | None]]


def metric(name: str, beside: str = "") -> Pick:
    return lambda row: (row.measurements.get(name), row.measurements.get(beside))


def arrange(report: Report, pick: Pick, *, sampled: bool = False, together: bool = True) -> Arrangement:
    """Ranked cells for which `pick` finds a value; sampled asks for their step times too, together allows families."""
    found = groups(report)
    colours = strategy_colours(report, found)
    marked = []
    for group in found:
        marks = [m for row in group.rows if (m := _mark(report, row, pick, colours)) and (m.samples or not sampled)]
        if marks:
            marked.append((group, marks))
    families = _families(marked)
    covered = {id(group): (group, marks) for members, _ in families for group, marks in members}
    apart = [(group, marks) for group, marks in marked if id(group) not in covered]
    if not together:
        families, apart = [], [*covered.values(), *apart]
    lanes, beyond = _lanes(apart)
    left_out = beyond + sum(len(marks) for members, _ in families[MOST_FAMILIES:] for _, marks in members)
    drawn = tuple(_family(members, how) for members, how in families[:MOST_FAMILIES])
    return Arrangement(drawn, lanes, left_out)


def strategy_colours(report: Report, found: Sequence[Group] | None = None) -> dict[str, str]:
    """The same strategy has the same colour in every chart; past the palette all are grey, labels tell them apart."""
    labels = {row.label for group in (groups(report) if found is None else found) for row in group.rows}
    labels |= {describe(p.efficiency.axes, ()) for p in report.scaling}
    plainest_first = sorted(labels, key=lambda label: (len(label), label))
    return {label: PALETTE[min(i, len(PALETTE) - 1)] for i, label in enumerate(plainest_first)}


def _mark(report: Report, row: Row, pick: Pick, colours: Mapping[str, str]) -> Mark | None:
    found, beside = pick(row)
    if found is None or found.value is None:
        return None
    samples = tuple(report.distributions.get(row.cell, ()))
    return Mark(row.label, colours[row.label], row, found, beside, samples)


# --- families ------------------------------------------------------------------------------------------------------

Marked = tuple[Group, list[Mark]]


def _families(marked: Sequence[Marked]) -> list[tuple[list[Marked], str]]:
    """Groups of at least two sizes that hold the batch of each process; of the rest, those that hold that of all."""
    weak = _of_several_sizes(marked, (*_PLACES, "global_batch"))
    covered = {id(group) for members in weak for group, _ in members}
    strong = [
        members
        for members in _of_several_sizes(marked, (*_PLACES, *_BATCH))
        if not all(id(group) in covered for group, _ in members)
    ]
    return [(members, "weak") for members in weak] + [(members, "strong") for members in strong]


def _of_several_sizes(marked: Sequence[Marked], free: Sequence[str]) -> list[list[Marked]]:
    """One group per size and no more strategies than colours, else a panel could not be read."""
    found: dict[tuple[tuple[str, str], ...], list[Marked]] = {}
    for group, marks in marked:
        held = tuple(sorted((name, repr(value)) for name, value in group.axes.items() if name not in free))
        found.setdefault(held, []).append((group, marks))
    smallest_first = (sorted(members, key=_size) for members in found.values())
    return [members for members in smallest_first if _is_readable(members)]


def _size(member: Marked) -> int:
    return _whole(member[0].axes.get("world_size"))


def _is_readable(members: Sequence[Marked]) -> bool:
    sizes = [group.axes.get("world_size") for group, _ in members]
    colours = {mark.label: mark.colour for _, marks in members for mark in marks}
    return len(members) > 1 and len(set(sizes)) == len(sizes) and len(set(colours.values())) == len(colours)


def _family(members: Sequence[Marked], how: str) -> Family:
    """Of members from the smallest on."""
    colours = {mark.label: mark.colour for _, marks in members for mark in marks}
    order = sorted(colours, key=lambda label: (len(label), label))
    sizes = tuple((_size(member), {mark.label: mark for mark in member[1]}) for member in members)
    grown = [group for group, _ in members]
    on_gpus = all(group.axes.get("device") == "cuda" for group in grown)
    return Family(_title(grown, how), sizes, {label: colours[label] for label in order}, on_gpus)


def _title(members: Sequence[Group], how: str) -> str:
    """What the groups share, what is held as they grow, and what must be known of all of them."""
    words = [group.title.split(", ") for group in members]
    own = {axis_text(name, group.axes) for group in members for name in (*_PLACES, *_BATCH, "global_batch")}
    shared = [word for word in words[0] if word not in own and all(word in other for other in words)]
    axes = members[0].axes
    per_process = _whole(axes.get("micro_batch")) * _whole(axes.get("accumulation"))
    process = "GPU" if axes.get("device") == "cuda" else "process"
    each, all_ = f"{per_process} sequences per {process}", f"{axes.get('global_batch')} sequences in all"
    held = f"{each if how == 'weak' else all_} and step"
    warnings = [w for w in members[0].warnings if all(w in group.warnings for group in members)]
    return ": ".join((", ".join((*shared, held)), *warnings))


def _whole(value: Scalar) -> int:
    return value if isinstance(value, int) else 0


# --- lanes ---------------------------------------------------------------------------------------------------------


def _lanes(marked: Sequence[Marked]) -> tuple[tuple[Lane, ...], int]:
    """Downwards under a heading per group, as many as a reader can look through; the number of cells beyond them."""
    found: list[Lane] = []
    y = 0.0
    for group, marks in marked:
        found.append(Lane(y, ": ".join((group.title, *group.warnings))))
        found += [Lane(y - i, mark.label, mark) for i, mark in enumerate(marks, start=1)]
        y -= len(marks) + 1.35
    shown, rest = found[:MOST_LANES], found[MOST_LANES:]
    while rest and shown[-1].mark is None:
        shown.pop()
    return tuple(shown), sum(lane.mark is not None for lane in rest)
