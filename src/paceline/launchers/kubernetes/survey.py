"""Is this cluster fit for runs? One diagnosis per question, each with the sentence that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from paceline import __version__
from paceline.errors import LaunchError
from paceline.host.doctor import Diagnosis
from paceline.launchers.kubernetes.client import Cluster, Gone, parted
from paceline.launchers.kubernetes.cluster import rights, smoke_job
from paceline.launchers.kubernetes.options import Options, quantity
from paceline.launchers.kubernetes.probe import PODS, Finding, probe

OLDEST = (1, 29)
GIB = 2**30
_SHM_FIX = "kubernetes.memory_limit caps it, or the node does; or kubernetes.pod_patch takes the volume shm away"
_PRODUCT, _DRIVER = "nvidia.com/gpu.product", "nvidia.com/cuda.driver-version.full"

Object = Mapping[str, Any]


def survey(cluster: Cluster, chosen: Options, *, limit_s: float, pods: bool = True) -> Iterator[Diagnosis]:
    """Everything `cluster check` asks, in the order in which a user would put it right. Without an answer of the API
    server there is nothing else to ask; `pods`: also start two short ones."""
    yield (first := _version(cluster))
    if first.ok is False:
        return
    asked = [*_permissions(cluster, chosen), namespace(cluster, chosen)]
    asked += [*_nodes(cluster, chosen), *named_things(cluster, chosen), *_queue(cluster, chosen)]
    yield from asked
    if chosen.image is None:
        fix = "name one: --launcher kubernetes:image=REGISTRY/paceline:TAG"
        yield Diagnosis(name="image", ok=None, text="no image was given; pods were not tried", fix=fix)
    elif pods and any(each.ok is False for each in asked):
        # They would wait for what is missing, and say nothing new.
        yield Diagnosis(name="image", ok=None, text="pods were not tried: first mend what is above")
    elif pods:
        yield from probe_diagnoses(probe(cluster, chosen, limit_s), chosen)


def _version(cluster: Cluster) -> Diagnosis:
    host = cluster.client.configuration.host
    try:
        found = cluster.call("get", "version", "VersionApi", "get_code")
    except LaunchError as trouble:
        # One command: the one that the refusal itself ends with, where it has one.
        text, command = parted(trouble)
        return Diagnosis(name="api server", ok=False, text=text, fix=f"try: {command or 'kubectl cluster-info'}")
    number = tuple(int(re.sub(r"\D.*", "", found[key]) or 0) for key in ("major", "minor"))
    text = f"{found.get('gitVersion', 'unknown')} at {host}"
    fix = None if number >= OLDEST else "use a cluster of Kubernetes 1.29 or newer"
    return Diagnosis(name="api server", ok=fix is None, text=text, fix=fix)


def missing_rights(cluster: Cluster, wanted: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """`create jobs.batch` and the like: those of (group, resource) -> verbs that this user has not, by a
    SelfSubjectAccessReview each."""
    missing = []
    for (group, resource), verbs in wanted.items():
        plural, _, sub = resource.partition("/")
        for verb in verbs:
            about = {"namespace": cluster.namespace, "group": group, "resource": plural, "verb": verb}
            body = {"spec": {"resourceAttributes": about | ({"subresource": sub} if sub else {})}}
            answer = cluster.call("create", "reviews", "AuthorizationV1Api", "create_self_subject_access_review", body)
            if not answer.get("status", {}).get("allowed"):
                missing.append(f"{verb} {resource}{f'.{group}' if group else ''}")
    return missing


def _permissions(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    try:
        missing = missing_rights(cluster, rights(chosen.kind))
    except LaunchError as trouble:
        yield Diagnosis(name="permissions", ok=None, text=f"could not be asked for: {trouble}")
        return
    asked = sum(map(len, rights(chosen.kind).values()))
    fix = f"have an administrator run `paceline cluster init --namespace {cluster.namespace} --apply`"
    for words in missing:
        text = f"may not {words} in namespace {cluster.namespace}"
        yield Diagnosis(name="permissions", ok=False, text=text, fix=fix)
    if not missing:
        yield Diagnosis(name="permissions", ok=True, text=f"all {asked} verbs in namespace {cluster.namespace}")


def namespace(cluster: Cluster, chosen: Options) -> Diagnosis:
    """A dry run of a small job: the namespace must be there, and let it in. To read the namespace is another right."""
    name, here = "namespace", cluster.namespace
    job = smoke_job(Options(image=chosen.image or "paceline"), here)
    try:
        cluster.call("create", "jobs", "BatchV1Api", "create_namespaced_job", here, job, dry_run="All")
    except Gone:
        fix = f"run `paceline cluster init --namespace {here} --apply`, or name another: kubernetes.namespace"
        return Diagnosis(name=name, ok=False, text=f"{here} does not exist", fix=fix)
    except LaunchError as refusal:
        return Diagnosis(name=name, ok=None, text=f"{here}: a job was refused in a dry run: {refusal}")
    return Diagnosis(name=name, ok=True, text=f"{here} takes jobs")


def _nodes(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    try:
        nodes = cluster.call("list", "nodes", "CoreV1Api", "list_node")["items"]
    except LaunchError:
        text = "may not be listed with these rights, which runs do not need"
        yield Diagnosis(name="nodes", ok=None, text=text, fix="to see them here, run this as an administrator")
        return
    ready = [node for node in nodes if _is_ready(node)]
    wanted = [node for node in ready if _is_selected(node, chosen)]
    fitting = [node for node in wanted if _lacking(node, chosen) is None]
    yield _node_diagnosis(len(nodes), ready, wanted, fitting, chosen)
    if chosen.gpus or any(_gpus(node, chosen) for node in nodes):
        yield _gpu_diagnosis(wanted, chosen)


def _node_diagnosis(
    count: int, ready: list[Object], wanted: list[Object], fitting: list[Object], chosen: Options
) -> Diagnosis:
    text = f"{len(ready)} of {count} ready, {len(fitting)} of them large enough for a pod"
    fix = None
    if not wanted:
        fix = "no ready node has the labels of kubernetes.node_selector; see `kubectl get nodes --show-labels`"
    elif not fitting:
        lacking = sorted({lack for node in wanted if (lack := _lacking(node, chosen))})
        fix = f"no node has enough {' and '.join(lacking)}: ask for less (kubernetes.cpu_request, memory_request, gpus)"
    return Diagnosis(name="nodes", ok=fix is None, text=text, fix=fix)


def _gpu_diagnosis(nodes: list[Object], chosen: Options) -> Diagnosis:
    total = sum(_gpus(node, chosen) for node in nodes)
    text = f"{total} {chosen.gpu_resource} on {sum(_gpus(node, chosen) > 0 for node in nodes)} nodes"
    kinds = {label for node in nodes if (label := _labels(node).get(_PRODUCT))}
    drivers = {label for node in nodes if (label := _labels(node).get(_DRIVER))}
    text += "".join(
        f"; {word} {', '.join(sorted(found))}" for word, found in (("", kinds), ("driver", drivers)) if found
    )
    fix = None
    if chosen.gpus and not total:
        fix = f"install the device plugin or the GPU operator: no node offers {chosen.gpu_resource}"
    return Diagnosis(name="gpus", ok=fix is None, text=text.replace(";  ", "; "), fix=fix)


def named_things(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    """What the options name and somebody else must have created."""
    here = cluster.namespace
    asked: list[tuple[str, str | None, tuple[Any, ...]]] = [
        ("claim", chosen.results_claim, ("CoreV1Api", "read_namespaced_persistent_volume_claim", here)),
        ("priority class", chosen.priority_class, ("SchedulingV1Api", "read_priority_class")),
        ("service account", chosen.service_account, ("CoreV1Api", "read_namespaced_service_account", here)),
    ]
    for kind, name, (api, method, *place) in asked:
        if name is not None:
            yield _existence(cluster, kind, name, (api, method, name, *place))


def _queue(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    if chosen.queue is not None:
        where = ("kueue.x-k8s.io", "v1beta1", cluster.namespace, "localqueues", chosen.queue)
        yield _existence(cluster, "queue", chosen.queue, ("CustomObjectsApi", "get_namespaced_custom_object", *where))


def _existence(cluster: Cluster, kind: str, name: str, call: tuple[Any, ...]) -> Diagnosis:
    try:
        cluster.call("get", kind, *call)
    except Gone:
        return Diagnosis(name=kind, ok=False, text=f"{name} does not exist", fix=f"create it, or name another {kind}")
    except LaunchError:
        return Diagnosis(name=kind, ok=None, text=f"{name} may not be looked at with these rights")
    return Diagnosis(name=kind, ok=True, text=f"{name} exists")


def probe_diagnoses(found: Finding, chosen: Options) -> Iterator[Diagnosis]:
    """What the two pods said about the image, names, shared memory and GPUs."""
    said = [found.said[index] for index in sorted(found.said)]
    if not said:
        pull = "see `kubectl get events`; is the image's name right, and may the cluster pull it?"
        yield Diagnosis(name="image", ok=False, text=f"{chosen.image}: {found.trouble}", fix=pull)
        return
    yield _image(said, chosen)
    lost = [each.get("name_error", "no answer") for each in said if "peer" not in each]
    text = f"{len(said)} of {PODS} pods answered" + (f" ({found.trouble})" if found.trouble else "")
    if lost or len(said) < PODS:
        shut = "look at CoreDNS (`kubectl -n kube-system get pods`) and at NetworkPolicies that keep port 53 shut"
        why = lost[0] if lost else text
        yield Diagnosis(name="names", ok=False, text=f"pods do not find each other: {why}", fix=shut)
    else:
        yield Diagnosis(name="names", ok=True, text="pods find each other by name")
    yield _shared_memory(said, chosen)
    if chosen.gpus:
        seen = min(each.get("gpus", 0) for each in said)
        fix = None if seen else "the pod was given a GPU but sees none: look at the driver and the container toolkit"
        yield Diagnosis(name="gpus in pods", ok=fix is None, text=f"{seen} of 1 asked for", fix=fix)


def _image(said: Iterable[Object], chosen: Options) -> Diagnosis:
    versions = sorted({str(each.get("version")) for each in said})
    if versions == ["None"]:
        why = next(each.get("import_error", "unknown") for each in said)
        text = f"{chosen.image} holds no Paceline ({why})"
        return Diagnosis(name="image", ok=False, text=text, fix="build one with `paceline image build`")
    same = versions == [__version__]
    fix = None if same else f"use an image with Paceline {__version__}: results of two versions are not compared"
    return Diagnosis(name="image", ok=same, text=f"{chosen.image} holds Paceline {', '.join(versions)}", fix=fix)


def _shared_memory(said: Iterable[Object], chosen: Options) -> Diagnosis:
    smallest, wanted = min(int(each["shm_bytes"]) for each in said), quantity(chosen.shm)
    fix = None if smallest >= 0.99 * wanted else _SHM_FIX
    text = f"/dev/shm has {smallest / GIB:.2f} GiB of {wanted / GIB:.2f} asked for"
    return Diagnosis(name="shared memory", ok=fix is None, text=text, fix=fix)


def _labels(node: Object) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _is_ready(node: Object) -> bool:
    conditions = node["status"].get("conditions") or ()
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not node.get("spec", {}).get("unschedulable")


def _is_selected(node: Object, chosen: Options) -> bool:
    return (chosen.node_selector or {}).items() <= _labels(node).items()


def _gpus(node: Object, chosen: Options) -> int:
    return int(node["status"].get("allocatable", {}).get(chosen.gpu_resource, 0))


def _lacking(node: Object, chosen: Options) -> str | None:
    """What a pod of a run asks for and the whole node does not have."""
    room = node["status"].get("allocatable", {})
    needed = {"cpu": chosen.cpu_request, "memory": quantity(chosen.memory_request), chosen.gpu_resource: chosen.gpus}
    return next((name for name, amount in needed.items() if amount > quantity(str(room.get(name, 0)))), None)
