"""The ssh launcher without a host: what users may write, the commands it would run, and what never becomes one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError, RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer
from paceline.experiment.spec import RunSpec, Topology
from paceline.launchers import ssh
from paceline.launchers.node import placement
from paceline.launchers.ssh import hosts as _ssh_hosts
from paceline.launchers.ssh.hosts import Host, Options, read_host
from paceline.launchers.ssh.sessions import Connection

GOLDEN = Path(__file__).parents[3] / "golden" / "launchers" / "ssh.txt"
Make = Callable[..., RunSpec]


def asked(make_spec: Make, nodes: int = 1, **options: Any) -> RunSpec:
    return replace(make_spec("ddp", 1, nodes=nodes), launcher=Choice("ssh", options))


def test_the_text_of_a_job_is_the_golden_one(make_spec: Make) -> None:
    full = {"host": "gpu2", "user": "bench", "port": 2222, "key": "~/.ssh/other", "python": "~/venv/bin/python"}
    specs = {
        "one host": asked(make_spec, hosts=["gpu1"]),
        "two hosts, all said": asked(
            make_spec,
            nodes=2,
            hosts=["bench@gpu1", full],
            key="~/.ssh/id",
            jump="bench@gate:2200",
            ssh_config="/etc/lab/ssh_config",
            known_hosts="/etc/lab/known hosts",
            connect_s=5,
            port=29600,
            python="/opt/bench env/bin/python",
            scratch="/local/it's $(here)",
        ),
        "a shared disk": asked(make_spec, hosts=["gpu1"], shared="/mnt/results"),
    }
    jobs = {name: ssh.prepare(spec, Path("/out/test/RUN")) for name, spec in specs.items()}
    text = "".join(f"# {name}\n{job}\n" for name, job in jobs.items())
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text(), "set PACELINE_UPDATE_GOLDEN=1 if the change is meant"
    assert ssh.prepare(specs["one host"], Path("/out/test/RUN")) == jobs["one host"]


@pytest.mark.parametrize(
    ("written", "host"),
    [
        ("gpu1", Host(host="gpu1")),
        ("bench@gpu1", Host(host="gpu1", user="bench")),
        ("bench@gpu1:2222", Host(host="gpu1", user="bench", port=2222)),
        ("me@corp.example@gpu1", Host(host="gpu1", user="me@corp.example")),
        ("[fd00::1]:22", Host(host="fd00::1", port=22)),
        ("bench@fd00::1", Host(host="fd00::1", user="bench")),
        ({"host": "gpu1", "gpus": 8, "address": "10.0.0.1"}, Host(host="gpu1", gpus=8, address="10.0.0.1")),
    ],
)
def test_hosts_as_people_write_them(written: object, host: Host) -> None:
    assert read_host(written) == host
    assert read_host(str(host)) == Host(host=host.host, user=host.user, port=host.port)


@pytest.mark.parametrize(
    "written",
    [
        "-oProxyCommand=touch owned",
        "root@-oProxyCommand=x",
        "-l@gpu1",
        "gpu1;touch owned",
        "gpu1 -oProxyCommand=x",
        "$(touch owned)",
        "`touch owned`@gpu1",
        "gpu1\nowned",
        "gpu1:0",
        "gpu1:70000",
        "gpu1:22:22@x",
        "",
        17,
        None,
        {"user": "root"},
        {"host": "gpu1", "option": "x"},
        {"host": "-oProxyCommand=x"},
        {"host": "gpu1", "user": "-oProxyCommand=x"},
        {"host": "gpu1", "key": "-oProxyCommand=x"},
        {"host": "gpu1", "key": "/keys/%d"},
        {"host": "gpu1", "key": '/keys/" ProxyCommand=x'},
        {"host": "gpu1", "python": "-c"},
        {"host": "gpu1", "python": "python\nowned"},
        {"host": "gpu1", "address": "a b"},
        {"host": "gpu1", "interface": "eth0;x"},
        {"host": "gpu1", "gpus": True},
    ],
)
def test_what_could_be_an_option_or_a_command_is_refused(written: object, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        Options(hosts=[written])
    assert str(caught.value) == golden
    assert "ssh.hosts" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "ssh.hosts"),
        ({"hosts": "gpu1"}, "ssh.hosts"),
        ({"hosts": []}, "ssh.hosts"),
        ({"hosts": ["gpu1", "root@gpu1"]}, "ssh.hosts"),
        ({"hosts": [{"host": "a", "gpus": 8}, "b"]}, "ssh.hosts: gpus"),
        ({"jump": "-oProxyCommand=x"}, "ssh.jump"),
        ({"jump": 7}, "ssh.jump"),
        ({"key": "a\nb"}, "ssh.key"),
        ({"key": 7}, "ssh.key"),
        ({"ssh_config": "-x"}, "ssh.ssh_config"),
        ({"known_hosts": '"'}, "ssh.known_hosts"),
        ({"connect_s": 0}, "ssh.connect_s"),
        ({"patience_s": 0}, "ssh.patience_s"),
        ({"port": 80}, "ssh.port"),
        ({"threads": 0}, "ssh.threads"),
        ({"shared": "relative"}, "ssh.shared"),
        ({"scratch": "relative"}, "ssh.scratch"),
        ({"env": ["A"]}, "ssh.env"),
        ({"env": {"A B": "c"}}, "ssh.env"),
        ({"env": {"A": ["c"]}}, "ssh.env: A"),
        ({"forward": "HOME"}, "ssh.forward"),
        ({"forward": ["A=b"]}, "ssh.forward"),
    ],
)
def test_every_other_option_is_checked(options: dict[str, Any], where: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        Options(**({} if where == "ssh.hosts" else {"hosts": ["gpu1"]}) | options)
    assert str(caught.value) == golden
    assert where in str(caught.value)


def test_a_secret_is_refused_without_being_repeated(golden: object) -> None:
    with pytest.raises(RequestError) as refusal:
        Options(hosts=["gpu1"], env={"HF_TOKEN": "hf_abcdefghijklmnop"})
    assert str(refusal.value) == golden
    assert "ssh.env" in str(refusal.value)
    assert "HF_TOKEN" in str(refusal.value)
    assert "abcdefgh" not in str(refusal.value)


def test_forwarded_variables_reach_ranks_and_no_command(
    make_spec: Make, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    spec = asked(make_spec, nodes=2, hosts=["gpu1", "gpu2"], forward=["HF_TOKEN"], env={"NCCL_DEBUG": "WARN"})
    chosen = Options(**spec.launcher.options)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(LaunchError) as caught:
        ssh._environments(spec, chosen, ["gpu1", "gpu2"], "x")
    assert str(caught.value) == golden
    assert "HF_TOKEN" in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    first, second = ssh._environments(spec, chosen, ["gpu1", "gpu2"], "x")
    assert first["HF_TOKEN"] == second["HF_TOKEN"] == "hf_abcdefghijklmnop"
    assert first["NCCL_DEBUG"] == "WARN"
    assert "abcdefgh" not in str(ssh.prepare(spec, Path("/out/test/RUN")))
    assert placement.here(second) == placement.NodePosition(node=1, nodes=2, master="gpu1", engine="paceline")


def test_an_address_and_an_interface_of_its_own(make_spec: Make) -> None:
    hosts = [{"host": "gate1", "address": "10.0.0.1", "interface": "ib0"}, "gate2"]
    spec = asked(make_spec, nodes=2, hosts=hosts)
    first, second = ssh._environments(spec, Options(**spec.launcher.options), ["gate1", "gate2"], "x")
    assert first["PACELINE_MASTER"] == second["PACELINE_MASTER"] == "10.0.0.1"
    assert (first["GLOO_SOCKET_IFNAME"], first["NCCL_SOCKET_IFNAME"]) == ("ib0", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in second


def test_what_hosts_offer(make_spec: Make, golden: object) -> None:
    two = [{"host": "a", "gpus": 8}, {"host": "b", "gpus": 4}]
    assert ssh.offer(Choice("ssh", {"hosts": two})) == Offer(device="cuda", processes=4, nodes=2)
    assert ssh.offer(Choice("ssh", {"hosts": ["a"]})) == Offer(device="cpu", processes=1, nodes=1)
    text = ssh.check(asked(make_spec, nodes=3, hosts=two))
    assert text == golden
    assert "ssh.hosts" in text
    many = replace(make_spec("ddp", 8, nodes=2, device="cuda"), launcher=Choice("ssh", {"hosts": two}))
    assert ssh.check(many) == golden
    assert ssh.check(replace(many, topology=Topology(device="cuda", nodes=1, processes_per_node=8))) is None


def test_words_reach_the_remote_shell_as_they_are(tmp_path: Path) -> None:
    """What ssh hands to the shell over there, in a shell here."""
    hostile = ["a b", "$(touch owned)", "`touch owned`", "it's", 'say "x"', "; touch owned", "* ~", "\\n", "-x", ""]
    command = _ssh_hosts.ssh_command(
        Options(hosts=["gpu1"]), Host(host="gpu1"), [sys.executable, "-c", PRINT, *hostile]
    )
    done = subprocess.run(["sh", "-c", command[-1]], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == [repr(word) for word in hostile]
    assert list(tmp_path.iterdir()) == []
    assert command[command.index("--") + 1] == "gpu1"


PRINT = "import sys; [print(repr(word)) for word in sys.argv[1:]]"


def test_names_of_hosts_are_names_of_files() -> None:
    hosts = (Host(host="fd00::1"), Host(host="gpu1", port=1), Host(host="gpu1", port=2))
    assert _ssh_hosts.labels(hosts) == ["fd00-1", "gpu1-1", "gpu1-2"]


def test_a_checkpoint_needs_a_place_that_hosts_share(make_spec: Make) -> None:
    def refusal(**options: Any) -> str | None:
        return ssh.check(replace(asked(make_spec, hosts=["a"], **options), checkpoint_every=2))

    said = refusal()
    assert said is not None
    assert "ssh.shared" in said
    assert "ssh.env: {PACELINE_CHECKPOINTS: /a/shared/folder}" in said
    assert refusal(env={"OTHER": "1"}) == said
    assert refusal(shared="/mnt/results") is None
    assert refusal(env={"PACELINE_CHECKPOINTS": "/mnt/c"}) is None
    assert refusal(forward=["PACELINE_CHECKPOINTS"]) is None
    assert ssh.check(asked(make_spec, hosts=["a"])) is None


# --- answers ---


@pytest.mark.parametrize(
    "options",
    [
        {"hosts": ["a"], "key": "/no/key"},
        {"hosts": ["a"], "ssh_config": "/no/config"},
        {"hosts": ["a", {"host": "b", "key": "/no/key"}]},
    ],
)
def test_a_missing_file_is_reported_with_its_option(options: dict[str, Any], golden: object) -> None:
    chosen = Options(**options)
    with pytest.raises(LaunchError) as caught:
        _ssh_hosts.ask(chosen, chosen.machines)
    assert str(caught.value) == golden


def answer(torch: str | None = "2.13.0", version: str | None = None, gpus: int = 0, name: str = "H100") -> Any:
    versions = {"torch": torch} if torch else {}
    facts = {"paceline": version or _ssh_hosts.__version__, "versions": versions, "gpus": [{"name": name}] * gpus}
    return _ssh_hosts.Answer(facts=facts, clock=None)


HOSTS = (Host(host="a"), Host(host="b"))
ON_GPUS = Topology(device="cuda", nodes=2, processes_per_node=2)


@pytest.mark.parametrize(
    "answers",
    [
        (answer(gpus=2), answer(gpus=2, version="9.9")),
        (answer(gpus=2), answer(None, gpus=2)),
        (answer(gpus=2), answer("2.11.0+cu130", gpus=2)),
        (answer(gpus=2), answer(gpus=1)),
        (answer(), answer(gpus=2)),
    ],
)
def test_hosts_that_cannot_run_together(answers: Any, golden: object) -> None:
    with pytest.raises(LaunchError) as caught:
        _ssh_hosts.compare(HOSTS, answers, ON_GPUS)
    assert str(caught.value) == golden


def test_different_gpus_are_allowed_and_said(golden: object) -> None:
    found = _ssh_hosts.compare(HOSTS, (answer(gpus=2), answer(gpus=4, name="A100")), ON_GPUS)
    assert found == golden


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ssh: Could not resolve hostname a: Name or service not known", 255),
        ("Permission denied (publickey).", 255),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", 255),
        ("ssh: connect to host a port 22: Connection timed out", 255),
        ("/usr/bin/python3: No module named paceline", 1),
        ("agent: error: unrecognized arguments: --facts", 2),
        ("Killed", 3),
    ],
)
def test_the_words_of_ssh_and_of_hosts_become_sentences(
    said: str, code: int, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    script = f"echo {shlex.quote(said)} >&2; exit {code}"
    monkeypatch.setattr(_ssh_hosts, "Connection", lambda command: Connection(["sh", "-c", script]))
    with pytest.raises(LaunchError) as caught:
        _ssh_hosts.ask(Options(hosts=["a"]), [Host(host="a")])
    assert str(caught.value) == golden
