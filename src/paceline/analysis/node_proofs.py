"""Results that must be equal to the bit: known products, and seeded trajectories that all alike devices share."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paceline.acceptance import ProductSample, TrajectorySample
from paceline.findings.nodes import FAIL, SUSPECT, NodeEvidence
from paceline.records import RunRecord

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
    counts = Counter(Trajectory(s.losses, s.weights) for s in samples)
    usual, often = counts.most_common(1)[0]
    if len(counts) == 1:
        return [], None
    ranks = {s.rank for s in samples}
    if 2 * often > len(samples):
        odd = [s for s in samples if Trajectory(s.losses, s.weights) != usual]
        firsts = {s.rank: s for s in reversed(odd)}
        return [(rank, _odd(s, usual, len(ranks))) for rank, s in sorted(firsts.items())], None
    steady = [rank for rank in ranks if len({(s.losses, s.weights) for s in samples if s.rank == rank}) == 1]
    if len(ranks) == 2 and len(steady) == 2:
        text = (
            "two ranks compute different bits from the same seeded steps, each the same twice: which is right is open"
        )
        return [(rank, _evidence("other bits", SUSPECT, text, REPEAT)) for rank in sorted(ranks)], None
    return [], (
        f"the seeded steps gave {len(counts)} different results on {len(ranks)} alike ranks, none of them in the "
        "majority: kernels are not deterministic here, so silent corruption was looked for in known products only"
    )


def _odd(sample: TrajectorySample, usual: Trajectory, ranks: int) -> NodeEvidence:
    when = "before the timed work" if sample.turn == 0 else "after the timed work"
    pairs = enumerate(zip(sample.losses, usual.losses, strict=False))
    step = next(((i, a, b) for i, (a, b) in pairs if a != b), None)
    what = f"the loss of step {step[0]} is {step[1]!r}, the majority's {step[2]!r}" if step else "weights differ"
    text = f"rank {sample.rank} computes other bits than most of {ranks} alike ranks, {when}: {what}"
    return _evidence("other bits", FAIL, text, DIAGNOSE)


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
