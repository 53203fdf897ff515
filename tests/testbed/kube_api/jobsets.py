"""The controllers of JobSet and of Kubeflow's TrainJob, as far as one group of equal pods needs them."""

from __future__ import annotations

import copy

from testbed.kube_api.admission import check_jobset_names, give_job_defaults
from testbed.kube_api.jobs import condition, set_condition
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import BY_PLURAL, JOB_SETS, JOBS, SERVICES, TRAIN_JOBS, Object
from testbed.kube_api.state import State, owner_reference

_PREFIX = "jobset.sigs.k8s.io"
TRAINER_PORT = "29500"


class JobSetController:
    """One Job per replica, a headless service for all, an end when all are complete or one has failed."""

    def __init__(self, state: State) -> None:
        self._state = state

    def sync(self) -> None:
        for jobset in self._state.list(JOB_SETS):
            if jobset["metadata"].get("deletionTimestamp") or jobset.get("status", {}).get("terminalState"):
                continue
            self._serve(jobset)
            jobs = [self._job(jobset, group, number) for group, number in _replicas(jobset)]
            self._conclude(jobset, jobs)

    def _serve(self, jobset: Object) -> None:
        network, meta = jobset["spec"].get("network") or {}, jobset["metadata"]
        name = network.get("subdomain") or meta["name"]
        if network.get("enableDNSHostnames", True) and not self._state.find(SERVICES, meta["namespace"], name):
            spec = {
                "clusterIP": "None",
                "selector": {f"{_PREFIX}/jobset-name": meta["name"]},
                "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
            }
            about = {"name": name, "ownerReferences": [owner_reference(jobset)]}
            self._state.create(SERVICES, meta["namespace"], {"metadata": about, "spec": spec})

    def _job(self, jobset: Object, group: Object, number: int) -> Object:
        meta = jobset["metadata"]
        name = f"{meta['name']}-{group['name']}-{number}"
        found = self._state.find(JOBS, meta["namespace"], name)
        if found is not None:
            return found
        marks = {
            f"{_PREFIX}/jobset-name": meta["name"],
            f"{_PREFIX}/replicatedjob-name": group["name"],
            f"{_PREFIX}/job-index": str(number),
        }
        spec = copy.deepcopy(group["template"]["spec"])
        # A job of a set is indexed unless it says otherwise.
        spec.setdefault("completionMode", "Indexed")
        spec["suspend"] = bool(jobset["spec"].get("suspend"))
        inner = spec["template"].setdefault("metadata", {})
        inner["labels"] = {**(inner.get("labels") or {}), **marks}
        spec["template"]["spec"].setdefault(
            "subdomain", (jobset["spec"].get("network") or {}).get("subdomain") or meta["name"]
        )
        outer = group["template"].get("metadata") or {}
        about = {"name": name, "labels": {**(outer.get("labels") or {}), **marks}}
        about["ownerReferences"] = [owner_reference(jobset)]
        created = self._state.create(JOBS, meta["namespace"], {"metadata": about, "spec": spec})
        return self._state.modify(JOBS, created, give_job_defaults) or created

    def _conclude(self, jobset: Object, jobs: list[Object]) -> None:
        failed = [j for j in jobs if condition(j, "Failed")]
        if failed and (jobset["spec"].get("failurePolicy") or {}).get("maxRestarts"):
            raise NotImplementedError("this double restarts no JobSet: use maxRestarts 0")
        suspended = bool(jobset["spec"].get("suspend"))
        for job in jobs:
            if bool(job["spec"]["suspend"]) != suspended:
                self._state.modify(JOBS, job, lambda j: j["spec"].update(suspend=suspended))

        def end(each: Object) -> None:
            status = each.setdefault("status", {})
            if failed:
                # A set with a failure policy has used up its restarts; one without has failed jobs.
                why = (
                    ("ReachedMaxRestarts", "reaching max number of restarts")
                    if jobset["spec"].get("failurePolicy")
                    else ("FailedJobs", "one or more job failures")
                )
                message = f"jobset failed due to {why[1]} (first failed job: {failed[0]['metadata']['name']})"
                set_condition(each, "Failed", why[0], message)
                status["terminalState"] = "Failed"
            elif all(condition(j, "Complete") for j in jobs):
                set_condition(each, "Completed", "AllJobsCompleted", "jobset completed successfully")
                status["terminalState"] = "Completed"

        self._state.modify(JOB_SETS, jobset, end)


