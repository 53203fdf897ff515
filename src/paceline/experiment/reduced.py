"""The spec of a run of a proof group: the configuration of a run of the whole, with smaller sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.experiment.choices import Choice
from paceline.experiment.layout import layout_of
from paceline.experiment.proof import Reduction
from paceline.experiment.spec import RunSpec, WarmUp


def reduced(spec: RunSpec, to: Reduction) -> RunSpec:
    """The same configuration with these sizes, over the first steps, as one launch without restarts and design.

    A split of layers over stages keeps its proportions.
    """
    training, strategy, layout = spec.training, spec.strategy, layout_of(spec)
    share = training.micro_batch * layout.dp
    if strategy is not None and layout.split and to.layers != to.of_layers:
        split = "+".join(map(str, scaled_split(layout.split, to.layers)))
        strategy = Choice(strategy.name, {**strategy.options, "layers": split})
    model = spec.model
    if to.layers != to.of_layers:
        model = Choice(model.name, {**model.options, "layers": to.layers})
    return replace(
        spec,
        model=model,
        strategy=strategy,
        training=replace(training, sequence_length=to.sequence_length, accumulation=max(1, to.global_batch // share)),
        steps=min(spec.steps, spec.reference_steps),
        warmup=WarmUp(),
        repeat=0,
        max_restarts=0,
        checkpoint_every=None,
        checkpoint_async=False,
        design=None,
        lineage=None,
        reduction=to,
    )


def scaled_split(split: Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers of each stage of a smaller model, each at least 1, as near to the proportions as possible.

    >>> scaled_split((39, 41), 4), scaled_split((5, 3), 4), scaled_split((7, 1), 4)
    ((2, 2), (3, 1), (3, 1))
    """
    whole, found = sum(split), [1] * len(split)
    for _ in range(layers - len(split)):
        missing = [layers * share / whole - own for share, own in zip(split, found, strict=True)]
        found[missing.index(max(missing))] += 1
    return tuple(found)


def configuration(spec: RunSpec) -> str:
    """Same for all runs of one cell, whatever the number of steps."""
    return replace(spec, steps=1).cell
