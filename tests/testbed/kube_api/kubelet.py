"""The kubelets of all nodes: they pull, start, watch, end and report the containers of the pods bound to them."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from testbed.kube_api import names, sandbox
from testbed.kube_api.jobs import is_finished, set_condition
from testbed.kube_api.logs import ROTATED_AT, ContainerLog
from testbed.kube_api.resources import NODES, PODS, Object
from testbed.kube_api.scheduler import quantity
from testbed.kube_api.state import State, now
from testbed.kube_api.variables import ConfigError, environment, expand

# Where a container finds no memory disk of its own: what container runtimes give.
DEFAULT_SHM = 64 * 2**20
DEAD = ("Succeeded", "Failed")


@dataclass(slots=True)
class Image:
    """What every container starts from. programs: paths in the image -> paths of this host. kept: see sandbox."""

    env: dict[str, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)
    kept: tuple[Path, ...] = ()


@dataclass(slots=True)
class Running:
    """One container of a pod on its node."""

    process: subprocess.Popen[bytes]
    log: ContainerLog
    started_at: str
    pump: threading.Thread
    restarts: int = 0
    is_oom: bool = False
    asked_at: float | None = None


class Kubelet:
    def __init__(self, state: State, folder: Path, image: Image, rotated_at: int = ROTATED_AT) -> None:
        self._state, self._folder, self._image = state, folder, image
        self.rotated_at = rotated_at
        self.start_delay_s = 0.0
        self.clock_offset_s: dict[str, float] = {}
        self.missing_images: set[str] = set()
        # Nodes that nobody hears of any more: what runs there is gone, what is written about it stays.
        self.silent: set[str] = set()
        self._reporting = threading.Lock()
        # Which lines of a pod's log are lost, where a test wants some to be: as a full disk or a fast rotation does.
        self.lossy: Callable[[Object], re.Pattern[bytes] | None] = lambda pod: None
        self.containers: dict[str, dict[str, Running]] = {}
        self._namespaces: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        self._named_at = 0
        self._network, self._addresses = secrets.randbelow(200) + 20, itertools.count(2)

    def sync(self) -> None:
        pods = {p["metadata"]["uid"]: p for p in self._state.list(PODS)}
        for uid in [uid for uid in self.containers if uid not in pods]:
            self._forget(uid)
        nodes = {n["metadata"]["name"] for n in self._state.list(NODES)}
        if self._state.version != self._named_at:
            self._named_at = self._state.version
            self._write_names([p for p in pods.values() if p["metadata"]["uid"] in self.containers])
        for pod in pods.values():
            with self._reporting:
                # A node may have fallen silent since this round began.
                if pod["spec"].get("nodeName") in nodes - self.silent:
                    self._see_to(pod)

    def _see_to(self, pod: Object) -> None:
        if pod["metadata"].get("deletionTimestamp"):
            self._terminate(pod)
        elif pod["metadata"]["uid"] in self.containers:
            self._report(pod)
        elif not is_finished(pod):
            self._begin(pod)

    def silence(self, node: str) -> None:
        """The node stops responding: nobody reports how its containers end."""
        with self._reporting:
            self.silent.add(node)

    def _begin(self, pod: Object) -> None:
        """Address, image, volumes, environment; what is wrong is said as a waiting state and an event."""
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        if uid not in self._seen:
            self._seen[uid] = time.monotonic()
            number = next(self._addresses)
            address = f"127.{self._network}.{number // 250}.{number % 250 + 2}"
            self._state.modify(
                PODS, pod, lambda p: p["status"].update(podIP=address, hostIP="127.0.0.1", startTime=now())
            )
            self._wait(pod, "ContainerCreating", None)
            return
        if time.monotonic() - self._seen[uid] < self.start_delay_s:
            return
        missing = next((c["image"] for c in spec["containers"] if c["image"] in self.missing_images), None)
        if missing is not None:
            self._fail_pull(pod, missing)
            return
        try:
            started = {c["name"]: self._start(pod, c) for c in spec["containers"]}
        except ConfigError as error:
            self._wait(pod, "CreateContainerConfigError", str(error))
            self._state.event(pod, "Warning", "Failed", f"Error: {error}", "kubelet")
            return
        self.containers[uid] = started
        for container in spec["containers"]:
            said = f'Container image "{container["image"]}" already present on machine'
            self._state.event(pod, "Normal", "Pulled", said, "kubelet")
            self._state.event(pod, "Normal", "Started", f"Started container {container['name']}", "kubelet")
        self._report(pod)

    def _fail_pull(self, pod: Object, image: str) -> None:
        why = f'failed to pull and unpack image "{image}": failed to resolve reference "{image}": {image}: not found'
        again = "ErrImagePull" in str(pod["status"].get("containerStatuses"))
        if again:
            self._wait(pod, "ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {why}')
            self._state.event(pod, "Normal", "BackOff", f'Back-off pulling image "{image}"', "kubelet")
            self._state.event(pod, "Warning", "Failed", "Error: ImagePullBackOff", "kubelet")
        elif "ImagePullBackOff" not in str(pod["status"].get("containerStatuses")):
            self._state.event(pod, "Normal", "Pulling", f'Pulling image "{image}"', "kubelet")
            text = f'Failed to pull image "{image}": rpc error: code = NotFound desc = {why}'
            self._state.event(pod, "Warning", "Failed", text, "kubelet")
            self._state.event(pod, "Warning", "Failed", "Error: ErrImagePull", "kubelet")
            self._wait(pod, "ErrImagePull", why)

    def _wait(self, pod: Object, reason: str, message: str | None) -> None:
        waiting = {"reason": reason} | ({"message": message} if message else {})
        statuses = [_status(c, {"waiting": waiting}, 0, ready=False) for c in pod["spec"]["containers"]]
        self._state.modify(PODS, pod, lambda p: p["status"].update(containerStatuses=statuses))

    def _start(self, pod: Object, container: Object, restarts: int = 0) -> Running:
        fresh = self._state.get(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        node = pod["spec"]["nodeName"]
        env = {**self._image.env, "HOSTNAME": names.hostname(pod), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        if node in self.clock_offset_s:
            env["CLOCK_OFFSET_S"] = str(self.clock_offset_s[node])
        env |= environment(self._state, fresh, container, node)
        words = [expand(w, env) for w in [*(container.get("command") or []), *(container.get("args") or [])]]
        if not words:
            raise ConfigError("the image of the double has no entrypoint: give a command")
        mounts, memory = self._volumes(pod, container)
        folder = self._folder_of(pod)
        hosts = folder / "hosts"
        hosts.write_text(names.hosts_text(fresh, names.records(self._state)))
        process = sandbox.start(
            sandbox.Container(
                argv=[self._image.programs.get(words[0], words[0]), *words[1:]],
                env=env,
                hostname=names.hostname(pod),
                root=folder / f"root-{container['name']}",
                hosts=hosts,
                mounts=mounts,
                memory=memory,
                kept=self._image.kept,
                workdir=container.get("workingDir") or "/",
            )
        )
        log = ContainerLog(rotated_at=self.rotated_at, lost=self.lossy(pod))
        assert process.stdout is not None
        pump = threading.Thread(target=log.pump, args=(process.stdout,), daemon=True)
        pump.start()
        return Running(process, log, now(), pump, restarts)

    def _folder_of(self, pod: Object) -> Path:
        folder = self._folder / "pods" / str(pod["metadata"]["uid"])
        self._namespaces[folder.name] = pod["metadata"]["namespace"]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _volumes(self, pod: Object, container: Object) -> tuple[dict[str, Path], dict[str, int]]:
        volumes = {v["name"]: v for v in pod["spec"].get("volumes") or []}
        mounts: dict[str, Path] = {}
        memory = {"/dev/shm": DEFAULT_SHM}
        for mount in container.get("volumeMounts") or []:
            volume, path = volumes[mount["name"]], mount["mountPath"].rstrip("/")
            claim = volume.get("persistentVolumeClaim")
            empty = volume.get("emptyDir")
            if empty is not None and empty.get("medium") == "Memory":
                memory[path] = int(min(quantity(empty.get("sizeLimit") or "1Gi"), memory_limit(pod)))
                continue
            if claim is None and empty is None:
                raise ConfigError(f"the double mounts emptyDir and claims only, not {sorted(volume)}")
            source = self._folder_of(pod) / "volumes" / mount["name"]
            if claim is not None:
                source = self.claim_folder(pod["metadata"]["namespace"], claim["claimName"])
            source = source / mount.get("subPath", "")
            source.mkdir(parents=True, exist_ok=True)
            mounts[path] = source
        return mounts, {path: size for path, size in memory.items() if path not in mounts}

    def claim_folder(self, namespace: str, claim: str) -> Path:
        """What is on a PersistentVolumeClaim; it outlives its pods."""
        return self._folder / "claims" / namespace / claim

    def _report(self, pod: Object) -> None:
        running, statuses = self.containers[pod["metadata"]["uid"]], []
        for container in pod["spec"]["containers"]:
            each = running[container["name"]]
            code = sandbox.exit_code(each.process)
            if code is None:
                state: Object = {"running": {"startedAt": each.started_at}}
            else:
                each.pump.join(2.0)
                state = {"terminated": _ended(each, code)}
                if _restarts(pod, code) and not pod["metadata"].get("deletionTimestamp"):
                    each = running[container["name"]] = self._start(pod, container, each.restarts + 1)
                    code, state = None, {"running": {"startedAt": each.started_at}}
            statuses.append(_status(container, state, each.restarts, ready=code is None))
        self._write(pod, statuses)

    def _write(self, pod: Object, statuses: list[Object]) -> None:
        ends = [s["state"].get("terminated") for s in statuses]

        def change(each: Object) -> None:
            status = each["status"]
            if status.get("phase") in DEAD:
                return
            status["containerStatuses"] = [_unchanged_end(s, status) for s in statuses]
            if all(ends):
                failed = any(e["exitCode"] for e in ends if e)
                status["phase"] = "Failed" if failed else "Succeeded"
            else:
                status["phase"] = "Running"
            ready = "False" if all(ends) else "True"
            set_condition(each, "Ready", "" if ready == "True" else "PodCompleted", "", status=ready)

        self._state.modify(PODS, pod, change)

    def _terminate(self, pod: Object) -> None:
        """SIGTERM, the grace period, SIGKILL; then the final phase, then the pod goes."""
        uid, meta = pod["metadata"]["uid"], pod["metadata"]
        for each in self.containers.get(uid, {}).values():
            if each.process.poll() is not None:
                continue
            if each.asked_at is None:
                each.asked_at = time.monotonic()
                self._state.event(pod, "Normal", "Killing", "Stopping container", "kubelet")
                sandbox.ask_to_end(each.process)
            elif time.monotonic() - each.asked_at > meta.get("deletionGracePeriodSeconds", 30):
                sandbox.end_now(each.process)
            return
        if uid in self.containers and not is_finished(pod):
            self._report(pod)
        elif not is_finished(pod):
            self._state.modify(PODS, pod, lambda p: p["status"].update(phase="Failed"))
        self._state.remove(PODS, pod)

    def _forget(self, uid: str) -> None:
        for each in self.containers.pop(uid, {}).values():
            if each.process.poll() is None:
                sandbox.end_now(each.process)
            each.process.wait()
            each.pump.join(2.0)
        shutil.rmtree(self._folder / "pods" / uid, ignore_errors=True)

    def _write_names(self, pods: list[Object]) -> None:
        """The hosts files stay the same files: they are mounted into containers."""
        known = names.records(self._state)
        for pod in pods:
            path, text = self._folder_of(pod) / "hosts", names.hosts_text(pod, known)
            if path.exists() and path.read_text() != text:
                path.write_text(text)

    def kill(self, uid: str, *, oom: bool = False) -> None:
        """SIGKILL to the first process of each container, as the kernel does when memory is out."""
        for each in self.containers.get(uid, {}).values():
            each.is_oom = oom
            sandbox.end_now(each.process)

    def traces(self, namespace: str) -> list[str]:
        """Processes and folders that pods of a namespace have on this host."""
        here = [uid for uid, space in self._namespaces.items() if space == namespace]
        alive = [
            f"process {r.process.pid}"
            for uid in here
            for r in self.containers.get(uid, {}).values()
            if r.process.poll() is None
        ]
        return alive + [f"folder {uid}" for uid in here if (self._folder / "pods" / uid).exists()]

    def stop(self) -> None:
        for uid in list(self.containers):
            self._forget(uid)


def _restarts(pod: Object, code: int) -> bool:
    policy = pod["spec"].get("restartPolicy", "Always")
    return policy == "Always" or (policy == "OnFailure" and code != 0)


def _ended(each: Running, code: int) -> Object:
    reason = "OOMKilled" if each.is_oom else "Error" if code else "Completed"
    return {"exitCode": code, "reason": reason, "startedAt": each.started_at, "finishedAt": now()}


def memory_limit(pod: Object) -> float:
    """Of all containers together, where each has one; a disk of memory is no larger."""
    limits = [((c.get("resources") or {}).get("limits") or {}).get("memory") for c in pod["spec"]["containers"]]
    return sum(map(quantity, limits)) if all(limits) else float("inf")


def _status(container: Object, state: Object, restarts: int, *, ready: bool) -> Object:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": restarts}
    return about | {"ready": ready, "started": ready, "state": state, "lastState": {}}


def _unchanged_end(status: Object, known: Object) -> Object:
    """A container that has ended has ended once: its time does not move."""
    for old in known.get("containerStatuses", []):
        same = old["name"] == status["name"] and old["restartCount"] == status["restartCount"]
        if same and "terminated" in old["state"] and "terminated" in status["state"]:
            return old
    return status
