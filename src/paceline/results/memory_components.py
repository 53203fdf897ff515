"""The components of one rank's memory, by arithmetic without torch.

They follow from five numbers: the live bytes at four moments of one steady step, and its peak. The source may be the
allocator of a GPU, the counter of live tensors on a CPU, or a dry run on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.results.records import ComponentSample

# In display order.
COMPONENTS = ("parameters", "optimizer", "gradients", "communication", "activations", "other")
# begin: before the first forward of a step; forward: after it; backward: after the last one; update: after the step.
MOMENTS = ("begin", "forward", "backward", "update")
# Share that advice leaves free: predictions do not include fragmentation and scratch memory (docs/memory.md).
SPARE_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBytes:
    """Bytes of the tensors that a trainer owns on this rank, by distinct storage; of shards only the local part.

    optimizer: moments and master weights. gradients: `.grad` or the strategy's buffers after the last backward.
    standing_gradients: the part of these that is kept between steps (DDP's buckets).
    """

    parameters: int
    optimizer: int
    gradients: int = 0
    standing_gradients: int = 0


def components(moments: Mapping[str, int | None], peak: int | None, owned: OwnedBytes | None) -> dict[str, int | None]:
    """The maximum of each component, and the peak; None if the data is not sufficient.

    activations: stored by the forward of one micro batch for its backward. gradients: after the backwards of a step, or
    the permanent buffers if these are larger. communication: what else is kept between steps. other: the rest of the
    peak (temporaries of operators, gathered weights, workspaces). Gradients grow while activations are freed, so the
    maxima are not simultaneous, and other is 0 if their sum exceeds the peak.
    """
    begin, forward, backward = (moments.get(name) for name in ("begin", "forward", "backward"))
    result: dict[str, int | None] = dict.fromkeys((*COMPONENTS, "peak"))
    result["peak"] = peak
    if begin is None or forward is None or backward is None or owned is None or peak is None:
        return result
    result |= {
        "parameters": owned.parameters,
        "optimizer": owned.optimizer,
        "gradients": max(owned.gradients, backward - begin, 0),
        "communication": max(begin - owned.parameters - owned.optimizer - owned.standing_gradients, 0),
        "activations": max(forward - begin, 0),
    }
    result["other"] = max(peak - sum(value for name in COMPONENTS if (value := result[name]) is not None), 0)
    return result


def room_bytes(samples: Iterable[ComponentSample]) -> int | None:
    """The least memory that was available to any process; None if not recorded."""
    return min((s.bytes for s in samples if s.component in ("capacity", "room")), default=None)


def goal_bytes(room: int, own_peak: int | None) -> int:
    """The highest predicted peak that counts as fitting: SPARE_RATIO below the available memory.

    If the run was predicted to fit but did not, SPARE_RATIO below its own prediction.
    """
    return int((1 - SPARE_RATIO) * (room if own_peak is None else min(room, own_peak)))


def predicted_peaks(samples: Iterable[ComponentSample]) -> dict[int, int]:
    """Predicted peak by micro batch."""
    return {s.micro_batch: s.bytes for s in samples if s.source == "predicted" and s.component == "peak"}


def largest_fitting(peaks: Mapping[int, int], capacity_bytes: int, most: int) -> int | None:
    """The largest micro batch up to `most` whose peak fits, by interpolation between known peaks; 0 if none fits.

    The live bytes at each moment grow linearly with the micro batch, so the line through two neighbouring points is
    exact if the same moment is the peak at both. None with fewer than two points.
    """
    if len(peaks) < 2:
        return None
    known = sorted(peaks)
    # The two points around the capacity; beyond the last point its line is extrapolated.
    above = next((i for i, size in enumerate(known) if peaks[size] > capacity_bytes), len(known) - 1)
    right = max(above, 1)
    x0, x1 = known[right - 1], known[right]
    slope = (peaks[x1] - peaks[x0]) / (x1 - x0)
    if slope <= 0:
        return most if peaks[x1] <= capacity_bytes else 0
    return max(0, min(most, int(x0 + (capacity_bytes - peaks[x0]) / slope)))
