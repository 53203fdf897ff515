"""The Slurm launcher without Slurm: its scripts, what it refuses, how it reads Slurm's answers, also wrong ones."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError, RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job, slurm
from paceline.launchers.node import log_transport
from paceline.launchers.slurm import output_files, states
from paceline.launchers.slurm.states import Phase, Seen, Unavailable
from paceline.results.records import Status

GOLDEN = Path(__file__).parents[3] / "golden" / "launchers" / "slurm.txt"
RUN_DIR = Path("/results/test/RUN")
Make = Callable[..., RunSpec]
SERVED: dict[str, Any] = {"workload": "inference", "serving": Serving(), "engine": Choice("vllm")}
HOSTILE = 'it\'s "$(touch /tmp/never)" `id` # %j;&|\\'


def with_options(spec: RunSpec, **options: Any) -> RunSpec:
    return replace(spec, launcher=Choice("slurm", options))


def script(spec: RunSpec, run_dir: Path = RUN_DIR) -> str:
    return next(iter(slurm.prepare(spec, run_dir).files.values()))


@pytest.fixture
def specs(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> dict[str, RunSpec]:
    monkeypatch.setattr(socket, "gethostname", lambda: "login1")
    monkeypatch.setattr(sys, "executable", "/opt/paceline/bin/python")
    two, gpus = make_spec("ddp", 2, nodes=2), make_spec("fsdp2", 8, nodes=4, device="cuda")
    served = make_spec(None, 2, nodes=2, **SERVED)
    asked = {"account": "ml", "partition": "h100", "qos": "high", "constraint": "nvlink&ib", "reservation": "bench"}
    pyxis = {"container_image": "nvcr.io#nvidia/pytorch:26.10-py3", "container_mounts": ["/data:/data:ro"]}
    site = {"setup": ["module load cuda/13.0"], "env": {"NCCL_DEBUG": "WARN"}, "srun_arguments": ["--label"]}
    return {
        "two CPU nodes": with_options(two),
        "four nodes of eight GPUs": with_options(gpus, **asked, gres="gpu:h100:8", time="2:00:00", nodelist="g[1-4]"),
        "a container": with_options(gpus, **pyxis),
        "a site with modules": with_options(two, **site, exclusive=False, mem="64G", threads=4, port=29507),
        "back into the queue": with_options(two, requeue=True, cpus_per_task=16, exclude="n7"),
        "no shared disk, output where all see it": with_options(two, shared=False, output="/scratch/out"),
        "no shared disk at all": with_options(two, shared=False, scratch="/local"),
        "a hostile comment": with_options(two, comment=HOSTILE),
        "served replicas": with_options(served),
        "served replicas, no shared disk at all": with_options(served, shared=False, scratch="/local"),
    }


def test_the_scripts_are_the_golden_ones(specs: dict[str, RunSpec]) -> None:
    jobs = {name: str(slurm.prepare(spec, RUN_DIR)) for name, spec in specs.items()}
    texts = "".join(f"### {name}\n{job}\n" for name, job in jobs.items())
    for spec in specs.values():
        texts = texts.replace(_job.spec_text(spec), "SPEC")
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(texts)
    assert texts == GOLDEN.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_reads_every_script(specs: dict[str, RunSpec]) -> None:
    for name, spec in specs.items():
        done = subprocess.run(["bash", "-n"], input=script(spec), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_preparing_changes_nothing_and_says_the_same_twice(make_spec: Make, tmp_path: Path) -> None:
    spec = with_options(make_spec())
    assert slurm.prepare(spec, tmp_path / "run") == slurm.prepare(spec, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_hostile_names_stay_data(make_spec: Make, tmp_path: Path) -> None:
    """bash runs the script with commands of our own in the place of Slurm's: they see every name as it was given."""
    folder = tmp_path / "it's $(touch never) `id` %j"
    folder.mkdir()
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" "VALUE=$NAME" > words.txt\n')
    (commands / "scontrol").write_text("#!/bin/sh\necho 'NodeName=n1 NodeAddr=10.0.0.1 Port=1'\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    spec = with_options(make_spec("ddp", 1), env={"NAME": HOSTILE + "\nsecond"}, python=HOSTILE)
    env = {"PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash"], input=script(spec, folder), env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = (tmp_path / "words.txt").read_text()
    assert f"\n{HOSTILE}\n-m\npaceline.launchers.node.agent\n" in words
    assert f"\n--run-dir={folder}\n" in words
    assert f"\nVALUE={HOSTILE}\nsecond\n" in words
    assert "\n--port=20007\n" in words
    assert (folder / "exit.txt").read_text() == "7 0\n"
    assert not list(tmp_path.rglob("never"))


@pytest.mark.parametrize("broken", ["a\nb", "a\\b", "a\x1b[2Jb"])
def test_a_folder_that_sbatch_cannot_carry_is_refused(make_spec: Make, broken: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        slurm.prepare(with_options(make_spec()), Path("/results") / broken)
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("account", "a\n#SBATCH --uid=0"),
        ("comment", ""),
        ("partition", ["a", "b"]),
        ("qos", True),
        ("time", 5400),
        ("time", "tomorrow"),
        ("gpus", -1),
        ("gpus", True),
        ("port", 0),
        ("cpus_per_task", "many"),
        ("setup", "module load cuda"),
        ("setup", ["one\ntwo"]),
        ("srun_arguments", [3]),
        ("container_mounts", "a:b"),
        ("env", ["A=1"]),
        ("env", {"A B": "1"}),
        ("env", {"A": [1]}),
        ("output", "relative"),
        ("output", "/with/shared"),
        ("scratch", "tmp"),
        ("pending_s", 0),
        ("patience_s", -1.0),
        ("poll_s", 0.0),
        ("threads", 0),
        ("no_such", 1),
    ],
)
def test_what_slurm_could_not_carry_is_one_sentence(make_spec: Make, option: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        slurm.check(with_options(make_spec(), **{option: value}))
    assert option in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("env", [{"HF_TOKEN": "x"}, {"NAME": "hf_abcdefghijklmnopqrstuvwxyz"}])
def test_a_secret_is_refused_and_not_repeated(make_spec: Make, env: dict[str, str], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        slurm.check(with_options(make_spec(), env=env))
    assert str(caught.value) == golden
    assert not any(value in str(caught.value).split("'") for value in env.values())


def test_what_contradicts_itself_is_unsupported(make_spec: Make, golden: object) -> None:
    eight = make_spec("ddp", 8, device="cuda")
    assert slurm.check(with_options(eight)) is None
    assert slurm.check(with_options(eight, gres="gpu:h100:4")) == golden
    restarting = replace(make_spec(), max_restarts=2)
    assert str(slurm.check(with_options(restarting, requeue=True))) == golden


@pytest.mark.parametrize(
    ("options", "offer"),
    [
        ({}, Offer(device="cpu", processes=1)),
        ({"cpus_per_task": 8, "threads": 2}, Offer(device="cpu", processes=4)),
        ({"gpus": 8}, Offer(device="cuda", processes=8)),
        ({"gres": "gpu:h100:4,shard:2"}, Offer(device="cuda", processes=4)),
        ({"gres": "gpu"}, Offer(device="cuda", processes=1)),
        ({"gres": "license:3"}, Offer(device="cpu", processes=1)),
    ],
)
def test_offer_is_what_the_options_ask_slurm_for(options: dict[str, Any], offer: Offer) -> None:
    assert slurm.offer(Choice("slurm", options)) == offer


def test_variables_of_an_allocation_around_the_controller_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"SBATCH_PARTITION": "debug", "SLURM_JOB_ID": "3", "SLURM_CONF": "/etc/slurm.conf", "OTHER": "x"}
    monkeypatch.setattr(os, "environ", given)
    assert states.environment() == {"SLURM_CONF": "/etc/slurm.conf", "OTHER": "x"}


# --- Slurm's answers


def test_a_requeued_job_does_not_go_on_from_its_checkpoints(make_spec: Make) -> None:
    spec = with_options(make_spec("ddp", 2, checkpoint_every=5), requeue=True)
    assert "checkpoint_every" in (slurm.check(spec) or "")


class Answers:
    """Slurm's commands, each with a list of answers; the last one is repeated."""

    def __init__(self, **answers: list[tuple[int, str, str] | Exception]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, *argv: str, timeout_s: float = 0) -> subprocess.CompletedProcess[str]:
        self.asked.append(argv[0])
        rest = self.answers[argv[0]]
        answer = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(answer, BaseException):
            raise answer
        code, out, err = answer
        return subprocess.CompletedProcess(argv, code, out, err)


def row(
    state: str, exit_code: int = 0, restarts: int = 0, reason: str = "None", nodes: str = "n[1-2]", job: str = "7"
) -> str:
    values = (job, state, str(exit_code), str(restarts), reason, nodes)
    return "".join(f"{v:<{w}}" for v, w in zip(values, states._WIDTHS.values(), strict=True)) + "\n"


FORGOTTEN = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
NO_ACCOUNTING = (1, "", "Slurm accounting storage is disabled\n")


@pytest.fixture
def handle(make_spec: Make, tmp_path: Path) -> dict[str, Any]:
    slurm._watches.clear()
    job = slurm.prepare(with_options(make_spec("ddp", 1, nodes=2), poll_s=1e-9, patience_s=0.5), tmp_path)
    return slurm._handle(job, "7")


def answer(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Answers:
    found = Answers(**answers)
    monkeypatch.setattr(states, "call", found)
    monkeypatch.setattr(slurm, "RETRY_S", 0.01)
    return found


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (row("TIMEOUT", 15), Status.TIMEOUT, "raise launcher.time and add --resume (TIMEOUT)"),
        (row("PREEMPTED"), Status.PREEMPTED, "higher priority"),
        (row("NODE_FAIL"), Status.PREEMPTED, "sinfo -R"),
        (row("OUT_OF_MEMORY"), Status.OOM, "launcher.mem"),
        (row("CANCELLED", 15), Status.FAILED, "not by this controller"),
        (row("DEADLINE"), Status.TIMEOUT, "deadline"),
        (row("BOOT_FAIL"), Status.FAILED, "did not boot"),
        (row("REVOKED"), Status.FAILED, "federation"),
    ],
)
def test_an_end_that_only_slurm_knows_has_our_word(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], line: str, status: Status, words: str, golden: object
) -> None:
    answer(monkeypatch, squeue=[(0, line, "")])
    state = slurm.poll(handle)
    assert (state.running, state.status) == (False, status)
    assert words in str(state.reason)
    assert str(state.reason) == golden


