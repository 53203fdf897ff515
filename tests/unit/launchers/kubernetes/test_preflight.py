"""What each engine refuses before the first job: from the command line one sentence, exit code 2, nothing written."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from testbed.kube_api import Cluster, Node
from testbed.kube_api.resources import KNOWN
from testbed.kube_api.sandbox import why_not
from testbed.ports import free_port

from paceline import __version__, cli
from paceline.errors import LaunchError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job, kubernetes, ray, slurm, ssh
from paceline.launchers.kubernetes.cluster import CONTROLLER_ACCOUNT, cluster_manifests, essential, rights
from paceline.launchers.kubernetes.options import KINDS
from paceline.launchers.slurm import states
from paceline.launchers.ssh import hosts as ssh_hosts
from paceline.launchers.ssh.sessions import Connection

Make = Callable[..., RunSpec]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job, "RETRY_S", 0.0)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence of a campaign of two cells that leaves no trace."""

    def run(launcher: dict[str, Any]) -> str:
        base = {"model": "tiny", "device": "cpu", "nodes": 2, "processes": 1, "sequence_length": 32}
        base |= {"steps": 4, "launcher": launcher}
        file = tmp_path / "asked.yaml"
        file.write_text(yaml.safe_dump({"name": "asked", "base": base, "matrix": {"strategy": ["ddp", "fsdp2"]}}))
        capsys.readouterr()
        assert cli.main(["run", str(file), "--out", str(tmp_path / "results")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "results").exists()
        return line

    return run


def test_every_engine_beyond_this_host_is_asked() -> None:
    asked = {name for name in plugins.names("launchers") if hasattr(plugins.load("launchers", name), "preflight")}
    assert asked == {"here", "kubernetes", "slurm", "ssh", "ray"}


# --- Kubernetes ---


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why_not():
        pytest.skip(str(why_not()))
    with Cluster(tmp_path_factory.mktemp("cluster"), (Node(name="a"),)) as found:
        for made in cluster_manifests("ready", KINDS).values():
            found.apply(made)
        yield found


@pytest.fixture
def config(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A kubeconfig for an administrator, or for an account of the namespace `ready`."""
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))

    def write(account: str | None = None, **more: Any) -> Path:
        who = {"token": cluster.access.token_for("ready", account)} if account else {}
        return cluster.kubeconfig(tmp_path / "config", **{"namespace": "ready", **who, **more})

    return write


def pods(**more: Any) -> dict[str, Any]:
    return {"name": "kubernetes", "image": "paceline", "patience_s": 0.5, **more}


def test_no_kubeconfig_is_one_sentence(config: object, refused: Callable[..., str], golden: object) -> None:
    assert refused(pods()) == golden


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({"context": "nope"}, {}),
        ({"namespace": "absent"}, {}),
        ({"namespace": "absent"}, {"account": CONTROLLER_ACCOUNT}),
        ({}, {"account": "nobody"}),
        ({}, {"token": "stale"}),
        ({"results_claim": "none"}, {}),
        ({"priority_class": "none"}, {}),
    ],
)
def test_a_wrong_cluster_is_one_sentence(
    config: Callable[..., Path],
    refused: Callable[..., str],
    options: dict[str, Any],
    who: dict[str, Any],
    golden: object,
) -> None:
    config(**who)
    assert refused(pods(**options)) == golden


def test_a_kind_that_is_not_installed_is_one_sentence(
    cluster: Cluster,
    config: Callable[..., Path],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    golden: object,
) -> None:
    config()
    for key in [key for key, resource in KNOWN.items() if resource.group == "jobset.x-k8s.io"]:
        monkeypatch.delitem(KNOWN, key)
    said = refused(pods(kind="jobset"))
    assert said == golden
    assert "kubernetes.kind" in said
    assert "k8s" in said
    assert "v1alpha2" in said


def test_a_server_that_does_not_answer_is_retried_and_then_reported(
    cluster: Cluster, config: Callable[..., Path], refused: Callable[..., str], golden: object
) -> None:
    config()
    cluster.stop_api_server()
    try:
        said = refused(pods())
    finally:
        cluster.start_api_server(cold_s=0)
    assert said == golden
    assert "0.5" in said


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_rights_are_enough_and_nothing_is_created(
    cluster: Cluster, config: Callable[..., Path], make_spec: Make, kind: str
) -> None:
    """What this account may not look at is left to the runs."""
    config(account=CONTROLLER_ACCOUNT)
    options = {key: value for key, value in pods(kind=kind, results_claim="unseen").items() if key != "name"}
    before = cluster.leftovers("ready")
    kubernetes.preflight([replace(make_spec(), launcher=Choice("kubernetes", options))])
    assert cluster.leftovers("ready") == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_essential_is_part_of_what_init_gives(kind: str) -> None:
    given = rights(kind)
    assert all(set(verbs) <= set(given[key]) for key, verbs in essential(kind).items())


def test_a_right_that_runs_do_without_keeps_none_from_beginning(
    cluster: Cluster, config: Callable[..., Path], make_spec: Make
) -> None:
    for made in cluster_manifests("narrow").values():
        cluster.apply(made)
    cluster.forbid("narrow", CONTROLLER_ACCOUNT, "events", "list")
    config(token=cluster.access.token_for("narrow", CONTROLLER_ACCOUNT), namespace="narrow")
    kubernetes.preflight([replace(make_spec(), launcher=Choice("kubernetes", {"image": "paceline"}))])


# --- Slurm ---


Said = Callable[..., None]


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Slurm's commands as they answer; every one that is asked for anything else fails the test."""

    def use(returncode: int, stderr: str) -> None:
        def call(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
            if argv[0] == "sinfo":
                return subprocess.CompletedProcess(argv, 0, "main\ngpu\nmain\n", "")
            assert argv == ("sbatch", "--test-only", "--parsable")
            assert "#SBATCH" in stdin
            return subprocess.CompletedProcess(argv, returncode, "", stderr)

        monkeypatch.setattr(states, "call", call)

    return use


def test_a_host_without_slurm_is_one_sentence(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    said = refused({"name": "slurm"})
    assert (
        said == "paceline: launcher slurm: sbatch is not installed here: run paceline on a host with Slurm's commands"
    )


@pytest.mark.parametrize(
    ("options", "stderr"),
    [
        (
            {"partition": "nope"},
            "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
        ),
        (
            {"account": "x", "partition": "gpu"},
            "allocation failure: Invalid account or account/partition combination specified\n",
        ),
        ({"reservation": "r"}, "allocation failure: Requested reservation is invalid\n"),
        ({"constraint": "c"}, "allocation failure: Invalid feature specification\n"),
        ({"nodelist": "n9"}, "allocation failure: Invalid node name specified\n"),
        ({"gres": "tpu:3"}, "sbatch: error: Invalid generic resource (gres) specification\n"),
        ({}, "sbatch: fatal: Could not establish a configuration source\n"),
        ({}, "allocation failure: Invalid account or account/partition combination specified\n"),
    ],
)
def test_what_sbatch_calls_invalid_is_one_sentence(
    refused: Callable[..., str], sbatch: Said, options: dict[str, Any], stderr: str, golden: object
) -> None:
    sbatch(1, stderr)
    said = refused({"name": "slurm", **options})
    assert said == golden
    assert "allocation failure" not in said


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (0, "sbatch: Job 7 to start at 2026-11-16T13:47:31 using 1 processors on nodes n1 in partition main\n"),
        (1, "allocation failure: Requested node configuration is not available\n"),
        (1, "allocation failure: Required node not available (down, drained or reserved)\n"),
        (1, "allocation failure: Requested time limit is invalid (missing or exceeds some limit)\n"),
        (1, "allocation failure: Node count specification invalid\n"),
    ],
)
def test_what_may_pass_is_left_to_the_runs(make_spec: Make, sbatch: Said, code: int, stderr: str) -> None:
    sbatch(code, stderr)
    slurm.preflight([replace(make_spec(), launcher=Choice("slurm", {"partition": "main"}))])


def test_a_full_temporary_folder_refuses_nothing(
    make_spec: Make, sbatch: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    sbatch(0, "")
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    monkeypatch.setattr(Path, "write_text", full)
    slurm.preflight([replace(make_spec(), launcher=Choice("slurm"))])


# --- SSH ---


def test_a_host_that_refuses_is_one_sentence(refused: Callable[..., str], golden: object) -> None:
    port = free_port()
    said = refused({"name": "ssh", "hosts": [f"127.0.0.1:{port}", "127.0.0.1:22"], "ssh_config": "/dev/null"})
    assert said == golden
    assert f"{port}" in said
    assert "127.0.0.1" in said


def test_a_variable_that_is_not_there_is_one_sentence(refused: Callable[..., str], golden: object) -> None:
    text = refused({"name": "ssh", "hosts": ["a", "b"], "forward": ["NO_SUCH_TOKEN"]})
    assert text == golden
    assert "ssh.forward" in text
    assert "NO_SUCH_TOKEN" in text


def on_hosts(make_spec: Make, nodes: int, processes: int = 1, device: str = "cpu") -> RunSpec:
    spec = make_spec("ddp", processes, nodes=nodes, device=device)
    return replace(spec, launcher=Choice("ssh", {"hosts": ["a", "b", "c"]}))


def test_only_hosts_that_every_run_needs_are_asked(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    """A host that only larger runs need costs those, each a record; and so does what is wrong with some of them."""
    asked: list[str] = []
    facts = {"paceline": __version__, "versions": {"torch": "2.9"}, "gpus": [{"name": "H100"}]}

    def ask(chosen: object, hosts: Any) -> list[ssh_hosts.Answer]:
        asked.extend(host.host for host in hosts)
        return [ssh_hosts.Answer(facts=facts, clock=None) for _ in hosts]

    monkeypatch.setattr(ssh_hosts, "ask", ask)
    large = on_hosts(make_spec, 3, processes=2, device="cuda")
    ssh.preflight([large, on_hosts(make_spec, 2)])
    assert asked == ["a", "b"]
    with pytest.raises(LaunchError) as caught:
        ssh.preflight([large])
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("words", "asked"),
    [("ssh: connect to host a port 22: Connection refused", 2), ("Permission denied (publickey).", 1)],
)
def test_a_host_that_is_silent_is_asked_a_second_time(
    make_spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, asked: int
) -> None:
    """One that refuses in words would only do so again."""
    facts = json.dumps({"paceline": __version__, "versions": {"torch": "2.9"}, "gpus": []})
    scripts = iter([f"echo '{words}' >&2; exit 255", f"echo '{facts}'"])
    used: list[object] = []

    def connect(command: object) -> Connection:
        used.append(command)
        return Connection(["sh", "-c", next(scripts)])

    monkeypatch.setattr(ssh_hosts, "Connection", connect)
    spec = replace(make_spec("ddp", 1), launcher=Choice("ssh", {"hosts": ["a"]}))
    with contextlib.nullcontext() if asked == 2 else pytest.raises(LaunchError, match="a rejects the key"):
        ssh.preflight([spec])
    assert len(used) == asked


# --- Ray ---


def test_a_ray_that_does_not_listen_is_asked_a_second_time(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    knocks: list[str] = []

    def knock(address: str) -> None:
        knocks.append(address)
        if len(knocks) == 1:
            raise _job.NoAnswerError("nobody answers there")

    monkeypatch.setattr(ray, "probe", knock)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, "", ""))
    ray.preflight([replace(make_spec(), launcher=Choice("ray", {"address": "head:6379"}))])
    assert knocks == ["head:6379"] * 2


def test_no_ray_at_the_address_is_one_sentence(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setattr(ray.importlib.util, "find_spec", lambda name: name)
    address = f"127.0.0.1:{free_port()}"
    said = refused({"name": "ray", "address": address})
    assert said == golden
    assert f"{address}" in said
    assert f"try `ray status --address {address}`" in said


@pytest.mark.parametrize(
    "code",
    [
        "print('a line of Ray'); print('paceline: refused: why'); print('another')",
        "import time; time.sleep(600)",
    ],
)
def test_a_ray_that_does_not_let_in_is_one_sentence(
    make_spec: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, golden: object
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(ray, "ENTER_S", 0.5 if "sleep" in code else 60.0)
    with pytest.raises(LaunchError) as caught:
        ray.preflight([replace(make_spec(), launcher=Choice("ray"))])
    assert str(caught.value) == golden
