"""Prepare and check a cluster: `paceline cluster init`, `paceline cluster check`, and the preflight of a campaign.

`cluster_manifests` returns what a namespace needs. The controller's role allows what the launcher does and nothing
else, pods have no rights, and no rule has a wildcard. `survey` answers one question after another, each with a fix, and
may start two short pods. `preflight` asks only those questions whose answer is certain for every run, and creates
nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline import __version__
from paceline.errors import LaunchError
from paceline.host.doctor import Diagnosis
from paceline.launchers.kubernetes import states
from paceline.launchers.kubernetes.client import Cluster, Forbidden, NotFound, split_hint
from paceline.launchers.kubernetes.manifests import CONTAINER, RESOURCES, RUN_LABEL, RUNTIME, SMALL, Manifest, reader
from paceline.launchers.kubernetes.options import KINDS, Options, quantity

CONTROLLER_ACCOUNT = "paceline-controller"
POD_ACCOUNT = "paceline-pods"
# Served by Kueue 0.15 and later, and before.
QUEUE_VERSIONS = ("v1beta2", "v1beta1")
OLDEST = (1, 29)
GIB = 2**30
_RBAC = "rbac.authorization.k8s.io"
_OURS = {"app.kubernetes.io/managed-by": "paceline"}
_SHM_FIX = "kubernetes.memory_limit or the node caps it, or kubernetes.pod_patch removes the volume shm"
_PRODUCT, _DRIVER = "nvidia.com/gpu.product", "nvidia.com/cuda.driver-version.full"
# (group, resource) -> verbs
Rights = dict[tuple[str, str], tuple[str, ...]]
_RIGHTS: Rights = {
    ("batch", "jobs"): ("create", "get", "delete"),
    ("", "pods"): ("get", "list"),
    ("", "pods/log"): ("get",),
    ("", "services"): ("create", "delete"),
    ("", "events"): ("list",),
}
_MORE_RIGHTS: dict[str, Rights] = {
    "job": {},
    "jobset": {("jobset.x-k8s.io", "jobsets"): ("create", "get", "delete")},
    "trainjob": {
        ("trainer.kubeflow.org", "trainjobs"): ("create", "get", "delete"),
        ("trainer.kubeflow.org", "trainingruntimes"): ("create", "delete"),
    },
}

Object = Mapping[str, Any]


# --- what a namespace needs ---


def rights(kind: str) -> Rights:
    """Return the rights that a controller of this kind of job needs in its namespace."""
    return {**_RIGHTS, **_MORE_RIGHTS[kind]}


def essential(kind: str) -> Rights:
    """Return the rights without which no run can start and be followed. Cleanup and explanations need more."""
    main = RESOURCES[kind]
    needed: Rights = {(main.group_and_version[0], main.plural): ("create", "get")}
    needed |= {("batch", "jobs"): ("get",)} if kind != "job" else {("", "services"): ("create",)}
    needed |= {(RUNTIME.group_and_version[0], RUNTIME.plural): ("create",)} if kind == "trainjob" else {}
    return {**needed, ("", "pods"): ("get", "list"), ("", "pods/log"): ("get",)}


def cluster_manifests(
    namespace: str, kinds: Sequence[str] = KINDS[:1], quota: Mapping[str, str] | None = None
) -> dict[str, list[Manifest]]:
    """Return file name -> objects, in the order in which they must be applied."""
    space = _object("v1", "Namespace", namespace, None)
    for mode in ("enforce", "audit", "warn"):
        space["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] = "restricted"
    account = _object("v1", "ServiceAccount", CONTROLLER_ACCOUNT, namespace)
    allowed = {key: verbs for kind in kinds for key, verbs in rights(kind).items()}
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, resource), verbs in allowed.items()
    ]
    role = _object(f"{_RBAC}/v1", "Role", CONTROLLER_ACCOUNT, namespace) | {"rules": rules}
    binding = _object(f"{_RBAC}/v1", "RoleBinding", CONTROLLER_ACCOUNT, namespace) | {
        "subjects": [{"kind": "ServiceAccount", "name": CONTROLLER_ACCOUNT, "namespace": namespace}],
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": CONTROLLER_ACCOUNT},
    }
    # Pods never call the API server: their account has no rights and no token.
    pods = _object("v1", "ServiceAccount", POD_ACCOUNT, namespace) | {"automountServiceAccountToken": False}
    # Pods of Paceline may reach each other and DNS, nothing else. A policy cannot say "the same job" for future jobs,
    # so it covers all runs of the namespace. DNS is allowed at any address, because a DNS cache often runs on the node
    # itself, which no selector can name.
    peers = [{"podSelector": {"matchLabels": dict(_OURS)}}]
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    network = {
        "podSelector": {"matchLabels": dict(_OURS)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": peers}],
        "egress": [{"to": peers}, dns],
    }
    files = {
        "00-namespace.yaml": [space],
        "10-access.yaml": [account, role, binding, pods],
        "20-network.yaml": [
            _object("networking.k8s.io/v1", "NetworkPolicy", "paceline", namespace) | {"spec": network}
        ],
    }
    if quota:
        spec = {"hard": {key: str(value) for key, value in quota.items()}}
        files["30-quota.yaml"] = [_object("v1", "ResourceQuota", "paceline", namespace) | {"spec": spec}]
    return files


def smoke_job(chosen: Options, namespace: str) -> Manifest:
    """A job of one small pod that starts Paceline from the image: `kubectl apply`, then `kubectl logs`."""
    name = "paceline-smoke"
    pod = reader(chosen, name)
    pod["spec"]["containers"][0]["command"] = [chosen.python, "-m", "paceline.cli", "--version"]
    spec = {"backoffLimit": 0, "activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 3600, "template": pod}
    return _object("batch/v1", "Job", name, namespace) | {"spec": spec}


def _object(api: str, kind: str, name: str, namespace: str | None) -> Manifest:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **where, "labels": dict(_OURS)}}


# --- questions to the API server ---


def preflight(chosen: Options) -> None:
    """Raise LaunchError for the first problem that prevents every run of a campaign.

    Checked are the kubeconfig and its context, the server, the credentials, permissions, the kind of job, the
    namespace, and the objects that the options name. Questions that the user may not ask are skipped.
    """
    cluster = Cluster.reach(chosen.context, chosen.namespace, chosen.patience_s)
    with contextlib.suppress(Forbidden):
        cluster.call("get", "version", "VersionApi", "get_code")
    with contextlib.suppress(Forbidden):
        if missing := missing_rights(cluster, essential(chosen.kind)):
            # Without rights in all namespaces, a missing namespace looks like a missing permission.
            where = f"in namespace {cluster.namespace}, if it exists"
            shown = f"kubectl auth can-i {missing[0]} --namespace {cluster.namespace}"
            raise LaunchError(f"not permitted to {', '.join(missing)} {where}; try: {shown}")
    resource = RESOURCES[chosen.kind]
    group, version = resource.group_and_version
    try:
        with contextlib.suppress(Forbidden):
            cluster.call("get", "resources", "CustomObjectsApi", "get_api_resources", group, version)
    except NotFound:
        raise LaunchError(
            f"kubernetes.kind: got {chosen.kind!r}, but the cluster has no {resource.plural} of {resource.api}; "
            f"install them, or use kind job; try: kubectl api-resources --api-group={group}"
        ) from None
    for answer in (namespace(cluster, chosen), *named_objects(cluster, chosen)):
        if answer.ok is False:
            raise LaunchError(f"{answer.name} {answer.text}: {answer.fix}")


def survey(cluster: Cluster, chosen: Options, *, limit_s: float, pods: bool = True) -> Iterator[Diagnosis]:
    """Yield the answers of `cluster check`, in the order in which a user would fix them. pods: also start two."""
    try:
        version = cluster.call("get", "version", "VersionApi", "get_code")
    except LaunchError as trouble:
        text, command = split_hint(trouble)
        yield Diagnosis(name="api server", ok=False, text=text, fix=f"try: {command or 'kubectl cluster-info'}")
        return
    is_supported = tuple(int(re.sub(r"\D.*", "", version[key]) or 0) for key in ("major", "minor")) >= OLDEST
    text = f"{version.get('gitVersion', 'unknown')} at {cluster.client.configuration.host}"
    fix = None if is_supported else "use a cluster of Kubernetes 1.29 or newer"
    yield Diagnosis(name="api server", ok=is_supported, text=text, fix=fix)
    if not is_supported:
        return
    answers = [*_permissions(cluster, chosen), namespace(cluster, chosen)]
    answers += [*_nodes(cluster, chosen), *named_objects(cluster, chosen)]
    if chosen.queue is not None:
        answers.append(_queue(cluster, chosen.queue))
    yield from answers
    if chosen.image is None:
        fix = "name one: --launcher kubernetes:image=REGISTRY/paceline:TAG"
        yield Diagnosis(name="image", ok=None, text="no image given; no pods were started", fix=fix)
    elif pods and any(each.ok is False for each in answers):
        # The pods would wait for what is missing.
        yield Diagnosis(name="image", ok=None, text="no pods were started: fix the problems above first")
    elif pods:
        yield from probe_diagnoses(*probe(cluster, chosen, limit_s), chosen)


def missing_rights(cluster: Cluster, wanted: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """Return the rights that this user does not have, as `create jobs.batch`, by one SelfSubjectAccessReview each."""
    missing = []
    for (group, resource), verbs in wanted.items():
        plural, _, sub = resource.partition("/")
        for verb in verbs:
            attributes = {"namespace": cluster.namespace, "group": group, "resource": plural, "verb": verb}
            body = {"spec": {"resourceAttributes": attributes | ({"subresource": sub} if sub else {})}}
            answer = cluster.call("create", "reviews", "AuthorizationV1Api", "create_self_subject_access_review", body)
            if answer.get("status", {}).get("allowed"):
                cluster.rights.confirm(verb, resource)
            else:
                missing.append(f"{verb} {resource}{f'.{group}' if group else ''}")
    return missing


def _permissions(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    try:
        missing = missing_rights(cluster, rights(chosen.kind))
    except LaunchError as trouble:
        yield Diagnosis(name="permissions", ok=None, text=f"could not be checked: {trouble}")
        return
    count = sum(map(len, rights(chosen.kind).values()))
    fix = f"have an administrator run `paceline cluster init --namespace {cluster.namespace} --apply`"
    for right in missing:
        text = f"may not {right} in namespace {cluster.namespace}"
        yield Diagnosis(name="permissions", ok=False, text=text, fix=fix)
    if not missing:
        yield Diagnosis(name="permissions", ok=True, text=f"all {count} verbs in namespace {cluster.namespace}")


def namespace(cluster: Cluster, chosen: Options) -> Diagnosis:
    """Check by a dry run that the namespace exists and accepts a small job. Reading the namespace needs more rights."""
    name, here = "namespace", cluster.namespace
    job = smoke_job(Options(image=chosen.image or "paceline"), here)
    try:
        cluster.call("create", "jobs", "BatchV1Api", "create_namespaced_job", here, job, dry_run="All")
    except NotFound:
        fix = f"run `paceline cluster init --namespace {here} --apply`, or set kubernetes.namespace to another one"
        return Diagnosis(name=name, ok=False, text=f"{here} does not exist", fix=fix)
    except LaunchError as refusal:
        return Diagnosis(name=name, ok=None, text=f"{here}: a job was refused in a dry run: {refusal}")
    return Diagnosis(name=name, ok=True, text=f"{here} accepts jobs")


def _nodes(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    try:
        nodes = cluster.call("list", "nodes", "CoreV1Api", "list_node")["items"]
    except LaunchError:
        text = "may not be listed with these permissions (runs do not need it)"
        yield Diagnosis(name="nodes", ok=None, text=text, fix="to see them here, run this as an administrator")
        return
    able = [node for node in nodes if not node.get("spec", {}).get("unschedulable")]
    ready = [node for node in able if states.condition(node, "Ready")]
    selected = [node for node in ready if (chosen.node_selector or {}).items() <= _labels(node).items()]
    # For each node, the first resource that a pod requests and the whole node does not have.
    needed = {"cpu": chosen.cpu_request, "memory": quantity(chosen.memory_request), chosen.gpu_resource: chosen.gpus}
    capacities = [node["status"].get("allocatable", {}) for node in selected]
    shortages = [
        next((name for name, amount in needed.items() if amount > quantity(str(capacity.get(name, 0)))), None)
        for capacity in capacities
    ]
    fix = None
    if not selected:
        fix = "no ready node has the labels of kubernetes.node_selector; see `kubectl get nodes --show-labels`"
    elif None not in shortages:
        lacking = " and ".join(sorted({lack for lack in shortages if lack}))
        fix = f"no node has enough {lacking}: request less (kubernetes.cpu_request, memory_request, gpus)"
    text = f"{len(ready)} of {len(nodes)} ready, {shortages.count(None)} of them large enough for a pod"
    yield Diagnosis(name="nodes", ok=fix is None, text=text, fix=fix)
    if not chosen.gpus and not any(_gpus(node, chosen) for node in nodes):
        return
    total = sum(_gpus(node, chosen) for node in selected)
    text = f"{total} {chosen.gpu_resource} on {sum(_gpus(node, chosen) > 0 for node in selected)} nodes"
    for prefix, key in (("", _PRODUCT), ("driver ", _DRIVER)):
        if values := {label for node in selected if (label := _labels(node).get(key))}:
            text += f"; {prefix}{', '.join(sorted(values))}"
    fix = None
    if chosen.gpus and not total:
        fix = f"install the device plugin or the GPU operator: no node offers {chosen.gpu_resource}"
    yield Diagnosis(name="gpus", ok=fix is None, text=text, fix=fix)


def named_objects(cluster: Cluster, chosen: Options) -> Iterator[Diagnosis]:
    """Check the objects that the options name and somebody else must have created."""
    here = cluster.namespace
    objects: list[tuple[str, str | None, tuple[Any, ...]]] = [
        ("claim", chosen.results_claim, ("CoreV1Api", "read_namespaced_persistent_volume_claim", here)),
        ("priority class", chosen.priority_class, ("SchedulingV1Api", "read_priority_class")),
        ("service account", chosen.service_account, ("CoreV1Api", "read_namespaced_service_account", here)),
    ]
    for kind, name, (api, method, *where) in objects:
        if name is not None:
            yield _existence(cluster, kind, name, (api, method, name, *where))


def _queue(cluster: Cluster, name: str) -> Diagnosis:
    """Whether the LocalQueue exists, by the newest version of Kueue's API that the cluster serves."""
    group = "kueue.x-k8s.io"
    for version in QUEUE_VERSIONS:
        try:
            cluster.call("get", "resources", "CustomObjectsApi", "get_api_resources", group, version)
        except NotFound:
            continue
        except LaunchError:
            break
        where = (group, version, cluster.namespace, "localqueues", name)
        return _existence(cluster, "queue", name, ("CustomObjectsApi", "get_namespaced_custom_object", *where))
    fix = "install Kueue, or leave `queue` out"
    return Diagnosis(
        name="queue", ok=False, text=f"{name} cannot be found: the cluster does not serve {group}", fix=fix
    )