@pytest.mark.parametrize(("line", "code"), [(row("COMPLETED"), 0), (row("FAILED", 768), 3), (row("FAILED", 9), 137)])
def test_an_end_the_ranks_know_better_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], line: str, code: int
) -> None:
    answer(monkeypatch, squeue=[(0, line, "")])
    state = slurm.poll(handle)
    assert (state.running, state.exit_code, state.status) == (False, code, None)


def test_a_job_that_started_no_rank_is_explained_by_its_log(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], tmp_path: Path, golden: object
) -> None:
    answer(monkeypatch, squeue=[(0, row("FAILED", 512), "")])
    why = "slurmstepd-n1: error: execve(): /nowhere/python: No such file or directory"
    (tmp_path / "log.txt").write_text(f"{why}\nsrun: error: n1: task 0: Exited with exit code 2\n")
    state = slurm.poll(handle)
    assert state.status is Status.FAILED
    assert state.reason == golden
    assert f"{why}" in state.reason
    (tmp_path / "outcome-0.json").write_text("{}")
    assert slurm.poll(handle).status is None, "a rank's own word counts more"


def test_every_state_of_the_table_is_a_whole_sentence() -> None:
    for name, meaning in states.STATES.items():
        assert (meaning.status is None) == (not meaning.text), name
        assert meaning.status is None or meaning.phase is Phase.ENDED, name


