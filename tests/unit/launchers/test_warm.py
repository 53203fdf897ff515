"""What makes a process unfit to fork ranks, and which process serves then; interpreters without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks ranks")

BEGIN = """
import sys, threading, types
from paceline.launchers import _warm
cuda = types.SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: False, is_available=None)
sys.modules["torch.cuda"] = cuda
_warm.DEVICES = (sys.argv[1],)
"""


def printed_by(code: str, folder: Path) -> list[str]:
    words = [sys.executable, "-c", BEGIN + code, str(folder / "nvidia")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return [*(done.stdout + done.stderr).splitlines(), f"exit code {done.returncode}"]


def test_a_process_with_cuda_a_device_or_a_thread_is_unfit(tmp_path: Path) -> None:
    code = """
print(_warm.why_unfit("cpu"), _warm.why_unfit("cuda"))
cuda._is_in_bad_fork = lambda: True
print(_warm.why_unfit("cuda"))
cuda._is_in_bad_fork, cuda.is_initialized = lambda: False, lambda: True
print(_warm.why_unfit("cuda"))
with open(sys.argv[1] + "0", "w"):
    print(_warm.why_unfit("cpu"), _warm.why_unfit("cuda"))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(_warm.why_unfit("cpu"))
"""
    started = "the imports have started CUDA, and CUDA does not survive a fork"
    assert printed_by(code, tmp_path) == [
        "None None",
        started,
        started,
        f"None the imports have opened {tmp_path / 'nvidia0'}, and CUDA does not survive a fork",
        "2 threads run after the imports, and only one survives a fork",
        "exit code 0",
    ]


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("lambda: None", ["the child goes on: None", "exit code 7"]),
        ("lambda: 1 / 0", ["the parent goes on: ZeroDivisionError: division by zero", "exit code 8"]),
        (
            "threading.Thread(target=threading.Event().wait, daemon=True).start",
            ["the parent goes on: 2 threads run after the imports, and only one survives a fork", "exit code 8"],
        ),
        ("lambda: os.kill(os.getpid(), 9)", ["exit code -9"]),
    ],
    ids=["fit", "an error", "a thread", "killed"],
)
def test_the_process_before_the_imports_serves_in_place_of_an_unfit_one(
    imports: str, expected: list[str], tmp_path: Path
) -> None:
    """One that is killed ends the other in the same way, so that the controller sees it."""
    code = f"""
import os
first = os.getpid()
why = _warm.go_on_with({imports}, "cuda")
print("the", "parent" if os.getpid() == first else "child", "goes on:", why, flush=True)
os._exit(8 if os.getpid() == first else 7)
"""
    assert printed_by(code, tmp_path) == expected


def test_modules_that_ask_for_a_gpu_get_an_answer_without_the_driver(tmp_path: Path) -> None:
    """Only while they are imported, and only for ranks on a GPU."""
    (tmp_path / "asks.py").write_text("import sys\nanswer = sys.modules['torch.cuda'].is_available()\n")
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
cuda.is_available = lambda: "asked the driver"
for device in "cuda", "cpu":
    _warm.preload(_warm.Kind(device), ["asks"])
    print(sys.modules.pop("asks").answer, cuda.is_available())
"""
    assert printed_by(code, tmp_path) == ["True asked the driver", "asked the driver asked the driver", "exit code 0"]


def test_variables_that_modules_set_do_not_reach_the_ranks(tmp_path: Path) -> None:
    """torch's compiler sets one; it would be a difference between forked ranks and new interpreters."""
    (tmp_path / "sets.py").write_text("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = '/cache'\n")
    code = f"""
import os
sys.path.insert(0, {str(tmp_path)!r})
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
_warm.preload(_warm.Kind("cuda"), ["sets"])
print("sets" in sys.modules, "TORCHINDUCTOR_CACHE_DIR" in os.environ)
"""
    assert printed_by(code, tmp_path) == ["True False", "exit code 0"]
