"""Verbs that only read start without torch: checked in a process of its own, where nothing else imported it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.experiment.spec import RunSpec

# What is imported stays: the first verb after which there is a heavy package has imported it.
PROBE = """
import json, sys
from paceline import cli
rows = []
for arguments in json.loads(sys.argv[1]):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    rows.append([arguments, code, sorted({"torch", "deepspeed", "transformers"} & set(sys.modules))])
print()
print(json.dumps(rows))
"""


def test_reading_verbs_do_not_import_torch(
    tmp_path: Path, make_spec: Callable[..., RunSpec], make_run: Callable[..., Path]
) -> None:
    run, results = make_run(tmp_path, make_spec("ddp")), str(tmp_path / "test")
    # None: whatever the machine says. The run has no reference, so its report is of an invalid one.
    codes: dict[tuple[str, ...], int | None] = {
        ("--help",): 0,
        ("run", "--help"): 0,
        ("list", "strategies"): 0,
        ("list", "metrics"): 0,
        ("list", "presets"): 0,
        ("plan", "quick", "--set", "device=cpu"): 0,
        ("doctor",): None,
        ("report", results): 1,
        ("show", str(run)): 0,
        ("compare", results, results): None,
        ("status", "--out", results): 0,
    }
    command = [sys.executable, "-c", PROBE, json.dumps(list(codes))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row[0], row[2]) for row in rows] == [(list(arguments), []) for arguments in codes]
    wrong = [row for row, expected in zip(rows, codes.values(), strict=True) if expected not in (None, row[1])]
    assert not wrong


def test_help_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; from paceline import cli; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    third_party = {"numpy", "rich", "pydantic", "yaml", "matplotlib", "psutil", "torch"}
    assert not third_party & set(done.stdout.replace("'", "").strip("[]\n").split(", "))
