"""The crontab block: one's own lines stay, hostile paths stay paths, the real cron accepts it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from paceline.campaign.schedule.agenda import Schedule
from paceline.campaign.schedule.cron import Cron
from paceline.campaign.schedule.timers import crontab
from paceline.errors import RequestError

NOW = datetime(2026, 11, 16, tzinfo=UTC)
OTHERS = 'MAILTO=me\n# mine\n5 4 * * * echo "100\\%"\n@reboot true\n'


def schedule_of(name: str = "nightly", zone: str = "Asia/Seoul") -> Schedule:
    return Schedule(
        name=name,
        cron=Cron("0 19 * * *", zone),
        backend="crontab",
        experiment="quick",
        source="quick",
        added_at=0.0,
        directory="/",
    )


@pytest.fixture
def tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `crontab` that keeps what it is given in a file."""
    kept, programs = tmp_path / "tab", tmp_path / "bin"
    programs.mkdir()
    script = programs / "crontab"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" != -l ]; then cat > {kept}; elif [ -f {kept} ]; then cat {kept}\n'
        'else echo "no crontab for me" >&2; exit 1; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return kept


def test_other_lines_are_left_as_they_are(tab: Path, tmp_path: Path) -> None:
    tab.write_text(OTHERS)
    crontab.install(tmp_path, schedule_of())
    crontab.install(tmp_path, schedule_of("weekly"))
    crontab.install(tmp_path, schedule_of())
    written = tab.read_text()
    assert written.startswith(OTHERS)
    assert written.count("# begin paceline-nightly-") == written.count("# begin paceline-weekly-") == 1
    assert crontab.is_installed(tmp_path, schedule_of())
    crontab.remove(tmp_path, schedule_of())
    crontab.remove(tmp_path, schedule_of())
    assert not crontab.is_installed(tmp_path, schedule_of())
    crontab.remove(tmp_path, schedule_of("weekly"))
    assert tab.read_text() == OTHERS


def test_other_lines_keep_their_bytes(tab: Path, tmp_path: Path) -> None:
    """Neither Latin-1 nor a line end of another system is ours to mend."""
    mine = b"5 4 * * * tar czf caf\xe9.tgz docs\r\n# na\xc3\xafve\n"
    tab.write_bytes(mine)
    crontab.install(tmp_path, schedule_of())
    assert tab.read_bytes().startswith(mine)
    crontab.remove(tmp_path, schedule_of())
    assert tab.read_bytes() == mine


@pytest.mark.parametrize("linked", [True, False])
def test_lines_are_by_the_clock_of_the_host_not_of_the_shell(
    linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cron knows nothing of the TZ that the shell has set, nor need the host's rules be a link that names them."""
    monkeypatch.setenv("TZ", "Asia/Seoul")
    clock = tmp_path / "localtime"
    rules = Path("/usr/share/zoneinfo/America/New_York")
    if not rules.is_file():
        pytest.skip("this host keeps its time zones elsewhere")
    clock.symlink_to(rules) if linked else clock.write_bytes(rules.read_bytes())
    assert schedule_of().cron.on_host(crontab.host_zone(clock), NOW) == "0 5,6 * * *"
    assert schedule_of().cron.on_host(crontab.host_zone(tmp_path / "none"), NOW) == "0 10 * * *"


@pytest.mark.parametrize("zone", ["CRON_TZ=Asia/Tokyo\n", ' "TZ" = Asia/Tokyo\n'])
def test_a_zone_of_the_crontab_holds_for_lines_below_it_only(zone: str, tab: Path, tmp_path: Path) -> None:
    mine = f"{OTHERS}{zone}0 1 * * * true\n"
    tab.write_text(mine)
    crontab.install(tmp_path, schedule_of())
    written = tab.read_text()
    assert written.startswith(OTHERS)
    assert written.endswith(f"{zone}0 1 * * * true\n")
    assert written.index("# end paceline-nightly-") < written.index(zone)
    crontab.remove(tmp_path, schedule_of())
    assert tab.read_text() == mine


def test_the_same_name_in_two_folders_is_two_blocks(tab: Path, tmp_path: Path) -> None:
    crontab.install(tmp_path / "a", schedule_of())
    crontab.install(tmp_path / "b", schedule_of())
    crontab.remove(tmp_path / "a", schedule_of())
    assert str(tmp_path / "b") in tab.read_text()
    assert str(tmp_path / "a") not in tab.read_text()


def test_a_crontab_that_cannot_be_read_is_not_replaced(tab: Path, tmp_path: Path, golden: object) -> None:
    (tab.parent / "bin" / "crontab").write_text('#!/bin/sh\necho "you may not use this" >&2; exit 1\n')
    with pytest.raises(RequestError) as caught:
        crontab.install(tmp_path, schedule_of())
    assert str(caught.value) == golden
    assert not tab.exists()


def test_without_cron_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        crontab.install(tmp_path, schedule_of())
    assert str(caught.value) == golden
    assert "crontab" in str(caught.value)


def test_a_hostile_folder_stays_one_word(tmp_path: Path) -> None:
    """What cron makes of the line (an unescaped % ends it, an escaped one loses its backslash), then the shell."""
    out = Path('/tmp/it\'s $(touch x) `y` "50%" %n;&|')
    *_, line, _ = crontab.block(out, schedule_of(), ZoneInfo("UTC"), NOW).splitlines()
    when, command = line.split(" ", 5)[:5], line.split(" ", 5)[5]
    assert when == ["0", "10", "*", "*", "*"]
    assert "%" not in command.replace("\\%", "")
    words = shlex.split(command.replace("\\%", "%"))
    assert words[: words.index("--out") + 2][-1] == str(out)
    assert words[0] == sys.executable


def test_a_line_break_in_a_folder_is_refused(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        crontab.block(Path("/tmp/a\n* * * * * evil"), schedule_of(), ZoneInfo("UTC"), NOW)
    assert str(caught.value) == golden


def _private_spool() -> str | None:
    """Why the real crontab cannot be tried on a spool of its own."""
    if shutil.which("crontab") is None:
        return "crontab is not installed"
    if os.geteuid() != 0:
        return "only root can mount a private spool"
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "no mount namespace can be made here"


def test_the_real_crontab_takes_and_gives_back_the_block(tmp_path: Path) -> None:
    """In a mount namespace with an empty spool: this host's crontabs are not seen and not touched."""
    if (reason := _private_spool()) is not None:
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom test_crontab import OTHERS, schedule_of\n"
        "from paceline.campaign.schedule.timers import crontab\n"
        "crontab._write(OTHERS)\n"
        'out = Path("/tmp/it\'s 50% $(x)")\n'
        "crontab.install(out, schedule_of()); print(crontab._read())\n"
        "crontab.remove(out, schedule_of()); assert crontab._read() == OTHERS, crontab._read()\n"
    )
    inside = 'mount -t tmpfs none /var/spool/cron/crontabs && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", inside, "sh", sys.executable, str(program), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "# begin paceline-nightly-" in done.stdout
    assert done.stdout.startswith(OTHERS)