def _existence(cluster: Cluster, kind: str, name: str, call: tuple[Any, ...]) -> Diagnosis:
    try:
        cluster.call("get", kind, *call)
    except NotFound:
        return Diagnosis(name=kind, ok=False, text=f"{name} does not exist", fix=f"create it, or name another {kind}")
    except LaunchError:
        return Diagnosis(name=kind, ok=None, text=f"{name} may not be read with these permissions")
    return Diagnosis(name=kind, ok=True, text=f"{name} exists")


def _labels(node: Object) -> dict[str, str]:
    return dict(node["metadata"].get("labels") or {})


def _gpus(node: Object, chosen: Options) -> int:
    return int(node["status"].get("allocatable", {}).get(chosen.gpu_resource, 0))


# --- two short pods ---

PODS = 2
POLL_S = 0.5
LINGER_S = 3.0
MARK = "@paceline-probe "
_JOB = RESOURCES["job"]
# Runs in the image, whatever its version, so it only imports what every version has. DNS may need a moment to know a
# new name, so the lookup is retried.
_SCRIPT = """
import json, os, socket, sys, time
found = {"index": os.environ["JOB_COMPLETION_INDEX"], "node": os.environ.get("PACELINE_NODE")}
try:
    import paceline
    found["version"] = paceline.__version__
except ImportError as error:
    found["import_error"] = str(error)
room = os.statvfs("/dev/shm")
found["shm_bytes"], found["user"] = room.f_frsize * room.f_blocks, os.getuid()
job, end = os.environ["JOB"], time.monotonic() + 30
name = f"{job}-{1 - int(found['index'])}.{job}"
while "peer" not in found and time.monotonic() < end:
    try:
        found["peer"] = socket.getaddrinfo(name, 1)[0][4][0]
    except OSError as error:
        found["name_error"] = str(error)
        time.sleep(0.2)
if os.environ.get("GPUS"):
    from paceline.host import machine
    found["gpus"] = machine.device_count()
print("@paceline-probe " + json.dumps(found), flush=True)
# The other pod may still look up this pod's name, which disappears with it.
time.sleep(float(os.environ["LINGER_S"]))
"""


