"""Whether each node of a test may be accepted, by what evidence, and what to try next."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.findings.between import Differing

PASS, UNDECIDED, SUSPECT, FAIL = "pass", "undecided", "suspect", "fail"
WORST_FIRST = (FAIL, SUSPECT, UNDECIDED, PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasure:
    """One quantity of one rank. relative is its ratio to the median of its peers (or of a baseline), what all share
    over time taken out; of a temperature it is the difference in degrees. low and high are its 95 % interval over the
    repeats, None where there is one reading. accepted are the ends of the band; z is the modified z among the peers."""

    measure: str
    unit: str
    rank: int
    value: float
    relative: float
    low: float | None
    high: float | None
    accepted: tuple[float | None, float | None]
    z: float | None
    verdict: str = PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """One thing that speaks against a node, or that its repeats could not tell. next_command is what an operator should
    try there."""

    kind: str
    verdict: str
    text: str
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """One node of one run. against names what it was compared with; differences are facts in which it stands apart
    from the majority (first is the node's, second the majority's); condition is what its devices and host said."""

    run: str
    cell: str
    node: str
    host: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    verdict: str
    against: str
    evidence: tuple[NodeEvidence, ...] = ()
    measures: tuple[NodeMeasure, ...] = ()
    differences: tuple[Differing, ...] = ()
    condition: tuple[tuple[str, str], ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether automation must not take it: it failed, or something of it could not be told, whatever else makes it
        suspect. A suspect alone is a person's decision."""
        return any(e.verdict in (FAIL, UNDECIDED) for e in self.evidence)


def worst(verdicts: tuple[str, ...]) -> str:
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), PASS)
