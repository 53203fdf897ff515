"""Beyond what can be rented: equal work per GPU on more GPUs, from measured small scales, and what limits it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.prediction.offsets import Anchor, Observation
from paceline.prediction.predict import Prediction, predict
from paceline.prediction.setup import Setup

# Parts of a step that are spent on the network.
NETWORK = ("data parallel (exposed)", "tensor parallel", "expert parallel")
# The network limits a scale if at least this share of the step waits for it.
LIMITING_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One number of GPUs. efficiency: tokens/s per GPU relative to the smallest."""

    prediction: Prediction
    efficiency: float
    network_share: float

    @property
    def is_limited(self) -> bool:
        return self.network_share >= LIMITING_SHARE


def extrapolate(
    base: Setup, up_to: int, anchors: Sequence[Anchor] = (), observations: Sequence[Observation] = ()
) -> list[Scaled]:
    """Predictions at every doubling from the base to up_to GPUs, with equal work per GPU (weak scaling)."""
    counts = [base.gpus]
    while counts[-1] * 2 <= up_to:
        counts.append(counts[-1] * 2)
    found = predict([base.replaced(gpus=n) for n in counts], anchors, observations)
    first = found[0].tokens_per_s_per_gpu
    return [
        Scaled(
            prediction=one,
            efficiency=one.tokens_per_s_per_gpu / first,
            network_share=sum(one.parts[name] for name in NETWORK) / one.step_s,
        )
        for one in found
    ]


def limit_text(found: Sequence[Scaled]) -> str:
    """From which number of GPUs on the network limits, in a sentence."""
    limited = next((one for one in found if one.is_limited), None)
    gpus, share = found[-1].prediction.setup.gpus, f"{100 * found[-1].network_share:.0f} %"
    if limited is None:
        return f"The network does not limit up to {gpus} GPUs: {share} of the step waits for it there."
    first, there = limited.prediction.setup.gpus, f"{100 * limited.network_share:.0f} %"
    return f"The network limits from {first} GPUs on: {there} of the step waits for it there, {share} at {gpus}."
