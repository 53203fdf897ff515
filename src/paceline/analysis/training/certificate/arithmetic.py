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
    dtypes that the reference does not use, either. The FLOPs of a run that was proved on less are compared with those
    of the other configurations."""
    reference = standard.plain
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
    once = statistics.median(_flops(known).values()) if standard.reference else _flops_of_others(run, standard)
    if once is not None and run.spec.training.checkpointing == reference.spec.training.checkpointing:
        total = once + parallel.repeated_flops(run.record.shape, run.layout, run.spec.training)
        expected += f", {'at least ' if approximates else ''}{total:.6g} FLOPs per step"
        problems += [
            f"{flops / total:.4g} times the FLOPs at step {step}"
            for step, flops in _flops(own).items()
            if abs(flops - total) > FLOPS_TOLERANCE * total and not (approximates and flops > total)
        ]
    if precision.is_8bit:
        text, missing = _eight_bit_problems(own, known if standard.reference else {})
        expected += text
        problems += missing
        if not any(_operations(reference, "narrow").values()):
            problems += [
                f"{calls} factors of {dtype} use less than half of its range on rank {rank} at step {step}: their "
                "scale was made for other values"
                for (rank, step), by_dtype in _operations(run, "narrow").items()
                for dtype, (calls, _) in by_dtype.items()
            ]
    plain = ", as plain code" if run.spec.training.compile else ""
    seen = f"as expected at {len(_flops(own))} steps chosen at random{plain}"
    return checked("matrix products", expected, problems, seen)


def _flops_of_others(run: Observed, standard: Standard) -> float | None:
    """FLOPs per step that other configurations need in common: the median of all, or of the other one if there are two.
    None if there is none."""
    mode, found = run.spec.training.checkpointing, dict[str, float]()
    for peer in standard.group:
        if peer.record.operations and peer.spec.training.checkpointing == mode and peer.spec.approximation is None:
            per_step = statistics.median(_flops(_operations(peer, "product")).values())
            found[peer.spec.cell] = per_step - parallel.repeated_flops(
                peer.record.shape, peer.layout, peer.spec.training
            )
    others = [flops for cell, flops in found.items() if cell != run.spec.cell or len(found) > 2]
    return statistics.median(others) if others else None


def _eight_bit_problems(own: Counts, known: Counts) -> tuple[str, list[str]]:
    """What is expected of the products in 8 bit, and what is missing: at least the reference's FLOPs are in 8 bit, and
    the reference has some. More is impossible where all FLOPs are equal, and recomputation where they are not. Without
    a reference of these sizes, some are."""
    if not known:
        return ", some in 8 bit", [] if any(_flops(own, EIGHT_BIT).values()) else ["no 8-bit product"]
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
    plain = standard.plain
    if plain is None or not run.record.operations:
        return None
    problems, expected = [], []
    for operation, repeated in (("attention", ("full",)), ("activation", ("full", "selective"))):
        ratios = [
            {key: sum(c for c, _ in by_dtype.values()) for key, by_dtype in _operations(each, operation).items()}
            for each in (run, plain)
        ]

        def expect(each: Observed, rank: int, kind: str = operation, again: tuple[str, ...] = repeated) -> int:
            training, layers, layout = each.spec.training, each.record.shape.layers, each.layout
            calls = parallel.attention_calls(layout, rank, layers, parallel.micro_batches(layout, training))
            calls //= 1 if kind == "attention" or not layout.ring else layout.cp
            return calls * (2 if training.checkpointing in again else 1)

        if not ratios[1] or set(ratios[1].values()) != {expect(plain, 0)}:
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
