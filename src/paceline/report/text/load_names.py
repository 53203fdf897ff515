"""Names of loads that distinguish them from the others of a report."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.analysis.findings import ReplicaTrace, ServedLoad, ServedShapes, ServedTrace
from paceline.analysis.findings.cell_axes import axis_text
from paceline.errors import Scalar

# Axes that may distinguish two cells of one load, in the order of naming.
BESIDE = ("model", "engine", "partition", "nodes", "world_size", "precision", "data", "api", "max_tokens", "requests")


NOT_BELIEVED = "unreliable"
# Axes to name, by scenario.
Beside = Mapping[Scalar, tuple[str, ...]]


def load_words(rate_per_s: float | None, concurrency: int | None) -> str:
    """`4/s`, `8 in flight`; empty if nothing limits it."""
    if rate_per_s is not None:
        return f"{rate_per_s:,.4g}/s"
    return f"{concurrency:,} in flight" if concurrency is not None else ""


def axes_load(axes: Mapping[str, Scalar]) -> str:
    """As `load_words`, from the axes of a load."""
    rate, concurrency = axes.get("rate_per_s"), axes.get("concurrency")
    return load_words(
        float(rate) if isinstance(rate, int | float) else None, concurrency if isinstance(concurrency, int) else None
    )


def short_load(rate_per_s: float | None, concurrency: int | None) -> str:
    """`4/s`, `8`: the label of a point on a curve."""
    return load_words(rate_per_s, concurrency).removesuffix(" in flight")


def beside(found: ServedShapes) -> Beside:
    """By scenario, the axes in which cells with the same load differ."""
    cells = {one.cell: one.axes for one in found.loads} | {one.cell: one.axes for one in found.audits}
    by_load: dict[tuple[Scalar, ...], list[Mapping[str, Scalar]]] = {}
    for axes in cells.values():
        by_load.setdefault(tuple(axes.get(name) for name in ("scenario", "rate_per_s", "concurrency")), []).append(axes)
    named: dict[Scalar, tuple[str, ...]] = {}
    for (scenario, *_), ours in by_load.items():
        differing = {name for name in BESIDE if len({str(axes.get(name)) for axes in ours}) > 1}
        names = differing.union(named.get(scenario, ()))
        named[scenario] = tuple(name for name in BESIDE if name in names)
    return named


def cell_words(axes: Mapping[str, Scalar], named: Beside) -> str:
    """`server, 4/s`; `concurrency, 8 in flight, partition dynamic`."""
    scenario = str(axes.get("scenario"))
    # The rate of a sweep is only its first one.
    shown = "" if scenario in ("sweep", "search") else axes_load(axes)
    return ", ".join(filter(None, (*_scenario(scenario, shown), *_named(axes, named))))


def marked(words: str, is_believed: bool) -> str:
    """A name, marked if its numbers are unreliable."""
    return words if is_believed else f"{words} ({NOT_BELIEVED})"


def family_words(load: ServedLoad, named: Beside) -> str:
    """The name without the load: what all points of one curve share."""
    return ", ".join(filter(None, (load.scenario, *_named(load.axes, named), _alone(load))))


def served_words(load: ServedLoad, named: Beside) -> str:
    """A load of a cell; names the replica if only one got the load."""
    own = load_words(load.rate_per_s, load.concurrency)
    return ", ".join(filter(None, (*_scenario(load.scenario, own), *_named(load.axes, named), _alone(load))))


def _alone(load: ServedLoad) -> str:
    return "" if load.replica is None else f"replica {load.replica} alone"


def _scenario(scenario: str, load: str) -> tuple[str, ...]:
    """`8 in flight` says `concurrency` already."""
    return (load,) if scenario == "concurrency" and load else (scenario, load)


def _named(axes: Mapping[str, Scalar], named: Beside) -> tuple[str, ...]:
    names = named.get(axes.get("scenario"), ())
    return tuple(axis_text(name, axes) for name in names if axes.get(name) is not None)


def replica_words(replica: ReplicaTrace, trace: ServedTrace) -> str:
    """The host if it identifies the replica, else both."""
    hosts = [other.host for other in trace.replicas]
    if replica.host is None:
        return f"replica {replica.replica}"
    return replica.host if hosts.count(replica.host) == 1 else f"{replica.host}, replica {replica.replica}"