def test_a_state_of_a_newer_slurm_is_a_job_under_way(monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any]) -> None:
    answer(monkeypatch, squeue=[(0, row("TELEPORTING"), "")])
    assert slurm.poll(handle).running


def test_waiting_says_why_and_ends_with_its_limit(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], golden: object
) -> None:
    answer(monkeypatch, squeue=[(0, row("PENDING", reason="PartitionDown", nodes=""), "")])
    state = slurm.poll(handle)
    assert state.waiting == (
        "Slurm job 7 is pending: PartitionDown (the partition is down; `sinfo` shows those that are up)"
    )
    late = slurm.poll(handle | {"pending_s": 1.0, "submitted_at": handle["submitted_at"] - 10})
    assert (late.running, late.status) == (False, Status.FAILED)
    assert "PartitionDown" in str(late.reason)
    assert str(late.reason) == golden


def test_a_slurmctld_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any]) -> None:
    answer(
        monkeypatch,
        squeue=[(0, row("RUNNING"), ""), Unavailable("gone"), Unavailable("gone"), (0, row("COMPLETED"), "")],
    )
    assert [slurm.poll(handle).running for _ in range(4)] == [True, True, True, False]


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], golden: object) -> None:
    answer(monkeypatch, squeue=[(0, row("RUNNING"), ""), Unavailable("Unable to contact slurm controller")])
    assert slurm.poll(handle).running
    with pytest.raises(LaunchError) as caught:
        slurm.poll(handle | {"patience_s": -1.0})
    assert str(caught.value) == golden


