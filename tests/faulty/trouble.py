"""DDP in which the last rank gets into trouble at step 2, as its option `how` says."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import Options as DdpOptions
from paceline.training.strategies.ddp import wrap as wrap_ddp

TROUBLED_STEP = 2


@dataclass(frozen=True)
class Options(DdpOptions):
    """how: one of the names in `TROUBLES`, or `slow`: FAULTY_SLEEP_S more for every micro batch."""

    how: str = "raise"


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    from dataclasses import replace

    from paceline.experiment.choices import Choice

    assert spec.strategy is not None
    how = parse_options(Options, spec.strategy).how
    trainer: Any = wrap_ddp(replace(spec, strategy=Choice("ddp")), seat)
    forward, first = trainer.forward, []

    def troubled(tokens: Any, labels: Any, normaliser: Any, last: bool) -> Any:
        if how == "slow":
            time.sleep(float(os.environ.get("FAULTY_SLEEP_S", "0.5")))
        elif trainer.updates == TROUBLED_STEP and seat.rank == seat.world_size - 1 and not first:
            first.append(True)
            labels = TROUBLES[how](labels)
            if how == "nan":
                return forward(tokens, labels, normaliser * 0, last) * float("nan")
        return forward(tokens, labels, normaliser, last)

    trainer.forward = troubled
    return trainer  # type: ignore[no-any-return]


def _raise(_labels: Any) -> Any:
    raise ValueError("made up by a test\nwith a second line")


def _oom(_labels: Any) -> Any:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB (made up by a test)")


def _kill(_labels: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_labels: Any) -> Any:
    os._exit(7)


def _sleep(_labels: Any) -> Any:
    time.sleep(10_000)


def _suspend(_labels: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


TROUBLES = {"raise": _raise, "oom": _oom, "kill": _kill, "exit": _exit, "sleep": _sleep, "suspend": _suspend}
TROUBLES["nan"] = lambda labels: labels
