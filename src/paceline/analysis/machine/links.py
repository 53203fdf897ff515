"""The link that limits a collective, and its nominal rate, from what each host recorded about its topology.

busbw is made to be compared with it: a ring moves busbw bytes per second in each direction over its slowest link.
Everything here is None where the record does not say: ranks on one CPU share memory, a container's interface has no
rate of its own, ranks that share a GPU use sockets.
"""

from __future__ import annotations

from paceline.host.links import Facts, Link, inside_link, nic_text, used_nics
from paceline.results.records import RunRecord

# In these each rank sends to one other, over one of the node's NICs.
_POINT_TO_POINT = ("send_recv", "ring")


def limiting_link(record: RunRecord, operation: str, group_size: int) -> Link | None:
    """The slowest link that the operation crosses with all ranks of a run; None if it is unknown."""
    nodes, per_node = record.spec.topology.nodes, record.spec.topology.processes_per_node
    hosts, uses_gpu = record.machines, record.spec.topology.device == "cuda"
    if not hosts or record.shares_gpu:
        return None
    # A group is all ranks, or ranks 0 and 1.
    count, to_neighbour = min(per_node, group_size), operation in _POINT_TO_POINT
    links = [inside_link(host, count, to_neighbour) for host in hosts] if uses_gpu and count > 1 else []
    if group_size > per_node:
        links += [_across(host, operation, nodes, per_node, uses_gpu) for host in hosts]
    known = [link for link in links if link]
    # If one host does not know, its link may be the slowest.
    return min(known, key=lambda link: link.bytes_per_s, default=None) if len(known) == len(links) else None


def _across(host: Facts, operation: str, nodes: int, per_node: int, uses_gpu: bool) -> Link | None:
    """What the NICs of a host allow for the busbw of an operation over all its ranks."""
    nics = used_nics(host, uses_gpu)
    rates = {name: float(nic["bytes_per_s"]) for name, nic in nics.items() if nic.get("bytes_per_s")}
    if not nics or len(rates) < len(nics):
        return None
    if operation in _POINT_TO_POINT:
        slowest = min(rates, key=lambda name: rates[name])
        return Link(nic_text({slowest: nics[slowest]}), rates[slowest])
    total = sum(rates.values())
    if operation == "all_to_all":
        # Of what each rank sends to n-1 others, the part for other nodes crosses the NICs that per_node ranks share.
        ranks = nodes * per_node
        total *= (ranks - 1) / (ranks - per_node) / per_node
    return Link(nic_text(nics), total)
