"""Which node and rank this process is, by whatever its engine left in the environment.

Each engine has its own words for the same two facts: the number of this node among the nodes of the job, and the name
of the first of them. The first engine that says both counts, the most specific one first: a torchrun inside a Slurm
step inside a pod is what started this process.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import RequestError

# One of many ports that no service is known by; every launcher lets the user choose another.
RENDEZVOUS_PORT = 29507
_NODE = "PACELINE_NODE"
# Different for each attempt at the same run, where the engine says one: nodes of two attempts never meet.
ATTEMPT = "PACELINE_ATTEMPT"
SHARED_GPU = "PACELINE_SHARED_GPU"
# Set in ranks that were forked from a warm process instead of started by torchrun.
FORKED = "PACELINE_FORKED"


def shares_gpu(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of this host were told to use its first GPU: a test of their code, never a speed."""
    return environ.get(SHARED_GPU) == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This node among those of its job. master is where ranks meet: the name of node 0, or an address of it."""

    node: int
    nodes: int
    master: str
    engine: str


# engine -> (number of this node, number of nodes, name of the first one), as variables of the environment.
_ENGINES: dict[str, tuple[str, str, str]] = {
    "torchrun": ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"),
    "paceline": ("PACELINE_NODE_RANK", "PACELINE_NODES", "PACELINE_MASTER"),
    # A TrainJob's and the PyTorch operator's variables.
    "kubeflow": ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    "kubernetes": ("JOB_COMPLETION_INDEX", "PACELINE_NODES", "PACELINE_MASTER"),
    "slurm": ("SLURM_NODEID", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST"),
    # One process per node: the rank among all of them is the number of the node.
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PACELINE_MASTER"),
    "pmi": ("PMI_RANK", "PMI_SIZE", "PACELINE_MASTER"),
}


def here(environ: Mapping[str, str]) -> Place:
    """The place that the environment gives; without any engine, the only node of its job."""
    for engine, names in _ENGINES.items():
        node, nodes, master = (environ.get(name, "").strip() for name in names)
        if node.isdigit() and nodes.isdigit() and master:
            # Names of Slurm's nodes need not resolve: its batch script says an address.
            first = environ.get("PACELINE_MASTER") or first_host(master) if engine == "slurm" else master
            return _checked(Place(node=int(node), nodes=int(nodes), master=first, engine=engine))
    return Place(node=0, nodes=1, master="127.0.0.1", engine="none")


def _checked(place: Place) -> Place:
    if not 0 <= place.node < place.nodes:
        raise RequestError(
            f"environment ({place.engine}): node {place.node} of {place.nodes} was given; accepted is a number below it"
        )
    return place


def first_host(nodelist: str) -> str:
    """The first name of Slurm's `gpu[3-5,9],login1`: gpu3."""
    prefix, bracket, rest = nodelist.partition("[")
    if "," in prefix or not bracket:
        return nodelist.split(",")[0]
    inside, _, after = rest.partition("]")
    suffix = re.match(r"[^,\[]*", after)
    return f"{prefix}{re.split('[-,]', inside)[0]}{suffix[0] if suffix else ''}"


def node_name(environ: Mapping[str, str]) -> str:
    """The name under which operators know this node: a pod's own host name is not it."""
    return environ.get(_NODE) or environ.get("SLURMD_NODENAME") or socket.gethostname()