def probe(cluster: Cluster, chosen: Options, limit_s: float) -> tuple[list[Object], str | None]:
    """Start two pods and remove everything. Returns the reports of the pods, and why some are missing."""
    name = f"paceline-probe-{secrets.token_hex(4)}"
    try:
        job = cluster.create(_JOB, _probe_job(chosen, name, limit_s))
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": name},
            },
        }
        cluster.create_service(service)
        trouble = _await_end(cluster, name, limit_s)
        reports = {}
        for pod in filter(states.has_started, cluster.pods(f"{RUN_LABEL}={name}")):
            text = b"".join(cluster.log(pod["metadata"]["name"], CONTAINER, follow=False)).decode(errors="replace")
            for line in text.splitlines():
                if line.startswith(MARK):
                    report = json.loads(line.removeprefix(MARK))
                    reports[int(report["index"])] = report
        return [reports[index] for index in sorted(reports)], trouble
    except LaunchError as refusal:
        return [], str(refusal)
    finally:
        with contextlib.suppress(LaunchError):
            cluster.delete(_JOB, name)
            cluster.delete_service(name)


def _probe_job(chosen: Options, name: str, limit_s: float) -> dict[str, Any]:
    pod = reader(chosen, name)
    labels = {**pod["metadata"]["labels"], RUN_LABEL: name}
    container = pod["spec"]["containers"][0]
    container["command"] = [chosen.python, "-c", _SCRIPT.replace("$", "$$")]
    container["env"] += [
        {"name": "PACELINE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "JOB", "value": name},
        {"name": "LINGER_S", "value": f"{LINGER_S:g}"},
    ]
    # The pod's memory limit also caps /dev/shm, so it must be that of a run.
    container["resources"]["limits"]["memory"] = chosen.memory_limit
    container["resources"]["requests"]["memory"] = min(SMALL, chosen.memory_request, key=quantity)
    if chosen.gpus:
        container["env"].append({"name": "GPUS", "value": "1"})
        container["resources"]["limits"] |= {chosen.gpu_resource: "1"}
    pod["spec"] |= {"subdomain": name, "terminationGracePeriodSeconds": 1}
    spec = {
        "completionMode": "Indexed",
        "completions": PODS,
        "parallelism": PODS,
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(limit_s) + 60,
        "ttlSecondsAfterFinished": 60,
        "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _await_end(cluster: Cluster, name: str, limit_s: float) -> str | None:
    """Return None when all pods have ended, otherwise the cluster's reason why they have not."""
    deadline, waiting = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        job, pods = cluster.read(_JOB, name), cluster.pods(f"{RUN_LABEL}={name}")
        snapshot = states.Snapshot(main=job, job=job, pods=pods, nodes=PODS, name=name)
        state = states.state_of(snapshot)
        if not state.running:
            return state.reason or (None if state.exit_code == 0 else f"it ended with exit code {state.exit_code}")
        waiting = state.waiting
        if states.is_stuck(snapshot):
            break
        time.sleep(POLL_S)
    return waiting or f"the probe did not end within {limit_s:g} s"


def probe_diagnoses(reports: Sequence[Object], trouble: str | None, chosen: Options) -> Iterator[Diagnosis]:
    """Yield what the pods report about the image, DNS, shared memory and GPUs."""
    if not reports:
        fix = "see `kubectl get events`; check the image's name and whether the cluster may pull it"
        yield Diagnosis(name="image", ok=False, text=f"{chosen.image}: {trouble}", fix=fix)
        return
    versions = sorted({str(report.get("version")) for report in reports})
    if versions == ["None"]:
        why = next(report.get("import_error", "unknown") for report in reports)
        text, fix = f"{chosen.image} does not contain Paceline ({why})", "build one with `paceline image build`"
    else:
        text = f"{chosen.image} contains Paceline {', '.join(versions)}"
        fix = f"use an image with Paceline {__version__}: results of two versions are not compared"
    is_same = versions == [__version__]
    yield Diagnosis(name="image", ok=is_same, text=text, fix=None if is_same else fix)
    errors = [report.get("name_error", "no answer") for report in reports if "peer" not in report]
    if errors or len(reports) < PODS:
        fix = "check CoreDNS (`kubectl -n kube-system get pods`) and NetworkPolicies that block port 53"
        count = f"{len(reports)} of {PODS} pods answered" + (f" ({trouble})" if trouble else "")
        text = f"pods do not find each other: {errors[0] if errors else count}"
        yield Diagnosis(name="names", ok=False, text=text, fix=fix)
    else:
        yield Diagnosis(name="names", ok=True, text="pods find each other by name")
    smallest, wanted = min(int(report["shm_bytes"]) for report in reports), quantity(chosen.shm)
    shm_fix = None if smallest >= 0.99 * wanted else _SHM_FIX
    text = f"/dev/shm has {smallest / GIB:.2f} GiB of {wanted / GIB:.2f} GiB requested"
    yield Diagnosis(name="shared memory", ok=shm_fix is None, text=text, fix=shm_fix)
    if chosen.gpus:
        seen = min(report.get("gpus", 0) for report in reports)
        gpu_fix = None if seen else "the pod has a GPU assigned but sees none: check driver and container toolkit"
        yield Diagnosis(name="gpus in pods", ok=gpu_fix is None, text=f"{seen} of 1 requested", fix=gpu_fix)
