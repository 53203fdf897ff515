"""The verb that answers where nothing was measured: what would fit, by arithmetic."""

from __future__ import annotations

import argparse
from typing import Any

from paceline.cli.verbs import OK, add_verb, console


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "advise", advise, "rule of thumb: which strategies fit a model on GPUs nobody measured")
    verb.add_argument(
        "--model", required=True, metavar="NAME", help="`paceline list models`; options as name:key=value"
    )
    verb.add_argument(
        "--gpu", required=True, metavar="NAME", help="`paceline list gpus`; of several alike the smallest"
    )
    verb.add_argument("--gpus", required=True, type=int, metavar="N", help="how many of them")
    verb.add_argument("--sequence-length", type=int, metavar="TOKENS", help="default: the model's own, 4096 at most")


def advise(arguments: argparse.Namespace) -> int:
    from paceline.analysis.training import rules_of_thumb
    from paceline.experiment.choices import Choice
    from paceline.report.tables import verdicts
    from paceline.report.terminal import Fitted

    found = rules_of_thumb.advise(
        Choice.parse(arguments.model), arguments.gpu, arguments.gpus, sequence_length=arguments.sequence_length
    )
    screen = console()
    screen.print(Fitted(verdicts.advice(found)))
    return OK
