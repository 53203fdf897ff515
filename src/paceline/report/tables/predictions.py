"""Predictions as tables: what to expect, what the time consists of, what fits, and which run would tell more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.prediction import memory
from paceline.prediction.hardware import host_memory_bytes
from paceline.prediction.predict import Prediction, Worth
from paceline.prediction.scaling import Scaled
from paceline.prediction.serving import ServedPrediction, ServedWorth
from paceline.prediction.setup import Setup
from paceline.prediction.step_time import PARTS
from paceline.report.tables.predicted import amount, between, number
from paceline.report.tables.table import Cell, Column, Table, numeric
from paceline.wording import MISSING

_GIB, _JOULES_PER_KWH = 2.0**30, 3.6e6
MOST_ANCHORS = 8
# Smaller components and parts of a step are not listed: they would be shown as 0.0.
_LEAST_BYTES, _LEAST_SHARE = 0.05 * _GIB, 0.0005
UNFIT_NOTE = "{how} this does not fit into the GPU's memory, so it would not run: see the memory below."
INTERVAL_NOTE = (
    "Intervals cover 90 % on average over sources of published runs; for one framework or cluster they may cover less "
    "(docs/prediction.md)."
)


def recomputing(one: Setup) -> str:
    return "no checkpointing" if one.checkpointing == "none" else f"{one.checkpointing} checkpointing"


def summary(one: Prediction, tokens: float | None, usd: float | None, peak_bytes: float | None = None) -> Table:
    """One prediction, quantity by quantity. peak_bytes: of memory, if it was rehearsed."""
    s, low, high = one.setup, one.low_s, one.high_s

    def rate(scale: float) -> tuple[float, float, float]:
        return scale / one.step_s, scale / high, scale / low

    quantities: list[tuple[str, tuple[float, float, float], str]] = [
        ("step time", (one.step_s, low, high), "s"),
        ("throughput", rate(s.tokens_per_step), "tokens/s"),
        ("throughput per GPU", rate(s.tokens_per_step / s.gpus), "tokens/s"),
    ]
    if one.mfu is not None:
        name = "MFU, of the fp8 peak" if s.fp8 else "MFU"
        quantities.append((name, rate(100 * one.mfu * one.step_s), "%"))
    if joules := one.joules_per_token:
        ends = (joules, joules * low / one.step_s, joules * high / one.step_s)
        quantities.append(("energy of the GPUs", ends, "J/token"))
    if tokens is not None:
        seconds = one.seconds_for(tokens)
        days = [seconds * t / one.step_s / 86400 for t in (one.step_s, low, high)]
        quantities.append((f"time for {amount(tokens)} tokens", (days[0], days[1], days[2]), "days"))
        if usd is not None:
            price = [24 * day * s.gpus * usd for day in days]
            quantities.append((f"cost for {amount(tokens)} tokens", (price[0], price[1], price[2]), "USD"))
        if joules:
            energy = [joules * tokens * t / one.step_s / _JOULES_PER_KWH for t in (one.step_s, low, high)]
            quantities.append((f"energy for {amount(tokens)} tokens", (energy[0], energy[1], energy[2]), "kWh"))
    rows = tuple(
        (Cell(name), Cell(number(v)), Cell(f"{number(a)} to {number(b)}"), Cell(unit))
        for name, (v, a, b), unit in quantities
    )
    columns = (Column("quantity"), numeric("predicted"), numeric("90 % interval"), Column("unit"))
    unfit = UNFIT_NOTE.format(how="By arithmetic" if peak_bytes is None else "By its rehearsal")
    notes = (INTERVAL_NOTE,) if memory.fits(s, peak_bytes=peak_bytes) else (unfit, INTERVAL_NOTE)
    return Table(title(s), columns, rows, notes)


def title(s: Setup) -> str:
    words = [s.layout, f"{s.micro_batch} x {s.micro_batches:g} sequences per rank", recomputing(s)]
    method = "QLoRA of " if s.quantised else "LoRA of " if s.has_adapters else ""
    return f"{method}{s.shape.name} on {s.gpus} x {s.gpu.gpu}: {', '.join(words)}, sequence {s.sequence_length}"


def time_parts(one: Prediction) -> Table:
    rows = tuple(
        (Cell(name), Cell(number(1000 * one.parts[name])), Cell(f"{100 * one.parts[name] / one.step_s:.1f}"))
        for name in PARTS
        if one.parts[name] >= _LEAST_SHARE * one.step_s
    )
    return Table("What the step consists of", (Column("part"), numeric("time, ms"), numeric("share, %")), rows)


def memory_parts(
    one: Prediction, rehearsed: Mapping[str, int] | None, reason: str, too_large: Sequence[Setup] = ()
) -> Table:
    """Memory by component: as rehearsed with the real program, else by arithmetic with the reason for that.

    too_large: faster setups that the arithmetic accepted and a rehearsal did not.
    """
    arithmetic, usable = memory.components(one.setup), memory.usable_bytes(one.setup)
    if rehearsed is not None:
        parts: Mapping[str, float] = {name: size for name, size in rehearsed.items() if name != "peak"}
        word, whole = "peak", float(rehearsed["peak"])
        notes = [
            f"Rehearsed: the real program on tensors without memory. Arithmetic says {_gib(memory.total(one.setup))}."
        ]
    else:
        parts, word, whole = arithmetic, "sum", memory.total(one.setup)
        notes = [f"By arithmetic: {reason}."]
    rows = [(Cell(name), Cell(f"{size / _GIB:.1f}")) for name, size in parts.items() if size >= _LEAST_BYTES]
    rows.append((Cell(word), Cell(f"{whole / _GIB:.1f}")))
    if usable is not None:
        verdict = Cell("fits", "", "good") if whole <= usable else Cell("does not fit", "", "bad")
        rows.append((Cell(f"usable: {verdict.text}", "", verdict.tone), Cell(f"{usable / _GIB:.1f}")))
    if too_large:
        notes.append(f"Too large by rehearsal, so not chosen: {'; '.join(map(variant, too_large))}.")
    if one.setup.offload:
        assumed = memory.USABLE_RATIO * host_memory_bytes(one.setup.gpu)
        notes.append(
            f"Offload keeps {_gib(memory.host_bytes(one.setup))} in the memory of each host; {_gib(assumed)} are "
            "assumed to be usable."
        )
    return Table("Memory of one GPU", (Column("component"), numeric("size, GiB")), tuple(rows), tuple(notes))


def variant(s: Setup) -> str:
    """`dp=8,zero3, micro batch 2, no checkpointing`."""
    return f"{s.layout}, micro batch {s.micro_batch}, {recomputing(s)}"


def _gib(size: float) -> str:
    return f"{number(size / _GIB)} GiB"


def layouts(heading: str, found: Sequence[tuple[str, Prediction]], usd: float | None, tokens: float | None) -> Table:
    """Layouts in order, each with a word on how it compares with the best."""
    rows = []
    best = min(one.step_s * one.setup.gpus / one.setup.tokens_per_step for _, one in found)
    for word, one in found:
        s = one.setup
        cost = one.step_s * s.gpus / s.tokens_per_step
        cells = [
            Cell(s.layout),
            Cell(f"{s.micro_batch} x {s.micro_batches:g}"),
            Cell(s.checkpointing),
            between(
                s.tokens_per_step / one.step_s / s.gpus,
                *(s.tokens_per_step / t / s.gpus for t in (one.high_s, one.low_s)),
            ),
            Cell(MISSING if one.mfu is None else f"{100 * one.mfu:.0f}"),
            Cell(f"{memory.total(s) / _GIB:.0f}"),
            Cell(f"{100 * (cost / best - 1):.0f}"),
            Cell(word, "", "good" if word == "best" else ""),
        ]
        if tokens is not None:
            days = one.seconds_for(tokens) / 86400
            cells.insert(6, Cell(number(days)))
            if usd is not None:
                cells.insert(7, Cell(number(24 * days * s.gpus * usd)))
        rows.append(tuple(cells))
    columns = [
        Column("layout"),
        numeric("micro batch", 3),
        Column("checkpointing", priority=2),
        numeric("tokens/s per GPU"),
        numeric("MFU, %", 2),
        numeric("memory, GiB", 1),
        numeric("slower, %"),
        Column("verdict"),
    ]
    if tokens is not None:
        columns.insert(6, numeric("days"))
        if usd is not None:
            columns.insert(7, numeric("USD"))
    return Table(heading, tuple(columns), tuple(rows), (INTERVAL_NOTE,))


def scaled(found: Sequence[Scaled]) -> Table:
    """More GPUs with equal work on each: speed, efficiency, and how much of the step waits for the network."""
    rows = []
    for each in found:
        one = each.prediction
        s = one.setup
        rate = s.tokens_per_step / s.gpus
        rows.append(
            (
                Cell(str(s.gpus)),
                between(rate / one.step_s, rate / one.high_s, rate / one.low_s),
                Cell(number(one.tokens_per_s)),
                Cell(f"{100 * each.efficiency:.0f}"),
                Cell(f"{100 * each.network_share:.0f}"),
                Cell("network" if each.is_limited else "compute", "", "bad" if each.is_limited else ""),
            )
        )
    columns = (
        numeric("GPUs"),
        numeric("tokens/s per GPU"),
        numeric("tokens/s"),
        numeric("efficiency, %"),
        numeric("waits for the network, %"),
        Column("limit"),
    )
    return Table(f"Scaling of {found[0].prediction.setup.shape.name}", columns, tuple(rows), (INTERVAL_NOTE,))


def served(found: Sequence[ServedPrediction], anchors: int = 0) -> Table:
    """Replicas against tensor parallelism, fastest first."""
    rows = tuple(
        (
            Cell(f"{one.served.gpus} x {one.served.gpu.name}"),
            Cell(f"{one.served.replicas} x tp={one.served.tp}"),
            Cell(str(one.batch)),
            between(1000 * one.ttft_s, *_scaled(one.interval(one.ttft_s))),
            between(1000 * one.tpot_s, *_scaled(one.interval(one.tpot_s))),
            between(one.tokens_per_s, *one.interval(one.tokens_per_s)),
        )
        for one in found
    )
    columns = (
        Column("GPUs"),
        Column("replicas"),
        numeric("batch of a replica"),
        numeric("TTFT alone, ms"),
        numeric("TPOT, ms"),
        numeric("output tokens/s"),
    )
    one = found[0].served
    heading = (
        f"Serving {one.shape.name} in {one.precision}: prompts of {one.input_tokens}, answers of {one.output_tokens}"
    )
    note = "By memory and compute limits, fitted to published TensorRT-LLM rows; queueing is not included. " + (
        f"{anchors} anchors set the level of the engine."
        if anchors
        else "Intervals are wide: measure with `paceline run inference` and give it as --anchor."
    )
    return Table(heading, columns, rows, (note,))


def _scaled(ends: tuple[float, float]) -> tuple[float, float]:
    return 1000 * ends[0], 1000 * ends[1]


def narrowing(found: Sequence[Worth]) -> Table:
    rows = tuple((Cell(one.name), Cell(f"{100 * one.without:.1f}"), Cell(f"{100 * one.with_it:.1f}")) for one in found)
    columns = (Column("anchor", prose=True), numeric("half-width without it, %"), numeric("with it, %"))
    wider = "An anchor that lies far from its prediction makes intervals wider: the cluster is less known than assumed."
    notes = (wider,) if any(one.with_it > one.without for one in found) else ()
    return Table("What each anchor is worth", columns, rows, notes)


def served_narrowing(found: Sequence[ServedWorth]) -> Table:
    """What each measurement of the engine is worth for the fastest option; the most useful of many."""
    ordered = sorted(found, key=lambda one: one.with_it - one.without)
    rows = tuple(
        (Cell(one.name), Cell(f"{100 * one.without:.1f}"), Cell(f"{100 * one.with_it:.1f}"))
        for one in ordered[:MOST_ANCHORS]
    )
    columns = (Column("anchor", prose=True), numeric("half-width without it, %"), numeric("with it, %"))
    more = f" ({MOST_ANCHORS} of {len(found)})" if len(found) > MOST_ANCHORS else ""
    return Table(f"What each anchor is worth for the fastest option{more}", columns, rows)


def suggestions(found: Sequence[Worth]) -> Table:
    rows = tuple(
        (
            Cell(one.name),
            Cell(f"{100 * one.without:.1f}"),
            Cell(f"{100 * one.with_it:.1f}"),
            Cell(MISSING if one.gpu_minutes is None else number(one.gpu_minutes)),
        )
        for one in found
    )
    columns = (Column("measure", prose=True), numeric("half-width now, %"), numeric("after, %"), numeric("GPU minutes"))
    return Table("What to measure next, best per GPU minute first", columns, rows)
