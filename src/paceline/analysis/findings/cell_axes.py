"""Which axes tell cells apart, and how a cell is named by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import Scalar

_ALWAYS_NAMED = ("model", "world_size")


# The kind of device is no axis of a spec: a run tells it beside its axes.
DEVICE = "device_name"


# Named only where nothing else tells two cells apart, the least telling first.
_SELDOM_NAMED = ("steps", "seed", "launcher", "workload")


def describe(axes: Mapping[str, Scalar], named: Sequence[str] = _ALWAYS_NAMED) -> str:
    """`ddp, gpt-tiny, 2 processes`: the strategy, then the named axes."""
    first = str(axes.get("strategy") or axes.get("workload") or "")
    return ", ".join(filter(None, (first, *(axis_text(name, axes) for name in named if axes.get(name) is not None))))


def axis_text(name: str, axes: Mapping[str, Scalar]) -> str:
    """One axis in words: `2 GPUs`, `gpt-tiny`, `sequence length 2048`, `compile on`."""
    value = axes.get(name)
    if name == "world_size":
        noun = "GPU" if axes.get("device") == "cuda" else "process"
        plural = "" if value == 1 else "s" if noun == "GPU" else "es"
        return f"{value} {noun}{plural}"
    if name in {"model", "workload", "strategy", DEVICE}:
        return str(value)
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')} {'on' if value else 'off'}"
    return f"{name.replace('_', ' ')} {value}"


def telling_axes(cells: Sequence[Mapping[str, Scalar]]) -> tuple[str, ...]:
    """Model and world size, then every other axis in which the cells differ; not those that follow from the rest."""
    seen: dict[str, set[str]] = {}
    for axes in cells:
        for name, value in axes.items():
            seen.setdefault(name, set()).add(repr(value))
    differing = [name for name, values in seen.items() if len(values) > 1]
    named = [*_ALWAYS_NAMED, *(n for n in differing if n not in {*_ALWAYS_NAMED, "strategy", "global_batch"})]
    told_apart = len({describe(axes, named) for axes in cells})
    for name in _SELDOM_NAMED:
        rest = [other for other in named if other != name]
        if name in named and len({describe(axes, rest) for axes in cells}) == told_apart:
            named = rest
    return tuple(named)