def test_the_queue_is_not_asked_more_often_than_agreed(monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any]) -> None:
    found = answer(monkeypatch, squeue=[(0, row("RUNNING"), "")])
    for _ in range(50):
        slurm.poll(handle | {"poll_s": 600.0})
    assert found.asked == ["squeue"]


@pytest.mark.parametrize(
    ("sacct", "code"),
    [
        ([(0, "7|COMPLETED|0:0\n7.batch|COMPLETED|0:0\n", "")], 0),
        ([NO_ACCOUNTING, (0, "7|FAILED|3:0\n", "")], 3),
        ([(0, "7|CANCELLED by 1000|0:15\n", "")], 143),
    ],
)
def test_a_job_that_the_queue_has_forgotten_is_in_the_accounting(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], sacct: list[Any], code: int
) -> None:
    answer(monkeypatch, squeue=[FORGOTTEN], sacct=sacct)
    state = slurm.poll(handle)
    assert (state.running, state.exit_code) == (False, code)


def test_without_accounting_the_file_it_left_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], tmp_path: Path, golden: object
) -> None:
    answer(monkeypatch, squeue=[FORGOTTEN], sacct=[NO_ACCOUNTING])
    with pytest.raises(LaunchError) as caught:
        slurm.poll(handle)
    assert str(caught.value) == golden
    (tmp_path / "exit.txt").write_text("6 0\n")
    with pytest.raises(LaunchError) as caught:
        slurm.poll(handle)
    assert str(caught.value) == golden
    (tmp_path / "exit.txt").write_text("7 1\n")
    assert slurm.poll(handle).exit_code == 1


def test_slurms_own_sentence_is_the_refusal(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path, golden: object
) -> None:
    refusal = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"
    answer(monkeypatch, sbatch=[(1, "", refusal)], squeue=[(0, "", "")])
    with pytest.raises(LaunchError) as caught:
        slurm.submit(slurm.prepare(with_options(make_spec()), tmp_path))
    assert str(caught.value) == golden


def test_a_slurmctld_that_fell_silent_after_taking_the_job_is_not_given_another(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path
) -> None:
    job = slurm.prepare(with_options(make_spec()), tmp_path)
    found = answer(
        monkeypatch, sbatch=[Unavailable("timed out")], squeue=[(0, "", ""), Unavailable("away"), (0, "41\n42\n", "")]
    )
    assert slurm.submit(job)["job_id"] == "42"
    assert found.asked == ["squeue", "sbatch", "squeue", "squeue"]
    found = answer(monkeypatch, sbatch=[Unavailable("timed out"), (0, "43;cluster\n", "")], squeue=[(0, "", "")])
    assert slurm.submit(job)["job_id"] == "43"


def test_submitting_has_patience_with_an_end(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path, golden: object
) -> None:
    answer(monkeypatch, sbatch=[Unavailable("nobody")], squeue=[(0, "", ""), Unavailable("nobody")])
    with pytest.raises(LaunchError) as caught:
        slurm.submit(slurm.prepare(with_options(make_spec(), patience_s=0.05), tmp_path))
    assert str(caught.value) == golden


def test_a_job_that_is_still_there_is_neither_taken_for_a_new_one_nor_joined_by_one(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path, golden: object
) -> None:
    found = answer(monkeypatch, squeue=[(0, "41\n", "")])
    with pytest.raises(LaunchError) as caught:
        slurm.submit(slurm.prepare(with_options(make_spec()), tmp_path))
    assert str(caught.value) == golden
    assert "41" in str(caught.value)
    assert found.asked == ["squeue"]


def test_a_job_taken_while_submitting_was_interrupted_is_ended(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path
) -> None:
    stop: Any = KeyboardInterrupt()
    found = answer(monkeypatch, sbatch=[stop], squeue=[(0, "", ""), (0, "42\n", "")], scancel=[(0, "", "")])
    with pytest.raises(KeyboardInterrupt):
        slurm.submit(slurm.prepare(with_options(make_spec()), tmp_path))
    assert found.asked == ["squeue", "sbatch", "squeue", "scancel"]


