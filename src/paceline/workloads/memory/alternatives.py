"""Other settings for a training run that was out of memory: what to try, the least intrusive first.

Arithmetic on specs alone. What keeps the work (same global batch, data and arithmetic) stands before what changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Tuning

# What shards more than each strategy does, the least communication first.
SHARDING = ("zero:stage=1", "zero:stage=2", "zero:stage=3", "fsdp2")
# Strategies of SHARDING that a run under another one has reached already.
_REACHED = {"zero:stage=1": 1, "zero:stage=2": 2, "zero:stage=3": 4, "fsdp2": 4}
# The cheapest in time first.
FEWER_ACTIVATIONS: tuple[str, ...] = ("none", "selective", "full")
SHORTEST_SEQUENCE = 128
# Less memory first to last: 8 bit holds the moments in 2 bytes instead of 8, paging lets them leave the device.
_SMALLER_OPTIMIZERS = {"adamw": ("adamw_8bit",), "adamw_8bit": ("paged_adamw_8bit",)}
_SMALLER_METHODS = {"full": ("lora", "qlora"), "lora": ("qlora",)}


@dataclass(frozen=True)
class Alternative:
    """One changed spec. falling: batches (sequences, their length) to try in this order until one fits; the first is
    the spec's own. keeps_work as in `records.AlternativeSample`."""

    spec: RunSpec
    falling: tuple[tuple[int, int], ...]
    change: str = ""
    settings: str = ""
    keeps_work: bool = True

    def words(self, batch: tuple[int, int], asked: RunSpec) -> tuple[str, str]:
        """The change and the settings of one of its batches, beside what was asked for."""
        (micro_batch, length), training = batch, asked.training
        change, settings = [self.change], [self.settings]
        if micro_batch != training.micro_batch:
            accumulation = training.micro_batch * training.accumulation // micro_batch
            change.append(f"micro batch {micro_batch} with accumulation {accumulation}")
            settings.append(f"micro_batch={micro_batch} accumulation={accumulation}")
        if length != training.sequence_length:
            change.append(f"sequence length {length}")
            settings.append(f"sequence_length={length}")
        return " and ".join(filter(None, change)), " ".join(filter(None, settings))


def single_changes(spec: RunSpec) -> Iterator[Alternative]:
    """One setting changed at a time. The first is the run as it was, whose shorter sequences change the work."""
    yield Alternative(spec, (_batch(spec),))
    if smaller := smaller_batches(spec):
        yield smaller
    for mode in _more_checkpointing(spec):
        yield _changed(spec, f"checkpointing {mode}", f"checkpointing={mode}", checkpointing=mode)
    for strategy in _more_sharding(spec):
        yield Alternative(
            replace(spec, strategy=Choice.parse(strategy)), (_batch(spec),), strategy, f"strategy={strategy}"
        )
    yield from _tuned(spec)
    if shorter := shorter_sequences(spec):
        yield shorter


def combined_changes(spec: RunSpec) -> Iterator[Alternative]:
    """For a run that no single change makes fit: everything that keeps the work at once, without and with sharding."""
    modes = _more_checkpointing(spec)[-1:]
    for strategy in ((), _more_sharding(spec)[-1:]):
        words = [*(f"checkpointing {mode}" for mode in modes), *strategy]
        settings = [*(f"checkpointing={mode}" for mode in modes), *(f"strategy={name}" for name in strategy)]
        chosen = replace(spec, strategy=Choice.parse(strategy[0])) if strategy else spec
        chosen = replace(chosen, training=replace(chosen.training, checkpointing=modes[0])) if modes else chosen
        smaller = smaller_batches(chosen)
        if len(words) + (smaller is not None) > 1 and (strategy or words):
            found = smaller or Alternative(chosen, (_batch(chosen),))
            yield replace(found, change=" and ".join(words), settings=" ".join(settings))
        if not _more_sharding(spec):
            return


def smaller_batches(spec: RunSpec) -> Alternative | None:
    """Every smaller micro batch that some accumulation brings back to the same global batch, the largest first."""
    t = spec.training
    share = t.micro_batch * t.accumulation
    sizes = [size for size in range(t.micro_batch - 1, 0, -1) if share % size == 0]
    if not sizes:
        return None
    # More than one micro batch is another thing to hold (gradients wait), how many more is not.
    training = replace(t, micro_batch=sizes[0], accumulation=share // sizes[0])
    return Alternative(replace(spec, training=training), tuple((size, t.sequence_length) for size in sizes))


def shorter_sequences(spec: RunSpec) -> Alternative | None:
    """Halves of the sequence: fewer tokens per step, so other work."""
    t, lengths = spec.training, []
    length = t.sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        lengths.append(length)
        length //= 2
    if not lengths:
        return None
    shorter = replace(spec, training=replace(t, sequence_length=lengths[0]))
    return Alternative(shorter, tuple((t.micro_batch, length) for length in lengths), keeps_work=False)


def _batch(spec: RunSpec) -> tuple[int, int]:
    return spec.training.micro_batch, spec.training.sequence_length


def _changed(spec: RunSpec, change: str, settings: str, **fields: str) -> Alternative:
    changed = replace(spec, training=replace(spec.training, **fields))  # type: ignore[arg-type]
    return Alternative(changed, (_batch(changed),), change, settings)


def _more_checkpointing(spec: RunSpec) -> tuple[str, ...]:
    """Modes that keep fewer activations than the run's."""
    return FEWER_ACTIVATIONS[FEWER_ACTIVATIONS.index(spec.training.checkpointing) + 1 :]


def _more_sharding(spec: RunSpec) -> tuple[str, ...]:
    """One process has nobody to share with."""
    if spec.topology.world_size == 1 or spec.strategy is None:
        return ()
    stage = spec.strategy.options.get("stage", 1)
    name = f"zero:stage={stage}" if spec.strategy.name == "zero" else spec.strategy.name
    return SHARDING[_REACHED.get(name, 0) :]


def _tuned(spec: RunSpec) -> Iterator[Alternative]:
    """A smaller optimizer state is another optimizer, and frozen or 4-bit weights are another model: other work."""
    if spec.tuning is None:
        return
    for word in _SMALLER_OPTIMIZERS.get(spec.tuning.optimizer, ()):
        yield _retuned(spec, replace(spec.tuning, optimizer=word), f"optimizer {word}", f"optimizer={word}")
    for word in _SMALLER_METHODS.get(spec.tuning.method, ()):
        yield _adapted(spec, replace(spec.tuning, method=word))


def _adapted(spec: RunSpec, tuning: Tuning) -> Alternative:
    """Adapters are fp32 and so is their reduction, whatever that of the weights was."""
    training, method = spec.training, tuning.method
    precision = replace(training.precision, reduce="fp32")
    settings = f"method={method}" + (" reduce_dtype=fp32" if precision != training.precision else "")
    return _retuned(
        replace(spec, training=replace(training, precision=precision)), tuning, f"method {method}", settings
    )


def _retuned(spec: RunSpec, tuning: Tuning, change: str, settings: str) -> Alternative:
    return Alternative(replace(spec, tuning=tuning), (_batch(spec),), change, settings, keeps_work=False)
