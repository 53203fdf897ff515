"""The same arithmetic on audited steps: dtypes and FLOPs of matrix products, and what was recomputed."""

from __future__ import annotations

import statistics
from collections import Counter

from paceline.analysis.findings import Check
from paceline.analysis.training.certificate.observed import Observed, Standard, checked
from paceline.models import parallel

Counts = dict[tuple[int, int], dict[str, tuple[int, int]]]
# Rounding to these loses nothing.
WIDE = ("fp32", "float64")
# Some layers pad the last micro batch or the vocabulary; a missing layer or a skipped product is more.
FLOPS_TOLERANCE = 0.005
# Of the dtypes of 8-bit factors, as torch names them.
EIGHT_BIT = "float8"


def _operations(run: Observed, operation: str) -> Counts:
    """Calls and work by dtype of one kind of operator, by rank and audited step."""
    found: Counts = {(o.rank, o.step): {} for o in run.record.operations}
    for o in run.record.operations:
        if o.operation == operation:
            found[o.rank, o.step][o.dtype] = (o.calls, o.work)
    return found


def _dtypes_of(counts: Counts) -> set[str]:
    return {dtype for by_dtype in counts.values() for dtype in by_dtype}


def products(run: Observed, standard: Standard) -> Check | None:
    """Matrix products on audited steps: the dtypes of the reference's, and as many FLOPs. Values are not rounded to
    dtypes that the reference does not use, either."""
    reference = standard.reference
    if reference is None or not run.record.operations or not reference.record.operations:
        return None
    own, known = _operations(run, "product"), _operations(reference, "product")
    precision = run.spec.training.precision
    wanted = _dtypes_of(known)
    approximates = run.spec.approximation is not None
    # Compression may need products of its own, in the dtype of the gradients it reduces.
    of_compression = {precision.reduce} - wanted if approximates else set()
    problems = [f"products of {dtype}" for dtype in sorted(_dtypes_of(own) - wanted - of_compression)]
    own = {key: {d: work for d, work in found.items() if d not in of_compression} for key, found in own.items()}
    casts = _dtypes_of(_operations(reference, "cast")) | wanted | {precision.base, precision.reduce, *WIDE}
    if not approximates:
        problems += [f"values rounded to {dtype}" for dtype in sorted(_dtypes_of(_operations(run, "cast")) - casts)]
    expected = f"products of {' and '.join(sorted(wanted))}"
    if run.spec.training.checkpointing == reference.spec.training.checkpointing:
        per_step = _flops(known)
        repeated = parallel.repeated_flops(run.record.shape, run.layout, run.spec.training)
        total = statistics.median(per_step.values()) + repeated
        expected += f", {'at least ' if approximates else ''}{total:.6g} FLOPs per step"
        problems += [
            f"{flops / total:.4g} times the FLOPs at step {step}"
            for step, flops in _flops(own).items()
            if abs(flops - total) > FLOPS_TOLERANCE * total and not (approximates and flops > total)
        ]
    if precision.is_8bit:
        text, missing = _eight_bit_problems(own, known)
        expected += text
        problems += missing
    plain = ", as plain code" if run.spec.training.compile else ""
    seen = f"as expected at {len(_flops(own))} steps chosen at random{plain}"
    return checked("matrix products", expected, problems, seen)


def _eight_bit_problems(own: Counts, known: Counts) -> tuple[str, list[str]]:
    """What is expected of the products in 8 bit, and what is missing: at least the reference's FLOPs are in 8 bit, and
    the reference has some. More is impossible where all FLOPs are equal, and recomputation where they are not."""
    least = min(_flops(known, EIGHT_BIT).values(), default=0)
    if not least:
        return ", some in 8 bit", ["no 8-bit product in the reference"]
    problems = [
        f"{flops / least:.4g} times the 8-bit FLOPs at step {step}"
        for step, flops in _flops(own, EIGHT_BIT).items()
        if flops < (1 - FLOPS_TOLERANCE) * least
    ]
    return f", {least:.6g} of them in 8 bit", problems


def _flops(counts: Counts, prefix: str = "") -> dict[int, int]:
    """FLOPs by step over all ranks, of dtypes whose names begin so."""
    found: Counter[int] = Counter()
    for (_, step), by_dtype in counts.items():
        found[step] += sum(work for dtype, (_, work) in by_dtype.items() if dtype.startswith(prefix))
    return dict(found)


def recomputation(run: Observed, standard: Standard) -> Check | None:
    """Activation checkpointing recomputes what it says: activations once more, and attention too if it is full."""
    if standard.reference is None or not run.record.operations:
        return None
    problems, expected = [], []
    for operation, repeated in (("attention", ("full",)), ("activation", ("full", "selective"))):
        ratios = [
            {key: sum(c for c, _ in by_dtype.values()) for key, by_dtype in _operations(each, operation).items()}
            for each in (run, standard.reference)
        ]

        def expect(each: Observed, rank: int, kind: str = operation, again: tuple[str, ...] = repeated) -> int:
            training, layers, layout = each.spec.training, each.record.shape.layers, each.layout
            calls = parallel.attention_calls(layout, rank, layers, parallel.micro_batches(layout, training))
            calls //= 1 if kind == "attention" or not layout.ring else layout.cp
            return calls * (2 if training.checkpointing in again else 1)

        if not ratios[1] or set(ratios[1].values()) != {expect(standard.reference, 0)}:
            continue  # operators that are not counted here, such as a fused layer
        counts = sorted({expect(run, rank) for rank in range(run.layout.world_size)})
        expected.append(f"{' or '.join(map(str, counts))} of {operation}")
        problems += [
            f"{calls} calls of {operation} on rank {rank} at step {step}"
            for (rank, step), calls in ratios[0].items()
            if calls != expect(run, rank)
        ]
    if not expected:
        return None
    how = run.spec.training.checkpointing
    return checked("activation checkpointing", f"{how}: {', '.join(expected)} per step", problems, "as expected")
