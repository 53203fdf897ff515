"""What mattered and what did not: the effects of a designed experiment, ranked, and its interactions."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings import DesignOutcome, Effect, Report, Response
from paceline.analysis.findings.compare import ALIASED, FASTER, INTERACTION, LESS, MORE, NO_EFFECT, OPEN, SLOWER
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, format_number, listed, percent_up, places

SPEED, MEMORY = "tokens_per_s", "peak_memory_bytes"
MOST_DIGITS = 2
MOST_NAMED = 3
_TONES = {FASTER: "good", LESS: "good", SLOWER: "bad", MORE: "bad"}
_NUMBERED = "Changes are 100 (changed / unchanged - 1), with 95 % intervals; ranked by the change of speed."
_RATIO_OF_RATIOS = (
    "An interaction is by how much the effect of one factor grows when the other is changed too; 0 is none."
)


def tables(report: Report) -> tuple[Table, ...]:
    """In reading order; empty if nothing was designed."""
    found: list[Table | None] = []
    for outcome in report.effects:
        of = f": {outcome.kind}, {outcome.title}" if len(report.effects) > 1 else ""
        changes = [e for e in outcome.effects if e.kind != INTERACTION]
        crossed = [e for e in outcome.effects if e.kind == INTERACTION]
        left_out = (
            f"Without a valid run: {left.name} ({left.status}{f': {left.reason}' if left.reason else ''})."
            for left in outcome.left_out
        )
        notes, title = (plan(outcome), *outcome.notes, *left_out), f"What mattered, what did not{of}"
        found.append(_ranked(title, "change", changes, (_NUMBERED, *notes)))
        found.append(_ranked(f"Interactions{of}", "factors", crossed, (_RATIO_OF_RATIOS, *(() if changes else notes))))
        if not outcome.effects:
            found.append(Table(title, (Column("change"),), ((Cell("nothing to judge"),),), notes))
    return tuple(table for table in found if table)


def sentences(report: Report) -> tuple[str, str, str] | None:
    """What mattered most, what did not, and the design; None if no design has an effect."""
    outcome = max(report.effects, key=lambda found: len(found.effects), default=None)
    if outcome is None or not outcome.effects:
        return None
    responses = [(e, r) for e in outcome.effects if (r := e.response(SPEED) or e.response(MEMORY)) is not None]
    decided = [f"{e.name} ({_brief(r)})" for e, r in responses if r.verdict in _TONES and e.kind != INTERACTION]
    crossed = [
        f"{e.name} interact ({_brief(r)})" for e, r in responses if r.verdict in _TONES and e.kind == INTERACTION
    ]
    none = [
        f"{e.name} (under {percent_up(r.bound_ratio)} %)"
        for e, r in responses
        if (e.kind != INTERACTION and r.metric == SPEED and r.verdict == NO_EFFECT)
    ]
    mattered = listed((*decided[:MOST_NAMED], *crossed[:1]))
    first = f"What mattered most: {mattered}." if mattered else "None of the changes is known to matter."
    return first, f"No effect on speed: {listed(none[:MOST_NAMED])}." if none else "", plan(outcome)


def _brief(response: Response) -> str:
    percent = 100 * (response.ratio - 1)
    number = _signed(percent, 1 if abs(percent) < 10 else 0)
    return f"{number} % {'tokens/s' if response.metric == SPEED else 'peak memory'}"


def plan(outcome: DesignOutcome) -> str:
    """`Design: one-at-a-time from optimizer paged_adamw_8bit, rank 16; ...`."""
    start = listed(f"{name.replace('_', ' ')} {levels[0]}" for name, levels in outcome.levels.items())
    return f"Design: {outcome.kind} from {start}; on {outcome.title}."


def _ranked(title: str, what: str, effects: Sequence[Effect], notes: tuple[str, ...]) -> Table | None:
    def number(effect: Effect, metric: str) -> Cell:
        response = effect.response(metric)
        return Cell(*change(response)) if response else Cell(MISSING)

    def judged(effect: Effect, metric: str) -> Cell:
        response = effect.response(metric)
        if response is None:
            return Cell(MISSING)
        return Cell(verdict(response, effect.kind), "", _TONES.get(response.verdict, "quiet"))

    def detectable(effect: Effect) -> str:
        speed = effect.response(SPEED)
        return percent_up(speed.detectable_ratio if speed else None)

    columns: list[Filled[Effect]] = [
        (Column(what, prose=True), lambda effect: effect.name),
        (numeric("tokens/s, %"), lambda effect: number(effect, SPEED)),
        (Column("speed"), lambda effect: judged(effect, SPEED)),
        (numeric("smallest detectable, %", 3), detectable),
        (numeric("peak memory, %", 1), lambda effect: number(effect, MEMORY)),
        (Column("memory", priority=1), lambda effect: judged(effect, MEMORY)),
        (numeric("pairs", 4), lambda effect: str(effect.pairs)),
    ]
    if any(effect.aliases for effect in effects):
        heading = Column("confounded with", prose=True, priority=2)
        columns.append((heading, lambda effect: ", ".join(effect.aliases) or MISSING))
    return filled(title, effects, columns, notes, lambda effect: effect.cells)


def change(response: Response) -> tuple[str, str]:
    """`+12.3` and `[+11.8, +12.8]`, in percent."""
    value, low, high = (None if x is None else 100 * (x - 1) for x in (response.ratio, response.low, response.high))
    assert value is not None
    if low is None or high is None or high - low < 10**-MOST_DIGITS:
        return _signed(value, 1), ""
    digits = min(max(places(value, low, high), 0), MOST_DIGITS)
    return _signed(value, digits), f"[{_signed(low, digits)}, {_signed(high, digits)}]"


def _signed(value: float, digits: int) -> str:
    text = format_number(value, digits)
    return text if text.startswith("-") or not float(text.replace(",", "")) else f"+{text}"


def verdict(response: Response, kind: str) -> str:
    """The verdict for people; without an effect with its bound: `no effect, under 0.8 %`."""
    if response.verdict == NO_EFFECT:
        word = "no interaction" if kind == INTERACTION else NO_EFFECT
        return f"{word}, under {percent_up(response.bound_ratio)} %"
    if response.verdict == ALIASED:
        return "confounded"
    if kind == INTERACTION and response.verdict != OPEN:
        return "more together" if response.ratio > 1 else "less together"
    return "inconclusive" if response.verdict == OPEN else response.verdict
