"""A Kubernetes cluster in this process, for tests: an API server, its controllers, and nodes whose pods really run.

    with Cluster(tmp_path, nodes=[Node("n1", cpu=16, memory="64Gi")]) as cluster:
        cluster.kubeconfig(path)
        cluster.evict(pod)

What it does follows the documented behaviour of the real one, for the part that is used here. What it does not do:
init containers, probes, autoscaling, resource limits (a container gets all of this host), network policies (stored,
not enforced), other users than root inside containers, plain Jobs of several pods.
"""

from testbed.kube_api.cluster import Cluster, Node

__all__ = ["Cluster", "Node"]
