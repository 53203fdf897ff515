"""What served models answered, beside how fast: scores, targets, and replicas that do not answer as the others do."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.served import AGREES, FAILED, PASSED, SMOKE, Accuracy, ReplicaAnswers
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, format_parts

TONES = {PASSED: "good", FAILED: "bad", SMOKE: "quiet", AGREES: "good"}
RULE = (
    "ROUGE F-measures times 100 as rouge-score computes them with stemming, means over samples. Lsum: a sentence ends "
    "with its line, or with . ! or ? before white space, but for initials and common abbreviations."
)
_HEADINGS = {"rouge1_score": "ROUGE-1", "rouge2_score": "ROUGE-2", "rouge_l_score": "ROUGE-L"}
_HEADINGS |= {"rouge_lsum_score": "ROUGE-Lsum", "answer_characters": "characters of all answers"}


def tables(report: Report) -> tuple[Table, ...]:
    """Scores by cell, then replicas by cell; each only if there is something to show."""
    return tuple(table for table in (_scores(report), _replicas(report)) if table)


def sentence(report: Report) -> str:
    """What failed and who is suspect first, then what passed; empty if answers were not looked at or all agree."""
    return " ".join((*_failures(report), *_suspects(report), *_passes(report)))


def _failures(report: Report) -> Iterator[str]:
    for found in report.accuracy:
        if found.verdict == FAILED:
            missed = [_target_text(t.metric, t.value, t.low, t.high) for t in found.targets if not t.ok]
            yield f"Failed accuracy: {'; '.join(missed)}."


def _target_text(metric: str, value: float, low: float, high: float | None) -> str:
    needed = f"at least {low:.4f} is needed" if high is None else f"{low:,.0f} to {high:,.0f} are accepted"
    return f"{_HEADINGS[metric]} is {value:,.4f}, {needed}"


def _suspects(report: Report) -> Iterator[str]:
    for found in report.accuracy:
        for each in found.replicas:
            if each.flag:
                yield f"Suspect: {flag_text(each)}."


def flag_text(each: ReplicaAnswers) -> str:
    """`replica 1 (node-b) answered 3 of 4 questions otherwise than most replicas: its 812 tokens/s are not the same
    work`."""
    where = f" ({each.host})" if each.host else ""
    speed = format_parts(each.tokens_per_s, None, None)[0]
    doubt = "" if each.tokens_per_s is None else f": its {speed} tokens/s may be different work"
    return f"replica {each.replica}{where} {each.flag}{doubt}"


def _passes(report: Report) -> Iterator[str]:
    passed = sum(found.verdict == PASSED for found in report.accuracy)
    if passed:
        yield f"Accuracy passed in {passed} {'cell' if passed == 1 else 'cells'}, on the whole set."


# --- tables ---


def _scores(report: Report) -> Table | None:
    scored = [found for found in report.accuracy if found.scores or found.note]
    if not scored:
        return None
    metrics = list(dict.fromkeys(m.metric for found in scored for m in found.scores))
    columns = (
        Column("what", prose=True),
        Column("accuracy"),
        Column("samples", numeric=True, priority=1),
        *(Column(_HEADINGS[metric], numeric=True, priority=0 if i < 1 else 2) for i, metric in enumerate(metrics)),
    )
    rows = tuple(_score_row(report, found, metrics) for found in scored)
    notes = (*(_note(found) for found in scored if found.note), *((RULE,) if metrics else ()))
    return Table("Accuracy", columns, rows, tuple(dict.fromkeys(notes)), tuple((found.cell,) for found in scored))


def _note(found: Accuracy) -> str:
    text = found.note or ""
    return f"{text[0].upper()}{text[1:]}."


def _score_row(report: Report, found: Accuracy, metrics: list[str]) -> tuple[Cell, ...]:
    by_metric = {m.metric: m for m in found.scores}
    verdict = found.verdict or "not scored"
    return (
        Cell(cell_name(report, found.cell, found.axes, varying_axes(report))),
        Cell(
            verdict,
            "; ".join(_target_text(t.metric, t.value, t.low, t.high) for t in found.targets if not t.ok),
            TONES.get(verdict, "quiet"),
        ),
        Cell(f"{found.scored:,}"),
        *(_score(by_metric.get(metric)) for metric in metrics),
    )


def _score(m: Measurement | None) -> Cell:
    return Cell(MISSING) if m is None else Cell(*format_parts(m.value, m.low, m.high))


def _replicas(report: Report) -> Table | None:
    found = [(each, one) for each in report.accuracy for one in each.replicas]
    if not found:
        return None
    metrics = list(dict.fromkeys(m.metric for _, one in found for m in one.scores))[:1]
    several = len({each.cell for each, _ in found}) > 1
    columns = (
        *((Column("what", prose=True),) if several else ()),
        Column("replica"),
        Column("answers"),
        Column("output over the whole load, tokens/s", numeric=True),
        *(Column(_HEADINGS[metric], numeric=True, priority=1) for metric in metrics),
        Column("flag", prose=True),
    )
    rows = tuple(_replica_row(report, each, one, metrics, several) for each, one in found)
    note = (
        "Every replica got the same prompts outside the timed load. A flagged replica may be fast because it does "
        "different work, so its speed is always shown with the flag. Tokens/s cover the whole time of its loads, "
        "including waits for other replicas."
    )
    return Table("Answers by replica", columns, rows, (note,), tuple((each.cell,) for each, _ in found))


def _replica_row(
    report: Report, each: Accuracy, one: ReplicaAnswers, metrics: list[str], several: bool
) -> tuple[Cell, ...]:
    scores = {m.metric: m for m in one.scores}
    how = f"{one.asked - one.odd} of {one.asked} as the majority" if one.agreement else ""
    return (
        *((Cell(cell_name(report, each.cell, each.axes, varying_axes(report))),) if several else ()),
        Cell(str(one.replica), one.host or ""),
        Cell(one.agreement or MISSING, how, "bad" if one.flag else TONES.get(one.agreement or "", "quiet")),
        Cell(format_parts(one.tokens_per_s, None, None)[0]),
        *(_score(scores.get(metric)) for metric in metrics),
        Cell(one.flag or "", "", "bad" if one.flag else ""),
    )
