"""The systemd units: verified by systemd itself where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.campaign.schedule.agenda import Schedule
from paceline.campaign.schedule.cron import Cron
from paceline.campaign.schedule.timers import mark, systemd
from paceline.errors import RequestError


def schedule_of(cron: str = "0 19 * * *") -> Schedule:
    return Schedule(
        name="nightly",
        cron=Cron(cron, "Asia/Seoul"),
        backend="systemd",
        experiment="quick",
        source="quick",
        added_at=0.0,
        directory="/",
    )


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that writes down what it was asked and fails where the file `refuse` says so."""
    programs, log = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    script = programs / "systemctl"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        f'if [ -f {tmp_path}/refuse ] && [ "$2" = enable ]; then echo "no bus" >&2; exit 1; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return log


def test_units_are_written_enabled_and_removed(asked: Path, tmp_path: Path) -> None:
    name = mark(tmp_path, schedule_of())
    said = systemd.install(tmp_path, schedule_of())
    folder = tmp_path / "config" / "systemd" / "user"
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.service", f"{name}.timer"]
    timer = (folder / f"{name}.timer").read_text()
    assert "OnCalendar=*-*-* 19:00:00 Asia/Seoul\n" in timer
    assert "Persistent=true\n" in timer
    assert "enable-linger" in said
    assert systemd.is_installed(tmp_path, schedule_of())
    systemd.remove(tmp_path, schedule_of())
    systemd.remove(tmp_path, schedule_of())
    assert list(folder.iterdir()) == []
    assert asked.read_text().splitlines()[:2] == ["--user daemon-reload", f"--user enable --now {name}.timer"]


def test_a_refusal_leaves_no_unit(asked: Path, tmp_path: Path, golden: object) -> None:
    (tmp_path / "refuse").touch()
    with pytest.raises(RequestError) as caught:
        systemd.install(tmp_path, schedule_of())
    assert str(caught.value) == golden
    assert list((tmp_path / "config" / "systemd" / "user").iterdir()) == []


def test_a_host_without_systemd_is_left_without_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(RequestError) as caught:
        systemd.install(tmp_path, schedule_of())
    assert str(caught.value) == golden
    assert "systemctl" in str(caught.value)
    assert list((tmp_path / "config" / "systemd" / "user").iterdir()) == []


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("a b", '"a b"'),
        ('"', '"\\""'),
        ("50%", '"50%%"'),
        ("$HOME", '"$$HOME"'),
        ("\\n", '"\\\\n"'),
        ("it's", '"it\'s"'),
    ],
)
def test_arguments_are_quoted_for_systemd(word: str, written: str) -> None:
    assert systemd.quoted(word) == written


def test_a_line_break_in_a_folder_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        systemd.units(Path("/tmp/a\nExecStart=/bin/evil"), schedule_of())
    assert str(caught.value) == golden


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("out", ["results", 'it\'s $(x) 50% "q" \\n'])
def test_systemd_verifies_the_units(out: str, tmp_path: Path) -> None:
    for suffix, text in systemd.units(tmp_path / out, schedule_of("30 4 1,15 * 1")).items():
        (tmp_path / f"paceline-x.{suffix}").write_text(text)
    paths = [str(tmp_path / f"paceline-x.{suffix}") for suffix in ("service", "timer")]
    command = ["systemd-analyze", "--user", "verify", *paths]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    told = [line for line in done.stderr.splitlines() if "paceline-x" in line]
    assert not told
    assert done.returncode == 0 or "paceline" not in done.stderr, done.stderr
