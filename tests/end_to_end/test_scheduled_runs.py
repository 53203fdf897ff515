"""A scheduled experiment from `schedule add` to the comparison with the last good run, with real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.campaign.schedule import agenda
from paceline.results import store

pytestmark = pytest.mark.slow

# Forks from a process that has imported the command line, as the crontab that it writes does.
PYTHON = str(Path(__file__).parents[1] / "testbed" / "python.sh")
NAME = "nightly"
WORKLOAD = "collectives:operations=all_reduce,dtypes=fp32,min_bytes=1KiB,max_bytes=1KiB,warmup=1,iters=6,budget_s=0.2"
STAND_IN = """#!/bin/sh
if [ "$1" != -l ]; then cat > "$TAB"; elif [ -f "$TAB" ]; then cat "$TAB"; else echo "no crontab for me" >&2; exit 1; fi
"""


class Scheduled:
    """A folder with an experiment, a crontab of its own, and `paceline` started in it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.out, self.tab = folder, folder / "it's results", folder / "tab"
        programs = folder / "bin"
        programs.mkdir()
        (programs / "crontab").write_text(STAND_IN)
        (programs / "crontab").chmod(0o755)
        path = f"{programs}:{environment['PATH']}"
        self.environment = {**environment, "PATH": path, "TAB": str(self.tab), "TZ": "UTC"}
        # One launch without a reference: what is tested here is what happens around a campaign.
        base = {"workload": WORKLOAD, "launcher": "testbed.forked", "device": "cpu", "processes": 2}
        (folder / "file.yaml").write_text(yaml.safe_dump({"name": NAME, "base": base}))

    def call(self, command: list[str] | str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, **more
        )


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory, environment: Callable[..., dict[str, str]]) -> Scheduled:
    forked = {"NURSERY_PYTHON": sys.executable, "NURSERY_KIND": "command"}
    return Scheduled(tmp_path_factory.mktemp("scheduled"), environment(**forked))


def test_from_the_calendar_to_a_report_a_comparison_and_a_notice(scheduled: Scheduled) -> None:
    paceline = [PYTHON, "-m", "paceline.cli", "schedule"]
    out = ["--out", str(scheduled.out)]
    notice = 'printf "%s\\n" "$PACELINE_OUTCOME $PACELINE_REPORT" >> notices'
    asked = ["file.yaml", "--cron", "* * * * *", "--timezone", "Asia/Seoul", "--notify-command", notice]
    added = scheduled.call([*paceline, "add", *asked, *out])
    assert (added.returncode, added.stderr) == (0, "")
    assert f"schedule {NAME}: next " in added.stdout
    # The timer's own line, as cron would hand it to the shell; a due time that is a minute past when it was added.
    (line,) = [row for row in scheduled.tab.read_text().splitlines() if row.startswith("* * * * *")]
    definition = agenda.folder_of(scheduled.out, NAME) / agenda.DEFINITION
    definition.write_text(json.dumps(json.loads(definition.read_text()) | {"added_at": 0.0}))
    (scheduled.folder / "file.yaml").unlink()  # the schedule has its own copy
    command = line.split(" ", 5)[5].replace("\\%", "%")
    first = scheduled.call(["/bin/sh", "-c", command])
    log = agenda.folder_of(scheduled.out, NAME) / agenda.LOG
    assert first.returncode == 0, log.read_text()
    by_hand = scheduled.call([*paceline, "run", NAME, *out])
    assert by_hand.returncode == 0, by_hand.stdout + by_hand.stderr

    timed, manual = agenda.occasions(scheduled.out, NAME)
    assert (timed.outcome, manual.outcome, manual.due_at) == ("ok", "ok", None)
    assert timed.due_at is not None
    assert timed.due_at % 60 == 0
    assert manual.compared_with == str(Path(str(timed.report)).parent)
    for occasion in (timed, manual):
        records, skipped = store.read_runs((scheduled.out / str(occasion.report)).parent)
        assert [record.status for record in records] == ["ok"]
        assert skipped == []
    assert "B over A" in (agenda.folder_of(scheduled.out, NAME) / manual.id / "comparison.md").read_text()
    reports = [str((scheduled.out / str(occasion.report)).absolute()) for occasion in (timed, manual)]
    assert (scheduled.folder / "notices").read_text().splitlines() == [f"ok {report}" for report in reports]


def test_status_lists_a_schedule_and_removing_it_keeps_the_results(scheduled: Scheduled) -> None:
    paceline = [PYTHON, "-m", "paceline.cli"]
    out = ["--out", str(scheduled.out)]
    told = scheduled.call([*paceline, "status", *out]).stdout
    assert f"schedule {NAME}: * * * * * Asia/Seoul (crontab)" in told
    assert "by hand: ok;" in told
    assert "missed" in told
    page = (scheduled.out / "status.html").read_text()
    assert "<h2>Scheduled runs</h2>" in page
    assert scheduled.call([*paceline, "schedule", "remove", NAME, *out]).returncode == 0
    assert scheduled.tab.read_text() == ""
    assert scheduled.call([*paceline, "schedule", "show", NAME, *out]).returncode == 2
    assert len(list(agenda.folder_of(scheduled.out, NAME).glob("*/*/report.html"))) == 2
