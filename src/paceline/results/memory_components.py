"""The components of one rank's memory, as arithmetic: no measuring, no torch.

The same five numbers give the components whoever observed them: the allocator of a GPU, the ledger on a CPU, or a
rehearsal on fake tensors. They are the live bytes at four moments of one steady step, and its peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.results.records import ComponentSample

# In the order in which they are stacked and listed.
COMPONENTS = ("parameters", "optimizer", "gradients", "communication", "activations", "other")
# begin: before the first forward of the step; forward: after it; backward: after the last one; update: step taken.
MOMENTS = ("begin", "forward", "backward", "update")
# Left free by advice: predictions leave out fragmentation, and scratch memory of kernels (docs/memory.md).
SPARE_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Tensors a trainer owns on this rank: sizes of distinct storages. Shards count as what is local.

    optimizer holds moments and master weights; gradients what stands in `.grad` or in the strategy's buffers after the
    last backward; standing_gradients is the part of it that is kept between steps (DDP's buckets).
    """

    parameters: int
    optimizer: int
    gradients: int = 0
    standing_gradients: int = 0


def components(moments: Mapping[str, int | None], peak: int | None, held: Held | None) -> dict[str, int | None]:
    """Each component at its largest, and the peak; None if the data is not sufficient.

    activations: what the forward of one micro batch leaves for its backward. gradients: what the backwards of a step
    leave, or the standing buffers if these are larger. communication: what else is kept between steps. other: what the
    peak holds beyond all of these: temporaries of operators, gathered weights, workspaces. Gradients grow while
    activations go, so not all are there at one moment, and other is 0 where the sum exceeds the peak.
    """
    begin, forward, backward = (moments.get(name) for name in ("begin", "forward", "backward"))
    found: dict[str, int | None] = dict.fromkeys((*COMPONENTS, "peak"))
    found["peak"] = peak
    if begin is None or forward is None or backward is None or held is None or peak is None:
        return found
    found |= {
        "parameters": held.parameters,
        "optimizer": held.optimizer,
        "gradients": max(held.gradients, backward - begin, 0),
        "communication": max(begin - held.parameters - held.optimizer - held.standing_gradients, 0),
        "activations": max(forward - begin, 0),
    }
    found["other"] = max(peak - sum(value for name in COMPONENTS if (value := found[name]) is not None), 0)
    return found


def room_bytes(samples: Iterable[ComponentSample]) -> int | None:
    """The least memory that was available to any process; None if not recorded."""
    return min((s.bytes for s in samples if s.component in ("capacity", "room")), default=None)


def goal_bytes(room: int, own_peak: int | None) -> int:
    """What a changed run may hold at its peak to be called fitting: SPARE_RATIO less than there is.

    A run that was predicted to fit and did not has shown that less must do: then less than its own prediction.
    """
    return int((1 - SPARE_RATIO) * (room if own_peak is None else min(room, own_peak)))


def predicted_peaks(samples: Iterable[ComponentSample]) -> dict[int, int]:
    """Predicted peak by micro batch."""
    return {s.micro_batch: s.bytes for s in samples if s.source == "predicted" and s.component == "peak"}


def largest_fitting(peaks: Mapping[int, int], capacity_bytes: int, most: int) -> int | None:
    """The largest micro batch up to `most` whose peak fits, by straight lines through known peaks; 0 when none does.

    The peak is the highest of moments that each grow linearly with the micro batch, so a line through two neighbouring
    points is exact where one moment dominates. None with fewer than two points.
    """
    if len(peaks) < 2:
        return None
    known = sorted(peaks)
    # The two points that enclose the capacity; beyond the last, its line goes on.
    above = next((i for i, size in enumerate(known) if peaks[size] > capacity_bytes), len(known) - 1)
    right = max(above, 1)
    x0, x1 = known[right - 1], known[right]
    slope = (peaks[x1] - peaks[x0]) / (x1 - x0)
    if slope <= 0:
        return most if peaks[x1] <= capacity_bytes else 0
    return max(0, min(most, int(x0 + (capacity_bytes - peaks[x0]) / slope)))
