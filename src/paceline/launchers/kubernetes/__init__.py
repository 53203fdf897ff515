"""Pods of a Kubernetes cluster: one Indexed Job, JobSet or TrainJob per run, results through the logs.

What is created for a run is removed after it; what was measured is in the run folder by then. Without a controller a
job ends by its own deadline, and is removed after its time to live.
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
from paceline.launchers._start import job_name
from paceline.launchers.kubernetes import run
from paceline.launchers.kubernetes.client import Cluster
from paceline.launchers.kubernetes.logs import Logs
from paceline.launchers.kubernetes.manifests import RESOURCES, job_manifests, reader_manifest
from paceline.launchers.kubernetes.options import Options
from paceline.launchers.kubernetes.readiness import refuse
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
    accepted = "the name of an image that holds Paceline, such as registry.example/paceline:1.0"
    require(chosen.image is not None, "kubernetes.image", chosen.image, accepted)
    count, gpus = spec.topology.processes_per_node, chosen.gpus
    if spec.topology.device == "cuda" and count > gpus:
        return f"{count} processes per node need as many GPUs; pods have {gpus or 'none'} (kubernetes.gpus)"
    if spec.topology.device == "cpu" and gpus:
        return f"pods with {gpus} GPUs were asked for ranks on cpu; leave kubernetes.gpus at 0, or say device: cuda"
    if spec.max_restarts and not chosen.results_claim:
        return "max_restarts needs checkpoints that outlive their pods: name a claim under kubernetes.results_claim"
    return None


def offer(choice: Choice) -> Offer:
    """A rank per GPU of a pod, or one on its CPUs."""
    chosen = parse_options(Options, choice)
    return Offer(device="cuda" if chosen.gpus else "cpu", processes=chosen.gpus or 1)


def preflight(specs: Sequence[RunSpec]) -> None:
    refuse(parse_options(Options, specs[0].launcher))


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
        "manifests": made,
        "reader": reader_manifest(chosen, name) if chosen.results_claim else None,
    }
    return Job(
        argv=("kubectl", *context, "apply", "-f", "-"), files={"manifests.yaml": text}, name=name, settings=settings
    )


def submit(job: Job) -> Mapping[str, Any]:
    cluster = _reach(job.settings)
    run.submit(cluster, list(job.settings["manifests"]), job.settings["name"], job.settings["kind"])
    return _handle(job.settings, cluster)


def adopt(job: Job, handle: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The job of this run, wherever an earlier controller was when it died; none when it is gone."""
    # What was written down counts: the same run may be named otherwise by a controller elsewhere.
    about = {**job.settings, **(handle or {}), "run_dir": job.settings["run_dir"]}
    cluster, name = _reach(about), about["name"]
    known = cluster.read(RESOURCES[about["kind"]], name)
    if known is None or known["metadata"].get("deletionTimestamp"):
        return None
    if not run.is_ours(known, name) or not run.is_of_attempt(known, about["attempt"]):
        return None
    for manifest in job.settings["manifests"]:
        if manifest["kind"] == "Service" and manifest["metadata"]["name"] == name:
            run.create_service(cluster, manifest, known)
    return _handle(about, cluster)


def poll(handle: Mapping[str, Any]) -> JobState:
    return _run_of(handle).poll()


def collect(handle: Mapping[str, Any], run_dir: Path) -> str | None:
    return _run_of(handle).collect(run_dir)


def cancel(handle: Mapping[str, Any]) -> bool:
    """Whether the job is gone, and all its pods."""
    is_gone = _run_of(handle).remove()
    _runs.pop((handle["namespace"], handle["name"]), None)
    return is_gone


def _handle(settings: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key != "manifests"}
    return {**kept, "namespace": cluster.namespace}


def _reach(settings: Mapping[str, Any]) -> Cluster:
    return Cluster.reach(settings["context"], settings["namespace"], float(settings["patience_s"]))


def _run_of(handle: Mapping[str, Any]) -> run.Run:
    """What this process knows of a run; one that another process has submitted is met anew."""
    key = (handle["namespace"], handle["name"])
    if key not in _runs:
        cluster = _reach(handle)
        _runs[key] = run.Run(handle, cluster, Logs(cluster, Path(handle["run_dir"])))
    return _runs[key]
