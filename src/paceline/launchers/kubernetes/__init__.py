"""Kubernetes: one Indexed Job, JobSet or TrainJob per run; results come back through the pod logs.

Everything that a run creates is removed after it, when its files are in the run directory. If the controller dies, the
job ends by its own deadline and is removed after its time to live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState, may_be_lost
from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer, parse_options
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import job_name
from paceline.launchers.kubernetes import cluster as cluster_checks
from paceline.launchers.kubernetes import run
from paceline.launchers.kubernetes.client import Cluster
from paceline.launchers.kubernetes.manifests import RESOURCES, directory_id, job_manifests, reader_manifest
from paceline.launchers.kubernetes.options import Options
from paceline.results import attempts

# Options on which no measured number depends, each with what it decides.
UNMEASURED = {
    "image_pull_secrets": "who may pull the image, not which one it is",
    "priority_class": "when pods start, and which pods they may displace",
    "service_account": "permissions, none of which the pods use",
    "port": "where ranks rendezvous before they choose their own ports",
}
_runs: dict[tuple[str, str], run.Run] = {}


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    accepted = "the name of an image that contains Paceline, such as registry.example/paceline:1.0"
    require(chosen.image is not None, "kubernetes.image", chosen.image, accepted)
    count, gpus = spec.topology.processes_per_node, chosen.gpus
    if spec.topology.device == "cuda" and count > gpus:
        return f"{count} processes per node need {count} GPUs; pods have {gpus or 'none'} (kubernetes.gpus)"
    if spec.topology.device == "cpu" and gpus:
        return f"kubernetes.gpus is {gpus}, but the ranks run on cpu: set it to 0, or set device: cuda"
    if spec.max_restarts and not chosen.results_claim:
        return "max_restarts needs checkpoints that outlive the pods: set kubernetes.results_claim"
    return None


def offer(choice: Choice) -> Offer:
    """One rank per GPU of a pod, or one on its CPUs."""
    chosen = parse_options(Options, choice)
    return Offer(device="cuda" if chosen.gpus else "cpu", processes=chosen.gpus or 1)


def preflight(specs: Sequence[RunSpec]) -> None:
    cluster_checks.preflight(parse_options(Options, specs[0].launcher))


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    import yaml

    chosen, name = parse_options(Options, spec.launcher), job_name(spec, run_dir)
    attempt = str(len(attempts.ended(run_dir)) + 1)
    made = job_manifests(spec, chosen, name, run_dir, attempt)
    text = yaml.safe_dump_all(made, sort_keys=False, explicit_start=True, width=float("inf"))
    context = ("--context", chosen.context) if chosen.context else ()
    settings = {
        "kind": chosen.kind,
        "name": name,
        "attempt": attempt,
        "namespace": chosen.namespace,
        "context": chosen.context,
        "patience_s": chosen.patience_s,
        "pending_s": chosen.pending_s,
        "nodes": spec.topology.nodes,
        "ranks": spec.topology.processes_per_node,
        "may_be_lost": list(may_be_lost(spec)),
        "run_dir": str(run_dir.absolute()),
        "directory": directory_id(run_dir),
        "manifests": made,
        "reader": reader_manifest(chosen, name) if chosen.results_claim else None,
    }
    argv = ("kubectl", *context, "apply", "-f", "-")
    return Job(argv=argv, files={"manifests.yaml": text}, name=name, settings=settings)


def submit(job: Job) -> Mapping[str, Any]:
    cluster = _connect(job.settings)
    run.remove_earlier(cluster, job.settings)
    run.submit(cluster, list(job.settings["manifests"]), job.settings["name"], job.settings["kind"])
    return _handle(job.settings, cluster)


def adopt(job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a handle for the job that an earlier controller submitted, or None if it is gone."""
    # The stored handle has precedence: a controller elsewhere may have given the same run another name.
    settings = {**job.settings, **(handle or {}), "run_dir": job.settings["run_dir"]}
    cluster, name = _connect(settings), settings["name"]
    if handle is not None:
        # The earlier controller had these rights. The API server may be starting now, see `client.FORBIDDEN_S`.
        for (_, plural), verbs in cluster_checks.essential(settings["kind"]).items():
            cluster.rights.worked |= {(verb, plural) for verb in verbs}
    known = cluster.read(RESOURCES[settings["kind"]], name)
    if known is None or known["metadata"].get("deletionTimestamp"):
        return None
    if not run.is_ours(known, name) or not run.is_of_attempt(known, settings["attempt"]):
        return None
    for manifest in job.settings["manifests"]:
        if manifest["kind"] == "Service" and manifest["metadata"]["name"] == name:
            run.create_service(cluster, manifest, known)
    return _handle(settings, cluster)


def poll(handle: Mapping[str, Any]) -> JobState:
    return _run_of(handle).poll()


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    return _run_of(handle).collect(run_dir)


def cancel(handle: Mapping[str, Any]) -> bool:
    """Remove the job. Returns whether it and all its pods are gone."""
    is_gone = _run_of(handle).remove()
    _runs.pop((handle["namespace"], handle["name"]), None)
    return is_gone


def _handle(settings: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key != "manifests"}
    return {**kept, "namespace": cluster.namespace}


def _connect(settings: Mapping[str, Any]) -> Cluster:
    return Cluster.reach(settings["context"], settings["namespace"], float(settings["patience_s"]))


def _run_of(handle: Mapping[str, Any]) -> run.Run:
    """Return the Run of a handle; create it if another process submitted the job."""
    key = (handle["namespace"], handle["name"])
    if key not in _runs:
        cluster = _connect(handle)
        _runs[key] = run.Run(handle, cluster, run.Logs(cluster, Path(handle["run_dir"])))
    return _runs[key]
