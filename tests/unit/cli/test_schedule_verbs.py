"""`paceline schedule` on the command line: what is refused and how, what is printed, what never is."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.campaign.schedule import agenda
from paceline.cli import main

DAILY = ["--cron", "0 19 * * *", "--timezone", "Asia/Seoul"]
CLUSTER = ["--backend", "kubernetes", "--image", "registry/paceline:1", "--claim", "results"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place without crontab or systemctl: what gets so far is refused there, and nothing of this user is touched."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (tmp_path / "file.yaml").write_text("name: My_Nightly\nbase: {model: tiny, device: cpu, precision: fp32}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["file.yaml"], "--cron"),
        (["file.yaml", "--cron", "0 25 * * *"], "Bad hour"),
        (["file.yaml", "--cron", "0 19 * * *", "--timezone", "Mars/Olympus"], "tz database"),
        (["nothing.yaml", *DAILY], "expected a YAML file"),
        (["file.yaml", *DAILY, "--set", "model=nonsense"], "nonsense"),
        (["file.yaml", *DAILY, "--name", "a b"], "lower-case"),
        (["file.yaml", *DAILY, "--fail-on-regression", "200"], "percent"),
        (["file.yaml", *DAILY, "--env-file", "nowhere"], "--env-file: got 'nowhere', expected a file"),
        (["file.yaml", *DAILY, "--webhook-header", "Authorization"], "NAME=VARIABLE"),
        (["file.yaml", *DAILY, "--image", "x"], "--image: got --backend crontab, expected --backend kubernetes"),
        (
            ["file.yaml", *DAILY, "--service-account", "x", "--apply"],
            "--service-account, --apply: got --backend crontab",
        ),
        (["file.yaml", *DAILY, "--backend", "kubernetes"], "got no --image or no --claim, expected both"),
        (["file.yaml", *DAILY, "--backend", "at"], "--backend: got 'at', expected crontab, systemd, kubernetes"),
        (["file.yaml", *DAILY], "'crontab' was not found on this host"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_leaves_nothing(
    arguments: list[str], part: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", "add", *arguments]) == 2
    told = capsys.readouterr().err
    assert part in told
    assert told.count("\n") == 1
    assert agenda.names(folder / "results") == []


def test_the_address_of_a_hook_is_not_repeated_anywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "add", "file.yaml", *DAILY, "--webhook", "https://hooks.example/hunter2"]) == 2
    assert "hunter2" not in "".join(capsys.readouterr())
    assert not [path for path in folder.rglob("*") if path.is_file() and "hunter2" in path.read_text()]


def test_a_manifest_is_printed_and_nothing_is_applied(
    folder: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert main(["schedule", "add", "file.yaml", *DAILY, *CLUSTER, "--set", "seed=7"]) == 0
    told = capsys.readouterr()
    assert told.err == golden
    config, job = yaml.safe_load_all(told.out)
    assert (config["kind"], job["kind"]) == ("ConfigMap", "CronJob")
    assert config["data"]["experiment.yaml"] == (folder / "file.yaml").read_text()
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:6] == ["python", "-m", "paceline.cli", "schedule", "run", "my-nightly"]


def test_a_schedule_is_listed_shown_and_removed(
    folder: Path, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    main(["schedule", "add", "file.yaml", *DAILY, *CLUSTER])
    main(["schedule", "add", "quick", "--cron", "30 4 * * 1", *CLUSTER])
    assert main(["schedule", "add", "quick", *DAILY, *CLUSTER]) == 2
    assert main(["schedule", "add", "quick", *DAILY, *CLUSTER, "--replace"]) == 0
    capsys.readouterr()
    assert main(["schedule", "list"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == golden
    assert "19" in first
    assert second == golden
    assert "19" in second
    assert main(["schedule", "show", "quick", "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  due ") == 2
    assert shown == golden
    assert main(["schedule", "next", "--count", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert "quick" in (folder / "results" / "status.md").read_text()
    assert main(["schedule", "remove", "quick"]) == 0
    removed = capsys.readouterr().out
    assert removed == golden
    assert removed.endswith("\nkubectl delete cronjob,configmap paceline-quick -n default\n")
    for page in ("status.md", "status.html"):
        assert "my-nightly" in (folder / "results" / page).read_text()
        assert "quick" not in (folder / "results" / page).read_text()
    assert main(["schedule", "remove", "quick"]) == 2
    assert capsys.readouterr().err == golden
    assert main(["status"]) == 0
    assert capsys.readouterr().out == golden


def test_the_next_times_of_two_schedules_have_each_their_own_name_and_zone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["schedule", "add", "file.yaml", *DAILY, *CLUSTER])
    main(["schedule", "add", "quick", "--cron", "0 4 * * *", *CLUSTER])
    capsys.readouterr()
    assert main(["schedule", "next", "--count", "4"]) == 0
    told = sorted(line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines())
    assert told == ["04:00 UTC  quick"] * 2 + ["19:00 KST  my-nightly"] * 2


@pytest.mark.parametrize("action", ["list", "next"])
@pytest.mark.parametrize("given", ["file.yaml", "mistyped"])
def test_what_is_no_folder_is_refused(
    action: str, given: str, capsys: pytest.CaptureFixture[str], golden: object
) -> None:
    assert main(["schedule", action, "--out", given]) == 2
    text = capsys.readouterr().err
    assert text == golden
    assert f"{given}" in text


def test_an_empty_folder_says_how_to_begin(capsys: pytest.CaptureFixture[str], golden: object) -> None:
    assert main(["schedule", "list"]) == 0
    assert capsys.readouterr().out == golden
    assert main(["schedule", "next"]) == 0
    assert capsys.readouterr().out == "results: no schedules yet; see `paceline schedule add --help`\n"
    assert main(["schedule", "next", "--count", "0"]) == 2
    assert main(["schedule", "run", "nightly"]) == 2
