"""Which axes distinguish cells, and how a cell is named by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import Scalar

_ALWAYS_NAMED = ("model", "world_size")
# The kind of device is not an axis of a spec; a run records it next to its axes.
DEVICE = "device_name"
# On what the cell was proved, if its reference does not fit a device.
EQUAL_WORK = "equal_work"
# Named only if nothing else distinguishes two cells; the least informative axis comes first.
_SELDOM_NAMED = ("steps", "seed", "launcher", "workload")


def describe(axes: Mapping[str, Scalar], named: Sequence[str] = _ALWAYS_NAMED) -> str:
    """Name of a cell: its strategy, then the named axes.

    >>> describe({"strategy": "ddp", "model": "gpt-tiny", "world_size": 2, "device": "cpu"})
    'ddp, gpt-tiny, 2 processes'
    """
    first = str(axes.get("strategy") or axes.get("script") or axes.get("workload") or "")
    return ", ".join(filter(None, (first, *(axis_text(name, axes) for name in named if axes.get(name) is not None))))


def axis_text(name: str, axes: Mapping[str, Scalar]) -> str:
    """One axis in words.

    >>> axis_text("world_size", {"world_size": 2, "device": "cuda"}), axis_text("compile", {"compile": True})
    ('2 GPUs', 'compile on')
    """
    value = axes.get(name)
    if name == "world_size":
        noun = "GPU" if axes.get("device") == "cuda" else "process"
        plural = "" if value == 1 else "s" if noun == "GPU" else "es"
        return f"{value} {noun}{plural}"
    if name in {"model", "workload", "strategy", "arguments", "env", DEVICE, EQUAL_WORK}:
        return str(value)
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')} {'on' if value else 'off'}"
    return f"{name.replace('_', ' ')} {value}"


def distinguishing_axes(cells: Sequence[Mapping[str, Scalar]]) -> tuple[str, ...]:
    """Axes that names of these cells need: model, world size, and every other axis in which they differ.

    >>> distinguishing_axes([{"model": "tiny", "world_size": 1, "rank": rank} for rank in (8, 16)])
    ('model', 'world_size', 'rank')
    """
    seen: dict[str, set[str]] = {}
    for axes in cells:
        for name, value in axes.items():
            seen.setdefault(name, set()).add(repr(value))
    if "env" in seen:
        # Cells without variables of their own do not have this axis.
        seen["env"] |= {repr(axes.get("env")) for axes in cells}
    differing = [name for name, values in seen.items() if len(values) > 1]
    # What every name begins with is not named again.
    first = "strategy" if any(axes.get("strategy") for axes in cells) else "script"
    named = [*_ALWAYS_NAMED, *(n for n in differing if n not in {*_ALWAYS_NAMED, "strategy", first, "global_batch"})]
    if len({(axes.get("strategy"), axes.get("accumulation")) for axes in cells}) == len(seen.get("strategy", ())):
        # A layout has fewer replicas, which accumulate more: this follows from the strategy.
        named = [name for name in named if name != "accumulation"]
    distinct = len({describe(axes, named) for axes in cells})
    for name in _SELDOM_NAMED:
        rest = [other for other in named if other != name]
        if name in named and len({describe(axes, rest) for axes in cells}) == distinct:
            named = rest
    return tuple(named)