def test_a_host_without_slurm_is_said(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(LaunchError) as caught:
        states.look_up("1")
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    ("handle_known", "left", "squeue", "adopted"),
    [
        (True, "", [(0, row("RUNNING"), "")], "7"),
        (True, "", [(0, row("COMPLETED"), "")], "7"),
        (True, "", [(0, row("CANCELLED"), "")], None),
        (True, "", [FORGOTTEN], None),
        (True, "7 0\n", [FORGOTTEN], "7"),
        (False, "", [(0, "9\n", ""), (0, row("RUNNING", job="9"), "")], "9"),
        (False, "", [(0, "", "")], None),
        (False, "8 0\n", [(0, "", ""), FORGOTTEN], "8"),
        (False, "8 0", [(0, "", ""), FORGOTTEN], "8"),
        (False, "8 0\n", [(0, "9\n", ""), (0, row("RUNNING", job="9"), "")], "9"),
    ],
)
def test_a_job_is_found_again_and_a_cancelled_one_is_none(
    monkeypatch: pytest.MonkeyPatch,
    make_spec: Make,
    tmp_path: Path,
    handle_known: bool,
    left: str,
    squeue: list[Any],
    adopted: str | None,
) -> None:
    job = slurm.prepare(with_options(make_spec()), tmp_path)
    if left:
        (tmp_path / "exit.txt").write_text(left)
    answer(monkeypatch, squeue=squeue, sacct=[NO_ACCOUNTING])
    found = slurm.adopt(job, slurm._handle(job, "7") if handle_known else None)
    assert (found and found["job_id"]) == adopted


def test_nothing_is_started_anew_while_nobody_can_say_whether_it_runs(
    monkeypatch: pytest.MonkeyPatch, make_spec: Make, tmp_path: Path, golden: object
) -> None:
    answer(monkeypatch, squeue=[Unavailable("gone")])
    with pytest.raises(LaunchError) as caught:
        slurm.adopt(slurm.prepare(with_options(make_spec(), patience_s=0.05), tmp_path), None)
    assert str(caught.value) == golden
    answer(monkeypatch, squeue=[Unavailable("gone"), (0, "9\n", ""), (0, row("RUNNING", job="9"), "")])
    found = slurm.adopt(slurm.prepare(with_options(make_spec(), patience_s=60.0), tmp_path), None)
    assert found is not None
    assert found["job_id"] == "9"


def test_cancelling_without_slurmctld_says_what_is_left_to_do(
    monkeypatch: pytest.MonkeyPatch, handle: dict[str, Any], tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm, "CANCEL_S", 0.0)
    answer(monkeypatch, squeue=[Unavailable("gone")])
    assert slurm.cancel(handle) is False
    assert "try scancel 7" in (tmp_path / "log.txt").read_text()


# --- lines of nodes without a shared disk


@pytest.fixture
def relayed(make_spec: Make, tmp_path: Path) -> dict[str, Any]:
    slurm._watches.clear()
    (tmp_path / "out").mkdir()
    (tmp_path / "run").mkdir()
    spec = with_options(make_spec("ddp", 1, nodes=2), shared=False, output=str(tmp_path / "out"), poll_s=1e-9)
    return slurm._handle(slurm.prepare(spec, tmp_path / "run"), "7")


def node_lines(folder: Path, node: int) -> list[str]:
    folder.mkdir()
    (folder / f"outcome-{node}.json").write_text(f'{{"rank": {node}}}')
    sender = log_transport.Sender(folder, node)
    return [sender.hello({"host": f"n{node}"}), "a word of torch", *sender.changes(), *sender.farewell(0)]


def write_output(handle: dict[str, Any], node: int, lines: Sequence[str]) -> Path:
    path = Path(handle["folder"]) / f"{handle['name']}-7-node{node}.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_files_of_nodes_come_home_through_their_output(
    monkeypatch: pytest.MonkeyPatch, relayed: dict[str, Any], tmp_path: Path
) -> None:
    answer(monkeypatch, squeue=[(0, row("RUNNING"), ""), (0, row("COMPLETED"), "")], scancel=[(0, "", "")])
    run_dir = tmp_path / "run"
    outputs = [write_output(relayed, node, node_lines(tmp_path / f"n{node}", node)) for node in range(2)]
    assert slurm.poll(relayed).running
    assert not slurm.poll(relayed).running
    assert slurm.collect(relayed, run_dir) is None
    assert (run_dir / "outcome-1.json").read_text() == '{"rank": 1}'
    assert (run_dir / "log.txt").read_text() == "a word of torch\n" * 2
    slurm.cancel(relayed)
    assert not any(path.exists() for path in outputs)
    # A controller that died before it sealed the run: another one has all it needs.
    assert slurm.collect(relayed, run_dir) is None


