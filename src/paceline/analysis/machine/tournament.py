"""The slow node, rank or link among peers, without a baseline: every pair exchanges data; medians and MADs decide.

A verdict needs two things: a modified z-score beyond 3.5 among the peers (Iglewicz and Hoaglin, 1993), so that it is
more than chance, and a bandwidth at least 20 % under theirs, so that it matters.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from paceline.analysis.findings import SHARED_GPU, Pair, Suspect
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.sweep import PAIR
from paceline.analysis.statistics.intervals import OUTLIER_Z, Array
from paceline.results.records import RunRecord

SLOW_RATIO = 0.8  # at least 20 % under the peers is reported
FEWEST_PEERS = 3
# If peers agree to a fraction of a percent, anything would be an outlier; so their MAD counts as at least 1 %.
LEAST_MAD_RATIO = 0.01
NODE, RANK, LINK = "node", "rank", "link"

Bandwidths = Mapping[tuple[int, int], float]
Key = TypeVar("Key", bound=Hashable)


def modified_z(values: Sequence[float] | Array, noise_ratio: float = 0.0) -> Array:
    """0.6745 (x - median) / MAD, signed; the MAD counts as at least 1 %, and at least noise_ratio, of the median.

    >>> modified_z([100.0, 101.0, 99.0, 100.0, 50.0]).round(1).tolist()
    [0.0, 0.7, -0.7, 0.0, -33.7]
    """
    x = np.asarray(values, dtype=np.float64)
    middle = float(np.median(x))
    spread = max(float(np.median(np.abs(x - middle))), max(LEAST_MAD_RATIO, noise_ratio) * abs(middle))
    return 0.6745 * (x - middle) / spread if spread else np.zeros(len(x))


# --- placement of ranks ---


class Place(NamedTuple):
    """Where a rank runs. node numbers the hosts of the job; host adds that number if names repeat; device is `cpu` or,
    say, `cuda:1 NVIDIA H200`.
    """

    node: int
    host: str
    device: str


def places_of(record: RunRecord) -> dict[int, Place]:
    """Placement by rank. Ranks of a node are consecutive, so nodes are known even if two hosts have the same name."""
    topology = record.spec.topology
    gpus = {str(m.get("host")): list(m.get("gpus") or ()) for m in record.machines}
    hosts = {o.rank: o.host for o in record.outcomes}
    ranks = sorted({*hosts, *(s.rank for s in record.collectives)})
    keys = {r: (r // topology.processes_per_node, hosts.get(r, "unknown host")) for r in ranks}
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
    same_name = Counter(host for _, host in numbers)
    places, seen = {}, Counter[int]()
    for r in ranks:
        node, host = numbers[keys[r]], keys[r][1]
        local_rank, device = seen[node], "cpu"
        if topology.device != "cpu":
            names = [gpu.get("name") for gpu in gpus.get(host, [])]
            known = local_rank < len(names) and names[local_rank]
            device = f"cuda:{local_rank} {names[local_rank]}" if known else f"cuda:{local_rank}"
        places[r] = Place(node, host if same_name[host] == 1 else f"{host} (node {node})", device)
        seen[node] += 1
    return places


# --- verdicts ---


class Verdict(NamedTuple):
    """members are nodes or ranks; z is among peers of the same kind, ratio against pairs without the members."""

    kind: str
    members: tuple[int, ...]
    ratio: float
    z: float


def judge(pairs: Bandwidths, nodes: Mapping[int, int], noise_ratio: float = 0.0) -> list[Verdict]:
    """Slow nodes, then slow ranks outside slow nodes, then slow links between the rest: each fault is reported once.

    noise_ratio is how well a pair repeats itself; peers that agree better than that do so by chance.
    """
    relative = relative_to_kind(pairs, nodes)
    # A node is slow if the pairs of every one of its ranks across nodes are; otherwise single ranks are slow.
    across = {p: b for p, b in relative.items() if nodes[p[0]] != nodes[p[1]]}
    found = [
        v
        for v in _slow_groups(across, {p: (nodes[p[0]], nodes[p[1]]) for p in across}, NODE, noise_ratio)
        if all(_ratio(across, r) <= SLOW_RATIO for r, n in nodes.items() if n in v.members)
    ]
    slow = {member for verdict in found for member in verdict.members}
    left = {p: b for p, b in relative.items() if not {nodes[r] for r in p} & slow}
    if len(set(nodes.values())) < len(nodes):
        ranks = _slow_groups(left, {p: p for p in left}, RANK, noise_ratio)
        found += ranks
        out = {member for verdict in ranks for member in verdict.members}
        left = {p: b for p, b in left.items() if not out & set(p)}
    for pair, z in _outstanding(left, noise_ratio):
        ratio = left[pair] / float(np.median([b for other, b in left.items() if other != pair]))
        if ratio <= SLOW_RATIO:
            found.append(Verdict(LINK, pair, ratio, z))
    return found


def relative_to_kind(pairs: Bandwidths, nodes: Mapping[int, int]) -> dict[tuple[int, int], float]:
    """Bandwidth over the usual one of pairs inside a node, or of pairs across nodes.

    Usual is the median over ranks of each rank's median: one slow node of four affects half of all pairs across nodes,
    but not the medians of the other ranks.

    >>> relative_to_kind({(0, 1): 100.0, (0, 2): 100.0, (1, 2): 50.0}, {0: 0, 1: 1, 2: 2})
    {(0, 1): 1.3333333333333333, (0, 2): 1.3333333333333333, (1, 2): 0.6666666666666666}
    """
    by_rank: defaultdict[bool, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (a, b), bandwidth in pairs.items():
        for rank in (a, b):
            by_rank[nodes[a] == nodes[b]][rank].append(bandwidth)
    usual = {inside: float(np.median([np.median(x) for x in ranks.values()])) for inside, ranks in by_rank.items()}
    return {(a, b): bandwidth / usual[nodes[a] == nodes[b]] for (a, b), bandwidth in pairs.items()}


def _slow_groups(
    pairs: Bandwidths, ends: Mapping[tuple[int, int], tuple[int, int]], kind: str, noise_ratio: float
) -> list[Verdict]:
    """Members (nodes or ranks) whose median over their own pairs is an outlier on the low side."""
    by_member = grouped(((m, b) for pair, b in pairs.items() for m in ends[pair]), lambda each: each[0])
    scores = {member: float(np.median([b for _, b in own])) for member, own in by_member.items()}
    slow = []
    for member, z in _outstanding(scores, noise_ratio):
        without = [b for pair, b in pairs.items() if member not in ends[pair]]
        ratio = scores[member] / float(np.median(without)) if without else 1.0
        if ratio <= SLOW_RATIO:
            slow.append(Verdict(kind, (member,), ratio, z))
    return slow


def _outstanding(scores: Mapping[Key, float], noise_ratio: float) -> Iterable[tuple[Key, float]]:
    """Keys beyond the outlier limit on the slow side, with their z; none among fewer than three."""
    if len(scores) < FEWEST_PEERS:
        return
    for key, z in zip(scores, modified_z(list(scores.values()), noise_ratio), strict=True):
        if z < -OUTLIER_Z:
            yield key, float(z)


def _ratio(pairs: Bandwidths, rank: int) -> float:
    own = [b for p, b in pairs.items() if rank in p]
    rest = [b for p, b in pairs.items() if rank not in p]
    return float(np.median(own) / np.median(rest)) if own and rest else 1.0


# --- one run ---


@dataclass(frozen=True, slots=True)
class Tournament:
    """What the pairs of one run show."""

    pairs: tuple[Pair, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    notes: tuple[str, ...] = ()


def judge_run(record: RunRecord) -> Tournament:
    """Judge by the largest size over all turns together; confirmed if each of at least two turns agrees."""
    samples = [s for s in record.collectives if s.operation == PAIR and s.status == "ok" and s.durations_s]
    if not samples:
        return Tournament()
    size = max(s.size_bytes for s in samples)
    places = places_of(record)
    nodes = {rank: place.node for rank, place in places.items()}
    largest = [(s, s.peer) for s in samples if s.size_bytes == size and s.peer is not None]
    by_pair = grouped(largest, lambda each: (each[0].turn or 0, *sorted((each[0].rank, each[1]))))
    # Bandwidth by turn and pair: the size over the longer of the two ranks' means.
    turns: defaultdict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    for (turn, a, b), both in sorted(by_pair.items()):
        turns[turn][a, b] = size / max(sum(s.durations_s) / len(s.durations_s) / s.batch for s, _ in both)
    # All turns of a pair as one: bytes of all over seconds of all, which is the harmonic mean.
    everyone = sorted({pair for of_turn in turns.values() for pair in of_turn})
    whole = {p: 1 / float(np.mean([1 / of_turn[p] for of_turn in turns.values() if p in of_turn])) for p in everyone}
    relative = relative_to_kind(whole, nodes)
    pairs = tuple(
        Pair(
            run=record.spec.run_id,
            ranks=(a, b),
            hosts=(places[a].host, places[b].host),
            size_bytes=size,
            bandwidth_bytes_per_s=bandwidth,
            ratio=relative[a, b],
            turns=sum((a, b) in of_turn for of_turn in turns.values()),
        )
        for (a, b), bandwidth in whole.items()
    )
    if record.shares_gpu:
        return Tournament(pairs, (), (f"pair tournament: {SHARED_GPU}, so no rank is suspect",))
    if len({r for p in whole for r in p}) < FEWEST_PEERS:
        return Tournament(pairs, (), ("pair tournament of two ranks: it cannot show which of the two is slow",))
    # How far one turn of a pair lies from its true bandwidth, as a MAD: that of the differences between two turns over
    # sqrt(2); 0 with a single turn. A turn that is faster for all pairs is not noise: each difference is taken from the
    # median of its turn.
    first, *others = turns.values()
    apart: list[float] = []
    for other in others:
        logs = np.log([other[p] / first[p] for p in other if p in first])
        apart += np.abs(logs - np.median(logs)).tolist() if len(logs) else []
    noise = float(np.median(apart)) / math.sqrt(2) if apart else 0.0
    by_turn = [{(v.kind, v.members) for v in judge(of_turn, nodes, noise)} for of_turn in turns.values()]
    suspects = []
    for verdict in judge(whole, nodes, noise / math.sqrt(len(turns))):
        confirmed = len(by_turn) > 1 and all((verdict.kind, verdict.members) in slow for slow in by_turn)
        suspects.append(_suspect(record, verdict, whole, places, confirmed))
    return Tournament(pairs, tuple(suspects))


def _suspect(
    record: RunRecord, verdict: Verdict, whole: Bandwidths, places: Mapping[int, Place], confirmed: bool
) -> Suspect:
    ranks = verdict.members
    if verdict.kind == NODE:
        ranks = tuple(r for r, place in places.items() if place.node in verdict.members)
    names = " and ".join(rank_name(r, places[r]) for r in ranks)
    if verdict.kind == LINK:
        what = f"the link between {names} carries {_rate(whole[ranks[0], ranks[1]])}"
        why = f"{verdict.ratio:.0%} of the other pairs, while both ranks are fast with others"
    else:
        inside = ", ".join(f"rank {r} {places[r].device}" for r in ranks)
        across = {p for p in whole if verdict.kind == RANK or places[p[0]].node != places[p[1]].node}
        own = float(np.median([whole[p] for p in across if set(p) & set(ranks)]))
        what = f"node {places[ranks[0]].host} ({inside}) is slow" if verdict.kind == NODE else f"{names} is slow"
        why = f"{_rate(own)} at the median of its pairs, {verdict.ratio:.0%} of the other pairs"
    return Suspect(
        kind=verdict.kind,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(places[r].host for r in ranks)),
        devices=tuple(places[r].device for r in ranks),
        ratio=verdict.ratio,
        z=verdict.z,
        confirmed=confirmed,
        text=f"{what}: {why}; {'' if confirmed else 'not '}confirmed by a second turn",
        runs=(record.spec.run_id,),
    )


def rank_name(rank: int, place: Place) -> str:
    return f"rank {rank} on {place.host}, {place.device}"


def _rate(bytes_per_s: float) -> str:
    size, unit = (1e9, "GB/s") if bytes_per_s >= 1e9 else (1e6, "MB/s")
    return f"{bytes_per_s / size:.3g} {unit}"
