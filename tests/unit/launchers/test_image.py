"""The image: its Dockerfile read as a text, the engine's commands, and how what an image says of itself is judged."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import __version__, cli
from paceline.cli import entry
from paceline.errors import LaunchError, RequestError
from paceline.launchers import image

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "paceline": __version__,
    "uid": 10001,
    "build_tools": [],
    "unwritable": [],
    "versions": {"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "paceline": __version__},
}
CONSTRAINTS = "# why\ntorch==2.13.0\ndeepspeed==0.19.8\nruff==0.1\n"


def instructions(text: str) -> list[list[tuple[str, str]]]:
    """The stages of a Dockerfile, each as (instruction, argument) with continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    stages: list[list[tuple[str, str]]] = [[]]
    for line in filter(str.strip, lines):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append((word, " ".join(rest.split())))
    return stages


STAGES = instructions((ROOT / "Dockerfile").read_text())
FINAL = STAGES[-1]


def arguments(stage: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for name, rest in stage if name == word]


def test_the_base_is_one_published_version() -> None:
    (base,) = arguments(STAGES[0], "ARG")
    name, _, reference = base.partition("=")
    assert name == "BASE_IMAGE"
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-runtime-ubuntu24\.04", reference)
    assert all(arguments(stage, "FROM")[0].startswith("${BASE_IMAGE} AS ") for stage in STAGES[1:])
    assert ":latest" not in (ROOT / "Dockerfile").read_text()


def test_the_last_stage_has_no_tool_that_builds() -> None:
    installed = " ".join(arguments(FINAL, "RUN"))
    assert not re.search(r"build-essential|python3-dev|-venv|\bpip\b|\bgcc\b|\bgit\b|\bmake\b|devel", installed)
    assert "nvidia/cuda" not in installed
    assert arguments(FINAL, "COPY") == ["--from=builder /opt/paceline /opt/paceline"]


def test_it_runs_as_a_user_of_its_own() -> None:
    assert arguments(FINAL, "USER") == ["10001:10001"]
    after = FINAL[[word for word, _ in FINAL].index("USER") :]
    assert [word for word, _ in after] == ["USER", "ENTRYPOINT", "CMD"], "nothing happens as root afterwards"
    assert json.loads(arguments(FINAL, "ENTRYPOINT")[0]) == ["python", "-m", "paceline.cli.entry"]


def test_whatever_is_written_goes_to_tmp() -> None:
    variables = dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(arguments(FINAL, "ENV"))))
    assert all(variables[name].startswith("/tmp") for name in image.NEEDED_FOLDERS)


def test_what_is_copied_exists_and_is_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [word for rest in arguments(STAGES[1], "COPY") for word in rest.split()[:-1]]
    assert len(sources) > 4
    for source in sources:
        assert (ROOT / source).exists(), source
        assert "!" + source.rstrip("/") in ignored, source
    assert ignored[1] == "*", "nothing else travels: no history, results or environment"


def test_the_labels_name_version_and_revision() -> None:
    (labels,) = arguments(FINAL, "LABEL")
    assert 'org.opencontainers.image.version="${PACELINE_VERSION}"' in labels
    assert 'org.opencontainers.image.revision="${PACELINE_REVISION}"' in labels


def test_the_smoke_job_is_valid_and_restricted() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = yaml.safe_load((ROOT / "deploy" / "smoke-job.yaml").read_text())
    validate.validate(job, "1.29", strict=True)
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert str(pod["securityContext"]["runAsUser"]) == arguments(FINAL, "USER")[0].partition(":")[0]
    (container,) = pod["containers"]
    assert container["image"] == f"paceline:{__version__}"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/tmp", "/dev/shm"}


def test_a_good_image_has_no_problem() -> None:
    assert image.problems(GOOD, CONSTRAINTS) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"uid": 0},
        {"build_tools": ["gcc", "make"]},
        {"paceline": "0.0.1"},
        {"unwritable": ["TMPDIR"]},
        {"versions": {"deepspeed": "0.19.8"}},
        {"versions": {"torch": "2.12.0"}},
    ],
)
def test_each_problem_is_a_sentence(wrong: dict[str, Any], golden: object) -> None:
    (sentence,) = image.problems({**GOOD, **wrong}, CONSTRAINTS)
    assert sentence == golden