def _replicas(jobset: Object) -> list[tuple[Object, int]]:
    groups = jobset["spec"]["replicatedJobs"]
    return [(group, number) for group in groups for number in range(group.get("replicas", 1))]


class TrainJobController:
    """A JobSet by the runtime's template, with the trainer's command and torchrun's variables."""

    def __init__(self, state: State) -> None:
        self._state = state

    def sync(self) -> None:
        for job in self._state.list(TRAIN_JOBS):
            meta = job["metadata"]
            ended = condition(job, "Complete") or condition(job, "Failed")
            if meta.get("deletionTimestamp") or ended:
                continue
            found = self._state.find(JOB_SETS, meta["namespace"], meta["name"])
            if found is None:
                self._start(job)
            else:
                self._conclude(job, found)

    def _start(self, job: Object) -> None:
        meta, reference = job["metadata"], job["spec"]["runtimeRef"]
        plural = (
            "clustertrainingruntimes"
            if reference.get("kind", "ClusterTrainingRuntime") != "TrainingRuntime"
            else "trainingruntimes"
        )
        where = meta["namespace"] if plural == "trainingruntimes" else ""
        runtime = self._state.find(BY_PLURAL[plural], where, reference["name"])
        if runtime is None:
            why = ("TrainingRuntimeNotSupported", f'runtime "{reference["name"]}" not found')
            self._state.modify(TRAIN_JOBS, job, lambda j: set_condition(_with_status(j), "Failed", *why))
            return
        spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
        policy = runtime["spec"].get("mlPolicy") or {}
        trainer = job["spec"].get("trainer") or {}
        nodes = trainer.get("numNodes") or policy.get("numNodes") or 1
        for group in spec["replicatedJobs"]:
            if group["name"] == "node":
                _train(group["template"]["spec"], meta["name"], nodes, trainer, policy)
        spec["suspend"] = bool(job["spec"].get("suspend"))
        about = {"name": meta["name"], "ownerReferences": [owner_reference(job)], "labels": meta.get("labels") or {}}
        try:
            check_jobset_names(meta["name"], spec)
        except Refusal as refusal:
            # The real controller tries again for ever; a test need not wait for that.
            said = ("JobsCreationFailed", str(refusal))
            self._state.modify(TRAIN_JOBS, job, lambda j: set_condition(_with_status(j), "Failed", *said))
            return
        self._state.create(JOB_SETS, meta["namespace"], {"metadata": about, "spec": spec})

    def _conclude(self, job: Object, jobset: Object) -> None:
        suspended = bool(job["spec"].get("suspend"))
        if bool(jobset["spec"].get("suspend")) != suspended:
            self._state.modify(JOB_SETS, jobset, lambda j: j["spec"].update(suspend=suspended))
        ended = {"Completed": "Complete", "Failed": "Failed"}.get(jobset.get("status", {}).get("terminalState", ""))
        if ended:
            why = condition(jobset, jobset["status"]["terminalState"]) or {"reason": "", "message": ""}
            said = (ended, why["reason"], why["message"])
            self._state.modify(TRAIN_JOBS, job, lambda j: set_condition(_with_status(j), *said))


def _with_status(obj: Object) -> Object:
    obj.setdefault("status", {})
    return obj


def _train(spec: Object, name: str, nodes: int, trainer: Object, policy: Object) -> None:
    """Put the trainer's wishes and torchrun's variables into the Job of the nodes."""
    spec |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    per_node = trainer.get("numProcPerNode") or (policy.get("torch") or {}).get("numProcPerNode") or "auto"
    variables = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": TRAINER_PORT},
    ]
    for container in spec["template"]["spec"]["containers"]:
        if container["name"] == "node":
            for key in ("image", "command", "args"):
                if key in trainer:
                    container[key] = trainer[key]
            if "resourcesPerNode" in trainer:
                container["resources"] = trainer["resourcesPerNode"]
            own = [*(container.get("env") or []), *(trainer.get("env") or [])]
            container["env"] = own + (variables if "torch" in policy else [])
