"""Every verb works where the locale knows ASCII only, and results hold more than that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import overview
from paceline.results.records import Status

Make = Callable[..., Any]
CODE = """
import json, os, sys
from paceline import cli
from paceline.cli import overview
assert (sys.stdout.encoding, sys.flags.utf8_mode) == ("ascii", 0), sys.stdout.encoding
for request in json.loads(sys.argv[1]):
    # As Python decodes the words of a command line.
    arguments = [os.fsdecode(word.encode()) for word in request]
    print("VERB", *arguments, flush=True)
    try:
        print("CODE", cli.main(arguments), flush=True)
    except SystemExit as end:
        print("CODE", end.code, flush=True)
"""


@pytest.fixture
def verbs(tmp_path: Path, make_spec: Make, make_run: Make, reseal: Make) -> dict[str, tuple[list[str], int | set[int]]]:
    """A request for each verb that starts nothing and ends by itself, and its exit code."""
    out = tmp_path / "Zürich"
    run_dir = make_run(out, make_spec("ddp", 1), Status.FAILED, "no number: Zürich")
    other = make_run(tmp_path / "other", make_spec("ddp", 1))
    yaml = tmp_path / "größe.yaml"
    yaml.write_text("name: x\ndescription: größe\nbase: {model: tiny, strategy: ddp, device: cpu}\n", encoding="utf-8")
    table = tmp_path / "claims.csv"
    table.write_text(
        "source,strategy,model,gpu,world_size,sequence_length,micro_batch,tokens_per_s\nZürich,ddp,tiny,A10G,1,32,1,5\n",
        encoding="utf-8",
    )
    target = str(tmp_path / "c.tar.gz")
    return {
        "plan": (["plan", str(yaml), "--out", str(out)], 0),
        "status": (["status", "--out", str(out)], 0),
        "report": (["report", str(out)], 1),
        "show": (["show", str(run_dir)], 0),
        "logs": (["logs", str(run_dir)], 0),
        "compare": (["compare", str(out), str(other.parent)], 2),
        "history": (["history", str(out)], 0),
        "capsule": (["capsule", str(out), target], 0),
        "replay": (["replay", target, "--dry-run", "--out", str(tmp_path / "again")], 2),
        "import": (["import", str(table), "--out", str(tmp_path / "claimed")], 0),
        # 1 on a busy machine.
        "doctor": (["doctor"], {0, 1}),
        "cluster": (["cluster", "init"], 0),
        "list": (["list", "presets"], 0),
        "run": (["run", str(yaml.with_name("größer.yaml"))], 2),
    }  # fmt: skip


def test_every_verb_prints_what_an_ascii_terminal_can_show(
    verbs: dict[str, tuple[list[str], int | set[int]]], environment: Make
) -> None:
    requests = [["--help"], *([name, "--help"] for name in _names()), *(request for request, _ in verbs.values())]
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(requests)], env=env, capture_output=True, timeout=120, check=False
    )
    shown = done.stdout.decode("ascii")
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")[-3000:]
    codes = {part.split()[0]: int(part.rpartition("CODE")[2]) for part in shown.split("VERB ")[-len(verbs) :]}
    wanted = {name: code if isinstance(code, set) else {code} for name, (_, code) in verbs.items()}
    assert codes.keys() == wanted.keys()
    assert {name: code for name, code in codes.items() if code not in wanted[name]} == {}
    assert "Z?rich" in shown


def _names() -> list[str]:
    return [name for names in overview.VERBS.values() for name in names]
