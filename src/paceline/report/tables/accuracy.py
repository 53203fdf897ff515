"""The answers of served models: scores, targets, and replicas whose answers differ from the others."""

from __future__ import annotations

from paceline.analysis.findings import Report
from paceline.analysis.findings.served import AGREES, FAILED, PASSED, SMOKE, Accuracy, ReplicaAnswers
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, measured_cell, numeric
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
    """Failures and suspect replicas first, then what passed; empty if answers were not checked or all agree."""
    failed = [found for found in report.accuracy if found.verdict == FAILED]
    suspect = [each for found in report.accuracy for each in found.replicas if each.flag]
    passed = sum(found.verdict == PASSED for found in report.accuracy)
    parts = [f"Failed accuracy: {_missed_targets(found)}." for found in failed]
    parts += [f"Suspect: {flag_text(each)}." for each in suspect]
    parts += [f"Accuracy passed in {passed} {'cell' if passed == 1 else 'cells'}, on the whole set."] if passed else []
    return " ".join(parts)


def _missed_targets(found: Accuracy) -> str:
    """`ROUGE-1 is 40.1000, at least 43.8000 is needed`."""

    def needed(low: float, high: float | None) -> str:
        return f"at least {low:.4f} is needed" if high is None else f"{low:,.0f} to {high:,.0f} are accepted"

    missed = [target for target in found.targets if not target.ok]
    return "; ".join(f"{_HEADINGS[t.metric]} is {t.value:,.4f}, {needed(t.low, t.high)}" for t in missed)


def flag_text(each: ReplicaAnswers) -> str:
    """`replica 1 (node-b) answered 3 of 4 questions otherwise than most replicas: its 812 tokens/s are not the same
    work`."""
    where = f" ({each.host})" if each.host else ""
    speed = format_parts(each.tokens_per_s, None, None)[0]
    doubt = "" if each.tokens_per_s is None else f": its {speed} tokens/s may be different work"
    return f"replica {each.replica}{where} {each.flag}{doubt}"


# --- tables ---


def _scores(report: Report) -> Table | None:
    scored = [found for found in report.accuracy if found.scores or found.note]
    metrics = list(dict.fromkeys(m.metric for found in scored for m in found.scores))

    def score(metric: str) -> Filled[Accuracy]:
        heading = numeric(_HEADINGS[metric], 0 if metric == metrics[0] else 2)
        return heading, lambda found: measured_cell({m.metric: m for m in found.scores}.get(metric))

    def verdict(found: Accuracy) -> Cell:
        text = found.verdict or "not scored"
        return Cell(text, _missed_targets(found), TONES.get(text, "quiet"))

    columns: tuple[Filled[Accuracy], ...] = (
        (Column("what", prose=True), lambda found: cell_name(report, found.cell, found.axes, varying_axes(report))),
        (Column("accuracy"), verdict),
        (numeric("samples", 1), lambda found: f"{found.scored:,}"),
        *map(score, metrics),
    )
    notes = [f"{found.note[0].upper()}{found.note[1:]}." for found in scored if found.note]
    notes += [RULE] if metrics else []
    return filled("Accuracy", scored, columns, dict.fromkeys(notes), lambda found: (found.cell,))


def _replicas(report: Report) -> Table | None:
    found = [(each, one) for each in report.accuracy for one in each.replicas]
    metrics = list(dict.fromkeys(m.metric for _, one in found for m in one.scores))[:1]
    several = len({each.cell for each, _ in found}) > 1

    def name(pair: tuple[Accuracy, ReplicaAnswers]) -> str:
        return cell_name(report, pair[0].cell, pair[0].axes, varying_axes(report))

    def answers(pair: tuple[Accuracy, ReplicaAnswers]) -> Cell:
        one = pair[1]
        how = f"{one.asked - one.odd} of {one.asked} as the majority" if one.agreement else ""
        return Cell(one.agreement or MISSING, how, "bad" if one.flag else TONES.get(one.agreement or "", "quiet"))

    def score(metric: str) -> Filled[tuple[Accuracy, ReplicaAnswers]]:
        heading = numeric(_HEADINGS[metric], 1)
        return heading, lambda pair: measured_cell({m.metric: m for m in pair[1].scores}.get(metric))

    columns: tuple[Filled[tuple[Accuracy, ReplicaAnswers]], ...] = (
        *([(Column("what", prose=True), name)] if several else []),
        (Column("replica"), lambda pair: Cell(str(pair[1].replica), pair[1].host or "")),
        (Column("answers"), answers),
        (
            numeric("output over the whole load, tokens/s"),
            lambda pair: format_parts(pair[1].tokens_per_s, None, None)[0],
        ),
        *map(score, metrics),
        (Column("flag", prose=True), lambda pair: Cell(pair[1].flag or "", "", "bad" if pair[1].flag else "")),
    )
    note = (
        "Every replica got the same prompts outside the timed load. A flagged replica may be fast because it does "
        "different work, so its speed is always shown with the flag. Tokens/s cover the whole time of its loads, "
        "including waits for other replicas."
    )
    return filled("Answers by replica", found, columns, (note,), lambda pair: (pair[0].cell,))