@pytest.mark.parametrize("name", ["paceline:latest", "--privileged", "Paceline:1", "a b", "x:$(id)", ""])
def test_a_name_that_is_no_image_is_refused(name: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        image.checked(name)
    assert str(caught.value) == golden
    assert "NAME" in str(caught.value)
    assert "TAG" in str(caught.value)


def test_no_engine_is_one_sentence(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RequestError) as caught:
        image.engine()
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        image.engine("podman")
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        image.engine("kaniko")
    assert str(caught.value) == golden


def test_the_command_of_a_build(tmp_path: Path, golden: object) -> None:
    (tmp_path / "Dockerfile").write_text("")
    command = image.build_command("docker", tmp_path, "paceline:1.0", "nvidia/cuda@sha256:" + "a" * 64)
    assert command[:2] == ["docker", "build"]
    assert f"PACELINE_VERSION={__version__}" in command
    assert "PACELINE_REVISION=unknown" in command, "no checkout, no commit"
    assert "BASE_IMAGE=nvidia/cuda@sha256:" + "a" * 64 in command
    assert command[-1] == str(tmp_path)
    with pytest.raises(RequestError) as caught:
        image.build_command("docker", tmp_path / "none", "paceline:1.0")
    assert str(caught.value) == golden


def engine_that_prints(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker that writes down how it was called."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/called\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / "called"


def test_an_image_is_asked_as_strictly_as_a_cluster_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    called = engine_that_prints(tmp_path, json.dumps(GOOD), monkeypatch)
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS)
    assert cli.main(["image", "verify", "paceline:1.0", "--engine", "docker", "--context", str(tmp_path)]) == 0
    words = called.read_text().split("\n")
    assert "--read-only" in words
    assert words[words.index("--network") + 1] == "none"
    assert words[-4:-1] == ["paceline:1.0", "image", "facts"]
    text = capsys.readouterr().out
    assert text == golden
    assert "1.0" in text


def test_a_bad_image_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    engine_that_prints(tmp_path, json.dumps(GOOD | {"uid": 0}), monkeypatch)
    (tmp_path / "constraints.txt").write_text(CONSTRAINTS)
    assert cli.main(["image", "verify", "paceline:1.0", "--engine", "docker", "--context", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text == golden
    assert "BAD" in text


def test_an_image_that_says_nothing_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    engine_that_prints(tmp_path, "exec format error", monkeypatch)
    with pytest.raises(LaunchError) as caught:
        image.ask("docker", "paceline:1.0")
    assert str(caught.value) == golden


def test_the_facts_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    locked = tmp_path / "file"
    locked.write_text("")
    found = image.facts({**dict.fromkeys(image.NEEDED_FOLDERS, str(tmp_path)), "HOME": str(locked / "below")})
    assert found["build_tools"] == ["gcc"]
    assert found["unwritable"] == ["HOME"]
    assert found["uid"] == os.getuid()
    assert found["versions"]["pytest"] == pytest.__version__


# --- the entry point ---


@pytest.mark.parametrize(
    ("words", "environ", "started"),
    [
        ([], {}, ("cli", [])),
        (["doctor", "--out", "x"], {}, ("cli", ["doctor", "--out", "x"])),
        ([], {"PACELINE_SPEC": "{}"}, ("agent", ["--relay"])),
        (["--port=1"], {"PACELINE_SPEC": "{}"}, ("agent", ["--relay", "--port=1"])),
        (["list"], {"PACELINE_SPEC": "{}"}, ("cli", ["list"])),
        ([], {"PACELINE_SPEC": ""}, ("cli", [])),
    ],
)
def test_the_entry_is_a_node_where_an_engine_gave_it_a_job(
    words: list[str], environ: dict[str, str], started: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.launchers.node import agent

    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(agent, "main", lambda argv: calls.append(("agent", argv[1:])) or 7)
    monkeypatch.setattr(cli, "main", lambda argv: calls.append(("cli", argv)) or 7)
    assert entry.main(["entry", *words], environ) == 7
    assert calls == [started]


# --- the wheelhouse ---


@pytest.fixture
def wheelhouse() -> Any:
    place = importlib.util.spec_from_file_location("wheelhouse", ROOT / "deploy" / "wheelhouse.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


def test_every_wheel_is_written_down_with_its_hash(wheelhouse: Any, tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"a")
    (tmp_path / "ruamel_yaml.clib-0.2-py3-none-any.whl").write_bytes(b"b")
    (tmp_path / "paceline-0.1.0-py3-none-any.whl").write_bytes(b"c")
    wheelhouse.lock(tmp_path)
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["ruamel-yaml-clib==0.2", "torch==2.13.0"]
    assert lines[1].endswith("ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb")


def test_two_versions_of_one_package_are_refused(wheelhouse: Any, tmp_path: Path, golden: object) -> None:
    for name in ("a_b-1-py3-none-any.whl", "a.b-2-py3-none-any.whl"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SystemExit) as caught:
        wheelhouse.lock(tmp_path)
    assert str(caught.value) == golden


def test_a_changed_wheel_is_not_installed(wheelhouse: Any, tmp_path: Path) -> None:
    """pip itself refuses it: the hash is what is installed by."""
    import subprocess
    import zipfile

    wheel = tmp_path / "nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("nothing.py", "")
        file.writestr("nothing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n")
        file.writestr("nothing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("nothing-1.0.dist-info/RECORD", "")
    wheelhouse.lock(tmp_path)
    install = [sys.executable, "-m", "pip", "install", "--no-index", f"--find-links={tmp_path}", "--require-hashes"]
    install += ["--target", str(tmp_path / "site"), "-r", str(tmp_path / "requirements.txt")]
    assert subprocess.run(install, capture_output=True, check=False).returncode == 0
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr("more.py", "")
    again = subprocess.run([*install, "--upgrade"], capture_output=True, text=True, check=False)
    assert again.returncode != 0
    assert "DO NOT MATCH THE HASHES" in again.stderr
