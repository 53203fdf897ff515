"""Results that must be equal to the bit: known products, and seeded trajectories that all alike devices share."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paceline.analysis.findings.nodes import FAIL, SUSPECT, NodeEvidence
from paceline.results.machine_samples import ProductSample, TrajectorySample
from paceline.results.records import RunRecord

DIAGNOSE = "dcgmi diag -r 4   (take the node out of service first)"
REPEAT = "paceline run nodes --set workload.node=process   (again, on this node alone)"
# Bits that a result's storage has, within those of an fp32 of the same value.
_FORMATS = {"fp32": ("<f", "<I"), "fp16": ("<e", "<H")}

Found = tuple[int, NodeEvidence]


class Trajectory(NamedTuple):
    losses: tuple[float, ...]
    weights: str


def product_evidence(record: RunRecord) -> Iterator[Found]:
    """Every rank whose known product came out wrong, with the first wrong element; then kernels and copies whose own
    check failed."""
    by_rank: defaultdict[int, list[ProductSample]] = defaultdict(list)
    for sample in record.products:
        if sample.wrong:
            by_rank[sample.rank].append(sample)
    proved = Counter(sample.rank for sample in record.products)
    for rank, samples in by_rank.items():
        yield rank, _evidence("wrong result", FAIL, _product_text(rank, samples, proved[rank]), DIAGNOSE)
    for s in record.kernels:
        if s.wrong or s.status == "failed":
            how = f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}"
            text = f"{s.kernel} {s.dtype} ({s.label}) on rank {s.rank}, repeat {s.repeat}: {how}"
            yield s.rank, _evidence("wrong result", FAIL, text, DIAGNOSE)


def _product_text(rank: int, samples: list[ProductSample], proved: int) -> str:
    first = samples[0]
    many = f"{first.wrong} element{'s' if first.wrong > 1 else ''}"
    where = f"row {first.place[0]}, column {first.place[1]}" if first.place else "an unknown place"
    m, n, k = first.sides
    bits = _flipped(first)
    return (
        f"a {first.dtype} product of {m} x {n} x {k} with a known result is wrong on rank {rank} in {len(samples)} of "
        f"{proved} proofs: {many} in repeat {first.repeat}, the first at "
        f"{where} is {first.found:g} instead of {first.expected:g}{bits}"
    )


def _flipped(sample: ProductSample) -> str:
    """Which bits of the stored number differ, counted from the lowest; empty where the values cannot say."""
    if sample.found is None or sample.expected is None:
        return ""
    value, word = _FORMATS.get(sample.dtype, _FORMATS["fp32"])
    shift = 16 if sample.dtype == "bf16" else 0
    found, expected = (struct.unpack(word, struct.pack(value, x))[0] for x in (sample.found, sample.expected))
    differs = (found ^ expected) >> shift
    bits = [str(i) for i in range(differs.bit_length()) if differs >> i & 1]
    return f" (bit{'s' if len(bits) > 1 else ''} {', '.join(bits)} flipped)" if bits else ""


# --- trajectories ---


def trajectory_evidence(record: RunRecord, alike: Mapping[int, str]) -> tuple[list[Found], list[str]]:
    """alike: rank -> what its device and versions are; only ranks that agree in it must agree in their bits."""
    found: list[Found] = []
    notes: list[str] = []
    groups: defaultdict[str, list[TrajectorySample]] = defaultdict(list)
    for sample in record.trajectories:
        groups[alike.get(sample.rank, "")].append(sample)
    for samples in groups.values():
        evidence, note = _of_group(samples)
        found += evidence
        notes += [note] if note else []
    return found, notes


def _of_group(samples: list[TrajectorySample]) -> tuple[list[Found], str | None]:
    """Self-agreement comes first: one steady rank shows that kernels are deterministic here, so that another which does
    not repeat itself is ill. Then steady ranks are compared with each other, one vote each."""
    turns: defaultdict[int, list[TrajectorySample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.rank, s.turn)):
        turns[sample.rank].append(sample)
    steady = {rank: _result(own[0]) for rank, own in turns.items() if len(set(map(_result, own))) == 1}
    if not steady:
        return _nobody_steady(turns)
    usual, votes = Counter(steady.values()).most_common(1)[0]
    if 2 * votes <= len(steady):
        wavering = [
            (rank, _wavering(own, len(steady), len(turns))) for rank, own in turns.items() if rank not in steady
        ]
        return [*_undecided(steady), *wavering], None
    found = []
    for rank, own in turns.items():
        other = next((s for s in own if _result(s) != usual), None)
        if other is not None:
            known = rank in steady or votes > 1
            evidence = _odd(other, usual, len(steady)) if known else _wavering(own, len(steady), len(turns))
            found.append((rank, evidence))
    return found, None


def _result(sample: TrajectorySample) -> Trajectory:
    return Trajectory(sample.losses, sample.weights)


def _nobody_steady(turns: Mapping[int, list[TrajectorySample]]) -> tuple[list[Found], str | None]:
    if len(turns) == 1:
        return [(rank, _wavering(own, 0, 1)) for rank, own in turns.items()], None
    different = len({_result(s) for own in turns.values() for s in own})
    return [], (
        f"the seeded steps gave {different} different results on {len(turns)} alike ranks, none of which repeats its "
        "own: kernels are not deterministic here, so silent corruption was looked for in known products only"
    )


def _undecided(steady: Mapping[int, Trajectory]) -> list[Found]:
    text = (
        f"{len(steady)} alike ranks compute {len(set(steady.values()))} different results from the same seeded steps, "
        "each always its own, none in the majority: which is right is open"
    )
    return [(rank, _evidence("other bits", SUSPECT, text, REPEAT)) for rank in steady]


def _wavering(own: list[TrajectorySample], steady: int, ranks: int) -> NodeEvidence:
    """A rank that disagrees with itself, beside so many steady ones of all alike."""
    first, other = own[0], next(s for s in own if _result(s) != _result(own[0]))
    text = (
        f"rank {first.rank} computes other bits after the timed work than before it, from the same seeded steps: "
        f"{_difference(_result(other), _result(first), 'before it')}; "
    )
    if not steady:
        text += "no alike rank tells whether kernels are deterministic here"
        return _evidence("other bits", SUSPECT, text, REPEAT)
    text += f"{steady} of {ranks} alike ranks repeat their own, so kernels are deterministic here"
    return _evidence("other bits", FAIL, text, DIAGNOSE)


def _odd(sample: TrajectorySample, usual: Trajectory, steady: int) -> NodeEvidence:
    when = "before the timed work" if sample.turn == 0 else "after the timed work"
    what = _difference(_result(sample), usual, "the majority's")
    text = (
        f"rank {sample.rank} computes other bits than most of {steady} alike ranks that repeat theirs, {when}: {what}"
    )
    return _evidence("other bits", FAIL, text, DIAGNOSE)


def _difference(found: Trajectory, expected: Trajectory, whose: str) -> str:
    """The first step whose loss differs."""
    for step, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=False)):
        if loss != other:
            return f"the loss of step {step} is {loss!r}, {whose} {other!r}"
    return "weights differ"


def _evidence(kind: str, verdict: str, text: str, command: str) -> NodeEvidence:
    return NodeEvidence(kind=kind, verdict=verdict, text=text, next_command=command)


def wrong_pairs(record: RunRecord) -> Iterator[Found]:
    """Data of the tournament that arrived wrong: the fault may lie at either end or between."""
    for s in record.collectives:
        if s.wrong and s.peer is not None:
            text = f"{s.wrong} elements that rank {s.peer} sent to rank {s.rank} arrived wrong"
            for rank in (s.rank, s.peer):
                yield rank, _evidence("wrong result", SUSPECT, text, DIAGNOSE)


def all_proofs(record: RunRecord) -> Iterable[Found]:
    yield from product_evidence(record)
    yield from wrong_pairs(record)
