"""Every number of a report: one row per metric, with unit, direction and formula, computed from raw samples only.

The time of a step is the maximum over ranks. A rate is a ratio of sums over the window after warm-up, never a mean of
rates. Tokens are non-pad tokens. Missing is None, never 0 (method.md, sections 2 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paceline.analysis.findings import CONSISTENT, HIGHER, LOWER, SHARED_GPU, Measurement
from paceline.analysis.findings.cell_axes import EQUAL_WORK
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import ceilings
from paceline.analysis.machine.ceilings import device_names
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled
from paceline.analysis.training.window import LAUNCH_COLUMNS, PHASES, STEP_COLUMNS, Window
from paceline.errors import RequestError, Scalar
from paceline.experiment.layout import declared_layout
from paceline.experiment.script import UNKNOWN_MODEL
from paceline.experiment.spec import RunSpec
from paceline.models import adapters, arithmetic, parallel
from paceline.models.adapters import DTYPE_BYTES as DTYPE_BYTES
from paceline.results.records import RunRecord
from paceline.training.data.corpus import is_packed

# --- one cell ---


class Estimate(NamedTuple):
    """A metric of a cell, or None, and a note for the reader."""

    resampled: Resampled | None
    note: str | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """All certified repeats of one configuration, resampled once for all metrics.

    fields are those of the spec, by dotted name, without what may differ between repeats. achievable is the measured
    matmul peak of each dtype on this kind of device, empty if no run measured it.
    """

    id: str
    spec: RunSpec
    fields: Mapping[str, Any]
    axes: Mapping[str, Scalar]
    windows: tuple[Window, ...]
    achievable: Mapping[str, Measurement] = field(default_factory=dict)

    @cached_property
    def step_sums(self) -> Array:
        return intervals.resample_sums([w.steps for w in self.windows], intervals.seed_of(self.id, "steps"))

    @cached_property
    def step_totals(self) -> Array:
        return intervals.column_totals([w.steps for w in self.windows])

    @cached_property
    def launch_totals(self) -> Array:
        return intervals.column_totals([w.launch for w in self.windows])

    @cached_property
    def launch_sums(self) -> Array:
        return intervals.resample_sums([w.launch for w in self.windows], intervals.seed_of(self.id, "launches"))

    @cached_property
    def runs(self) -> tuple[str, ...]:
        return tuple(w.run for w in self.windows)

    @cached_property
    def shared_gpu(self) -> bool:
        """Whether processes share a GPU, which says nothing about speed."""
        return any(w.record.shares_gpu for w in self.windows)

    @cached_property
    def switches(self) -> dict[str, str]:
        """Debug switches of all runs: a certificate accepts them only if the whole group has them."""
        return {k: v for w in self.windows if (e := w.record.evidence) for k, v in e.switches.items()}

    @property
    def level(self) -> str | None:
        """How equal the work of a foreign script is to that of its baseline; None for other workloads."""
        levels = [w.certificate.level for w in self.windows if w.certificate and w.certificate.level]
        return CONSISTENT if CONSISTENT in levels else next(iter(levels), None)

    @property
    def observed_work(self) -> list[str]:
        """What foreign scripts were observed to do; empty for other workloads, which prescribe it."""
        return sorted({w.certificate.work for w in self.windows if w.certificate})

    @property
    def throttled_ratio(self) -> float | None:
        """Share of the measured steps in which a GPU was throttled; None unless every launch was observed."""
        found = [w.throttling for w in self.windows if w.throttling]
        if not found or len(found) != len(self.windows):
            return None
        return sum(t.steps for t in found) / sum(t.measured for t in found)

    def per(self, numerator: str, denominator: str = "steps") -> Resampled | None:
        """Ratio of two sums over all steps of the windows."""
        key = "steps", numerator, denominator
        if key not in self._ratios:
            columns = STEP_COLUMNS.index(numerator), STEP_COLUMNS.index(denominator)
            self._ratios[key] = intervals.ratio_of_sums(
                [w.steps for w in self.windows], self.step_sums, *columns, self.step_totals
            )
        return self._ratios[key]

    def mean(self, column: str, denominator: str = "launches") -> Resampled | None:
        """Mean over launches of a value that each launch has once, or the ratio of two such sums."""
        key = "launches", column, denominator
        if key not in self._ratios:
            columns = LAUNCH_COLUMNS.index(column), LAUNCH_COLUMNS.index(denominator)
            self._ratios[key] = intervals.ratio_of_sums(
                [w.launch for w in self.windows], self.launch_sums, *columns, self.launch_totals
            )
        return self._ratios[key]

    @cached_property
    def _ratios(self) -> dict[tuple[str, str, str], Resampled | None]:
        """What `per` and `mean` found: several metrics ask for the same."""
        return {}

    def estimate(self, metric: Metric) -> Estimate:
        """The metric of the cell, computed once: every comparison of the cell asks for it."""
        if metric.name not in self._estimates:
            self._estimates[metric.name] = metric.formula(self)
        return self._estimates[metric.name]

    @cached_property
    def _estimates(self) -> dict[str, Estimate]:
        return {}

    @cached_property
    def measurements(self) -> list[Measurement]:
        """One measurement per row of METRICS; the value of missing ones is None."""
        interrupted = INTERRUPTED_METRICS if any(w.goodput for w in self.windows) else ()
        return [_measurement(self, metric) for metric in (*METRICS, *interrupted)]

    def __getstate__(self) -> dict[str, Any]:
        """Without the resampled sums, which are large and can be drawn again."""
        return {name: value for name, value in self.__dict__.items() if name not in ("step_sums", "launch_sums")}

    def seconds(self) -> Array:
        """Step times of all windows, in launch order."""
        return np.concatenate([w.seconds for w in self.windows])


def gather(
    windows: Iterable[Window], peaks: ceilings.Peaks | None = None, known: Mapping[str, Cell] = MappingProxyType({})
) -> list[Cell]:
    """Cells of all windows that have a step, in the order of their first run; the caller passes certified runs only.

    peaks are the measured matmul peaks by kind of device, if a run of the workload compute measured them. known: cells
    that were gathered already, by id; one that has all its windows is not resampled again.
    """
    by_cell = grouped((window for window in windows if len(window.steps)), lambda window: window.record.spec.cell)
    cells = []
    for id_, of_cell in by_cell.items():
        ordered = tuple(sorted(of_cell, key=lambda w: (w.record.spec.repeat, w.run)))
        devices = {ceilings.device_of(w.record) for w in ordered}
        achievable = (peaks or {}).get(devices.pop(), {}) if len(devices) == 1 else {}
        cell = known.get(id_)
        if cell is None or cell.windows != ordered or achievable:
            spec = ordered[0].record.spec
            cell = Cell(id_, spec, flat(spec), _axes(ordered), ordered, achievable)
        cells.append(cell)
    return cells


def _axes(windows: Sequence[Window]) -> dict[str, Scalar]:
    """The axes of the first run, and on what the work of these runs was proved if it has no reference."""
    spec = windows[0].record.spec
    levels = () if spec.script else dict.fromkeys(w.certificate.level for w in windows if w.certificate)
    proved = "; ".join(filter(None, levels))
    return {**spec.axes(), **({EQUAL_WORK: proved} if proved else {})}


def flat(spec: RunSpec) -> dict[str, Any]:
    """The fields that define the cell, by dotted name; a choice is one field, without options that do not affect it."""
    fields: dict[str, Any] = {}
    for name, value in spec.configuration().items():
        inner = value if name in ("topology", "training", "tuning", "warmup", "serving", "script") else None
        fields |= {f"{name}.{key}": part for key, part in inner.items()} if inner else {name: value}
    fields |= {f"script.parameters.{key}": part for key, part in fields.pop("script.parameters", {}).items()}
    precision = fields.pop("training.precision", {})
    return fields | {f"training.precision.{key}": value for key, value in precision.items()}


# --- formulas ---


def _step_time(cell: Cell) -> Estimate:
    """The value covers all steps; the note says what it would be without outliers."""
    seconds = cell.seconds()
    tagged = np.concatenate([intervals.outliers(w.seconds) for w in cell.windows])
    notes = [intervals.launches_note(len(cell.windows))]
    if tagged.any():
        without = float(seconds[~tagged].mean())
        notes.append(f"{int(tagged.sum())} of {len(seconds)} steps are outliers; without them {without:.4g} s per step")
    return Estimate(cell.per("seconds"), "; ".join(filter(None, notes)) or None)


def _rate(numerator: str, *, per_process: bool = False) -> Callable[[Cell], Estimate]:
    def formula(cell: Cell) -> Estimate:
        found = cell.per(numerator, "wall")
        if found and per_process:
            found = found.times(1 / cell.spec.topology.world_size)
        return Estimate(found, SHARED_GPU if cell.shared_gpu else None)

    return formula


def _percentile(q: float) -> Callable[[Cell], Estimate]:
    def formula(cell: Cell) -> Estimate:
        value = intervals.percentile(cell.seconds(), q)
        return Estimate(None if value is None else Resampled(value, None, math.inf, len(cell.windows), True))

    return formula


def _phase(column: str) -> Callable[[Cell], Estimate]:
    return lambda cell: Estimate(cell.per(column))


def _per_launch(column: str, missing: str | None = None) -> Callable[[Cell], Estimate]:
    def formula(cell: Cell) -> Estimate:
        found = cell.mean(column)
        return Estimate(found, None if found else missing)

    return formula


def _peak_memory(cell: Cell) -> Estimate:
    if cell.spec.topology.device == "cuda":
        return Estimate(cell.mean("allocated"), "peak memory is that of the CUDA allocator, on the busiest rank")
    return Estimate(cell.mean("resident"), "peak memory is the resident set of the process, on the busiest rank")


def _energy(denominator: str) -> Callable[[Cell], Estimate]:
    """Joules of all launches over what they were spent on; the note says how they were measured, or why not."""

    def formula(cell: Cell) -> Estimate:
        notes = dict.fromkeys(w.energy.note for w in cell.windows if w.energy)
        found = cell.mean("joules", denominator)
        reasons = dict.fromkeys(w.energy.reason for w in cell.windows if w.energy and w.energy.reason)
        return Estimate(found, next((note for note in (notes if found else reasons) if note), None))

    return formula


def _counted_wire(cell: Cell) -> Estimate:
    """Counted bytes on the wire; None if an operator is in no table: the rest is not the total."""
    counted = {w.operation for window in cell.windows for w in window.record.wire}
    unknown = sorted(operation for operation in counted if operation not in arithmetic.COLLECTIVES)
    reason = f"bytes on the wire are unknown: {', '.join(unknown)} cannot be counted" if unknown else _NO_WIRE
    return _per_launch("wire", reason)(cell)


def _predicted_wire(cell: Cell) -> Estimate:
    """method.md section 4; r by the reduction dtype, p by the dtype in which weights are gathered (compute)."""
    spec, evidence = cell.spec, cell.windows[0].record.evidence
    precision, ranks, accumulation = spec.training.precision, spec.topology.world_size, spec.training.accumulation
    if spec.strategy is None or evidence is None:
        return Estimate(None)
    try:
        shape, layout = cell.windows[0].record.shape, declared_layout(spec)
        if layout is not None:
            value = parallel.predicted_total(shape, layout, spec.training)
        elif spec.tuning:
            dtypes = precision.reduce, precision.base
            value = adapters.wire_bytes(shape, spec.tuning, spec.strategy, ranks, accumulation, *dtypes)
        else:
            sizes = DTYPE_BYTES[precision.reduce], DTYPE_BYTES[precision.base]
            parts = arithmetic.root_parameters(shape), arithmetic.tensor_sizes(shape)
            matrices = arithmetic.block_matrices(shape)
            value = arithmetic.wire_bytes(
                spec.strategy, evidence.parameters, ranks, accumulation, *sizes, *parts, matrices
            )
    except RequestError as error:
        return Estimate(None, str(error))
    return Estimate(None if value is None else Resampled(float(value), None, math.inf, len(cell.windows), value > 0))


def compute_dtype(cell: Cell) -> str:
    """The dtype of the matrix products: requested, or for a foreign script as observed."""
    evidence = cell.windows[0].record.evidence
    if cell.spec.script and evidence:
        return str(evidence.dtypes.get("compute"))
    precision = cell.spec.training.precision
    # As tables of GPUs and the workload compute name it.
    return "fp8" if precision.is_8bit else precision.compute


def dense_peak(cell: Cell) -> tuple[float | None, str]:
    """FLOP/s of one GPU in the compute dtype, and its source; None with the reason, never that of another GPU."""
    dtype = compute_dtype(cell)
    if cell.spec.topology.device == "cpu":
        return None, "MFU needs a dense peak, which is unknown for a CPU"
    if cell.shared_gpu:
        return None, SHARED_GPU
    gpus = [gpu for w in cell.windows for machine in w.record.machines for gpu in machine.get("gpus") or ()]
    peaks = {(str(gpu.get("name")), (gpu.get("peak_flops") or {}).get(dtype)) for gpu in gpus}
    names = ", ".join(sorted({name for name, _ in peaks})) or "an unrecorded GPU"
    values = {value for _, value in peaks}
    peak = next(iter(values), None)
    if peak is None or len(values) > 1:
        why = "is unknown for" if None in values or not values else "differs between"
        return None, f"MFU needs one dense {dtype} peak, which {why} {names}"
    return peak, f"of {peak / 1e12:.0f} TFLOP/s dense {dtype} ({names})"


def measured_peak(cell: Cell) -> tuple[float | None, str]:
    """The best matrix product in the compute dtype measured on this kind of device, as `dense_peak`; no fallback."""
    dtype = compute_dtype(cell)
    if cell.shared_gpu:
        return None, SHARED_GPU
    found = cell.achievable.get(dtype)
    if found is None or found.value is None:
        return None, f"share of achievable: no run of the workload compute measured {dtype} products on this device"
    size, unit = (1e12, "TFLOP/s") if found.value >= 1e12 else (1e9, "GFLOP/s")
    return found.value, f"of {found.value / size:.3g} {unit} measured here in {dtype} ({found.axes['label']})"


def flops_per_token(cell: Cell, convention: str = "causal", *, recomputed: bool = False) -> float:
    """FLOPs per non-pad token, with recomputation by checkpointing on request.

    For packed documents the causal convention counts the keys that tokens attended to, mean over the window.
    """
    if cell.spec.script and cell.spec.model.name == UNKNOWN_MODEL:
        raise RequestError("MFU needs the shape of the model, which a script does not state: set `model`")
    shape, training, tuning = cell.windows[0].record.shape, cell.spec.training, cell.spec.tuning
    length = training.sequence_length
    if cell.spec.script:
        seen = cell.per("positions", "samples")
        length = round(seen.value) if seen else length
    if tuning is None:
        again = arithmetic.recomputed_flops_per_token(shape, length, training.checkpointing, convention)
        return arithmetic.flops_per_token(shape, length, convention) + (again if recomputed else 0)
    attended = cell.per("attended_keys", "tokens") if convention == "causal" else None
    keys = attended.value if attended else (length + 1) / 2 if convention == "causal" else length
    again_tuned = adapters.recomputed_flops_per_token(shape, tuning, keys, training.checkpointing)
    return adapters.flops_per_token(shape, tuning, keys) + (again_tuned if recomputed else 0)


Peak = Callable[[Cell], tuple[float | None, str]]


def _utilisation(convention: str, *, recomputed: bool, of: Peak = dense_peak) -> Callable[[Cell], Estimate]:
    """F * tokens/s/GPU / peak of the compute dtype; HFU adds what checkpointing recomputes."""

    def formula(cell: Cell) -> Estimate:
        peak, note = of(cell)
        rate = cell.per("tokens", "wall")
        if peak is None or rate is None:
            return Estimate(None, note)
        try:
            flops = flops_per_token(cell, convention, recomputed=recomputed)
        except RequestError as error:
            return Estimate(None, str(error))
        tuning, counted = cell.spec.tuning, f"{convention} attention FLOPs"
        if tuning is not None:
            weights = "4 per frozen weight and 6 per adapter weight" if tuning.has_adapters else "6 per weight"
            counted = f"{weights} and non-pad token, {counted}"
        share = rate.times(flops / peak / cell.spec.topology.world_size)
        if cell.spec.script and share.value > 1:
            return Estimate(None, f"MFU would be {share.value:.0%} {note}: the script does not do what was observed")
        return Estimate(share, f"{counted}, {note}")

    return formula


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    better: str
    formula: Callable[[Cell], Estimate]


_NO_TRACE = "exposed communication: no step was profiled"
_NO_WIRE = "wire bytes: no collective was counted"

METRICS: tuple[Metric, ...] = (
    Metric("step_time_s", "s", LOWER, _step_time),
    Metric("step_time_p50_s", "s", LOWER, _percentile(50)),
    Metric("step_time_p99_s", "s", LOWER, _percentile(99)),
    Metric("tokens_per_s", "tokens/s", HIGHER, _rate("tokens")),
    Metric("tokens_per_s_per_gpu", "tokens/s", HIGHER, _rate("tokens", per_process=True)),
    Metric("samples_per_s", "samples/s", HIGHER, _rate("samples")),
    Metric("label_tokens_per_s", "tokens/s", HIGHER, _rate("label_tokens")),
    Metric(
        "padding_ratio",
        "ratio",
        LOWER,
        lambda cell: Estimate(cell.per("padding", "positions") if cell.spec.tuning else None),
    ),
    Metric(
        "packing_efficiency_ratio",
        "ratio",
        HIGHER,
        lambda cell: Estimate(cell.per("tokens", "positions") if is_packed(cell.spec.training.data) else None),
    ),
    Metric("mfu_ratio", "ratio", HIGHER, _utilisation("causal", recomputed=False)),
    Metric("mfu_full_attention_ratio", "ratio", HIGHER, _utilisation("full", recomputed=False)),
    Metric("hfu_ratio", "ratio", HIGHER, _utilisation("causal", recomputed=True)),
    Metric("hfu_full_attention_ratio", "ratio", HIGHER, _utilisation("full", recomputed=True)),
    Metric("achievable_ratio", "ratio", HIGHER, _utilisation("causal", recomputed=False, of=measured_peak)),
    Metric("peak_memory_bytes", "bytes", LOWER, _peak_memory),
    Metric("peak_memory_reserved_bytes", "bytes", LOWER, _per_launch("reserved")),
    Metric("peak_memory_device_bytes", "bytes", LOWER, _per_launch("device")),
    Metric("comm_exposed_ratio", "ratio", LOWER, _per_launch("exposed", _NO_TRACE)),
    Metric("wire_bytes_per_step", "bytes/step", LOWER, _counted_wire),
    Metric("wire_bytes_formula_per_step", "bytes/step", LOWER, _predicted_wire),
    # Token copies on the device timeline, summed over ranks: the rate of one process.
    Metric("h2d_bytes_per_s", "bytes/s", HIGHER, lambda cell: Estimate(cell.mean("h2d_bytes", "h2d_seconds"))),
    Metric("joules_per_token", "J/token", LOWER, _energy("energy_tokens")),
    Metric("power_w", "W", LOWER, _energy("energy_s")),
    *(Metric(phase, "s", LOWER, _phase(phase)) for phase in PHASES),
    Metric("loss_first", "nat", LOWER, _per_launch("first")),
    Metric("loss_last", "nat", LOWER, _per_launch("last")),
)
# Only for cells with a launch that was restarted or wrote checkpoints.
INTERRUPTED_METRICS: tuple[Metric, ...] = (
    Metric("goodput_ratio", "ratio", HIGHER, lambda cell: Estimate(cell.mean("counted_s", "span_s"))),
    Metric("redone_s", "s", LOWER, _per_launch("redone_s")),
    Metric("checkpoint_s", "s", LOWER, _per_launch("checkpoint_s")),
    Metric("down_s", "s", LOWER, _per_launch("down_s")),
)
BY_NAME = {metric.name: metric for metric in (*METRICS, *INTERRUPTED_METRICS)}


def estimate(cell: Cell, metric: str) -> Resampled | None:
    return cell.estimate(BY_NAME[metric]).resampled


def _measurement(cell: Cell, metric: Metric) -> Measurement:
    found, note = cell.estimate(metric)
    low, high = found.interval if found else (None, None)
    return Measurement(
        metric=metric.name,
        unit=unit_of(metric.name, cell.windows[0].record),
        better=metric.better,
        cell=cell.id,
        value=found.value if found else None,
        low=low,
        high=high,
        n=sum(len(w.steps) for w in cell.windows),
        launches=len(cell.windows),
        axes=cell.axes,
        runs=cell.runs,
        note=note or (intervals.launches_note(len(cell.windows)) if low is not None else None),
    )


def unit_of(metric: str, record: RunRecord) -> str:
    """The unit of a metric, in what this run counts."""
    return in_counted(BY_NAME[metric].unit, record)


def in_counted(unit: str, record: RunRecord) -> str:
    """A unit of tokens, for a script that has no token ids, or hides them in compiled code, and counts others."""
    evidence = record.evidence if record.spec.script else None
    data = str(evidence.settings.get("data")) if evidence else ""
    named = {"samples": ("sample", "samples"), "unseen": ("micro-batch", "micro-batches")}
    one, many = named.get(data, ("token", "tokens"))
    return unit.replace("tokens", many).replace("token", one)


def device_kind(cell: Cell) -> str:
    """Names of the GPUs, or of the processors, the cell ran on."""
    return device_names(cell.spec.topology.device, [m for w in cell.windows for m in w.record.machines])