def test_an_output_that_was_cut_is_known(
    monkeypatch: pytest.MonkeyPatch, relayed: dict[str, Any], tmp_path: Path, golden: object
) -> None:
    answer(monkeypatch, squeue=[(0, row("COMPLETED"), "")])
    write_output(relayed, 0, node_lines(tmp_path / "n0", 0))
    write_output(relayed, 1, node_lines(tmp_path / "n1", 1)[:-2])
    slurm.poll(relayed)
    text = slurm.collect(relayed, tmp_path / "run")
    assert text == golden
    assert "n1" in text


def test_a_job_put_back_into_the_queue_begins_its_lines_anew(
    monkeypatch: pytest.MonkeyPatch, relayed: dict[str, Any], tmp_path: Path
) -> None:
    again = [(0, row("RUNNING", restarts=1), "")]
    answer(monkeypatch, squeue=[(0, row("RUNNING"), ""), (0, row("RUNNING"), ""), *again])
    lines = node_lines(tmp_path / "n0", 0)
    write_output(relayed, 0, lines)
    slurm.poll(relayed)
    slurm.poll(relayed)
    assert (tmp_path / "run" / "outcome-0.json").exists()
    write_output(relayed, 0, lines[:1])
    slurm.poll(relayed)
    assert not (tmp_path / "run" / "outcome-0.json").exists()


def test_disks_of_nodes_are_visited_by_steps_and_later_by_jobs(
    monkeypatch: pytest.MonkeyPatch, relayed: dict[str, Any], tmp_path: Path
) -> None:
    """Node 0 is home while the job runs; node 1's end is fetched after Slurm has ended the job."""
    outputs = {node: "".join(f"{x}\n" for x in node_lines(tmp_path / f"n{node}", node)).encode() for node in range(2)}
    visits: list[tuple[str, ...]] = []

    def visit(*words: str) -> bytes | None:
        visits.append(words)
        if "tail" not in words or "batch" in words[-1]:
            return b""
        node = int(words[-1].rpartition("node")[2].removesuffix(".log"))
        begin = int(words[-3].removeprefix("+")) - 1
        late = node == 1 and "--overlap" in words
        return outputs[node][begin : begin + 40] if late else outputs[node][begin:]

    monkeypatch.setattr(output_files, "_visit", visit)
    answer(monkeypatch, squeue=[(0, row("RUNNING"), "")], scontrol=[(0, "n1\nn2\n", "")])
    handle = relayed | {"fetched": True, "limits": ["--partition=main"]}
    slurm.poll(handle)
    slurm.poll(handle)
    assert all("--overlap" in words for words in visits)
    answer(monkeypatch, squeue=[(0, row("TIMEOUT"), "")], scontrol=[(0, "n1\nn2\n", "")])
    slurm.poll(handle)
    assert slurm.collect(handle, tmp_path / "run") is None
    later = [words for words in visits if "--overlap" not in words]
    assert [words[0] for words in later] == ["--partition=main"] * 3
    assert {word for words in later for word in words if word.startswith("--nodelist")} == {
        "--nodelist=n1",
        "--nodelist=n2",
    }
    assert (tmp_path / "run" / "outcome-1.json").exists()


def test_a_wait_status_is_read_as_a_shell_would() -> None:
    assert [states._exit_code(status) for status in (0, 256, 768, 9, 15)] == [0, 1, 3, 137, 143]


def test_a_cut_first_word_is_still_a_state() -> None:
    assert Seen(state="CANCELLED by 1000").meaning.status is Status.FAILED
    assert Seen(state="CANCELLED+").meaning.status is Status.FAILED
    assert Seen(state="").meaning.phase is Phase.RUNNING


def test_the_runner_of_tests_reaches_the_agent(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job, "RUNNER", "testbed.light")
    assert "--runner=testbed.light" in script(with_options(make_spec()))
