"""The trust light of a report: which launches were disturbed, before any number is shown."""

from __future__ import annotations

from paceline.analysis.findings import Report, RunFinding

# Levels that a reader must see, the worst first.
SHOWN = ("red", "amber")
# More launches than this are counted instead of named: report.json lists them all.
MOST_NAMED = 5


def lines(report: Report) -> list[str]:
    """For each level one line that counts its launches, and one for each of them; empty if nothing was disturbed."""
    found: list[str] = []
    for level in SHOWN:
        ours = [run for run in report.runs if run.trust is not None and run.trust.level == level]
        if not ours:
            continue
        were = f"{len(ours)} of {len(report.runs)} launches {'was' if len(ours) == 1 else 'were'} disturbed"
        effect = "expect wide or shifted intervals" if level == "red" else "small differences may be due to that"
        found.append(f"Trust: {level}. {were}: {effect}.")
        found += [f"  {_named(run)}" for run in ours[:MOST_NAMED]]
        if len(ours) > MOST_NAMED:
            found.append(f"  and {len(ours) - MOST_NAMED} more, listed in report.json")
    return found


def _named(run: RunFinding) -> str:
    assert run.trust is not None
    count = run.trust.repeated
    repeats = f" (after {count} repeat{'' if count == 1 else 's'})" if count else ""
    return f"{run.run}: {'; '.join(run.trust.reasons)}{repeats}"
