"""Which node of the job this process is on, read from the environment that the engine set.

Every engine has its own variables for two facts: the rank of this node, and the host name of node 0. The first engine
that sets both counts, the most specific one first: a torchrun inside a Slurm step inside a pod started this process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import RequestError

# A port that no common service uses; every launcher has an option for another one.
RENDEZVOUS_PORT = 29507
_NODE = "PACELINE_NODE"
# Differs between attempts of one run, if the engine sets it, so that nodes of two attempts never join.
ATTEMPT = "PACELINE_ATTEMPT"
SHARED_GPU = "PACELINE_SHARED_GPU"
# Set in ranks that were forked from a warm process instead of started as new interpreters.
FORKED = "PACELINE_FORKED"
# Why ranks that should have been forked are new interpreters.
NOT_FORKED = "PACELINE_NOT_FORKED"


def shares_gpu(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of this host use its first GPU: a test of the code, not a speed measurement."""
    return environ.get(SHARED_GPU) == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePosition:
    """This node among the nodes of its job. master: name or address of node 0, where the ranks rendezvous."""

    node: int
    nodes: int
    master: str
    engine: str


# engine -> variables for the rank of this node, the number of nodes, and the name of node 0.
_ENGINES: dict[str, tuple[str, str, str]] = {
    "torchrun": ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    "paceline": ("PACELINE_NODE_RANK", "PACELINE_NODES", "PACELINE_MASTER"),
    # Set by TrainJob and the PyTorch operator.
    "kubeflow": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    "kubernetes": ("JOB_COMPLETION_INDEX", "PACELINE_NODES", "PACELINE_MASTER"),
    "slurm": ("SLURM_NODEID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"),
    # One process per node: its rank is the rank of the node.
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PACELINE_MASTER"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "PACELINE_MASTER"),
}


def here(environ: Mapping[str, str]) -> NodePosition:
    """Return the placement that the environment describes; without an engine, the only node of its job.

    >>> here({"SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[3-4]"})
    NodePosition(node=1, nodes=2, master='gpu3', engine='slurm')
    """
    for engine, names in _ENGINES.items():
        node, nodes, master = (environ.get(name, "").strip() for name in names)
        if node.isdigit() and nodes.isdigit() and master:
            # Slurm's node names may not resolve; the batch script provides an address.
            first = environ.get("PACELINE_MASTER") or first_host(master) if engine == "slurm" else master
            if int(node) >= int(nodes):
                raise RequestError(f"environment ({engine}): got node rank {node}, expected a number below {nodes}.")
            return NodePosition(node=int(node), nodes=int(nodes), master=first, engine=engine)
    return NodePosition(node=0, nodes=1, master="127.0.0.1", engine="none")


def first_host(nodelist: str) -> str:
    """Return the first name of a Slurm node list.

    >>> first_host("gpu[3-5,9],login1")
    'gpu3'
    """
    prefix, bracket, rest = nodelist.partition("[")
    if "," in prefix or not bracket:
        return nodelist.split(",")[0]
    inside, _, after = rest.partition("]")
    suffix = re.match(r"[^,\[]*", after)
    return f"{prefix}{re.split('[-,]', inside)[0]}{suffix[0] if suffix else ''}"


def node_name(environ: Mapping[str, str]) -> str:
    """Return the name that operators use for this node, which is not the host name of a pod."""
    return environ.get(_NODE) or environ.get("SLURMD_NODENAME") or socket.gethostname()


RAN_ON = re.compile(r"\bpaceline: ranks (\d+)-(\d+) ran on ([\w.-]+)$", re.MULTILINE)


def ran_on(ranks: range, host: str) -> str:
    """Return the line by which an agent tells where its ranks ran, if they did not end well."""
    return f"paceline: ranks {ranks.start}-{ranks.stop - 1} ran on {host}"


def host_of(rank: int, log: str) -> str | None:
    """Return the node of a rank by the lines of `ran_on` in a log.

    >>> host_of(5, ran_on(range(0, 4), "gpu1") + "\\n" + "2: " + ran_on(range(4, 8), "gpu2"))
    'gpu2'
    """
    lines = ((int(first), int(last), host) for first, last, host in RAN_ON.findall(log))
    return next((host for first, last, host in lines if first <= rank <= last), None)
