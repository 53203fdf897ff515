"""Verbs that set results beside other results: two folders, or one folder over time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.verbs import OK, add_verb, console


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "compare", compare, "two result folders, cell by cell, with intervals and verdicts")
    verb.add_argument("a", type=Path, metavar="DIR_A")
    verb.add_argument("b", type=Path, metavar="DIR_B")


def compare(arguments: argparse.Namespace) -> int:
    from paceline import present
    from paceline.analysis.compare import compare_experiments
    from paceline.run import read_experiment

    (a, skipped_a), (b, skipped_b) = read_experiment(arguments.a), read_experiment(arguments.b)
    found = compare_experiments(a, b)
    screen = console()
    screen.print(present.comparison_table(found.comparisons, str(arguments.a), str(arguments.b)))
    lines = [f"only in {arguments.a}: {name}" for name in found.only_a]
    lines += [f"only in {arguments.b}: {name}" for name in found.only_b]
    for line in (*lines, *(f"skipped: {text}" for text in (*skipped_a, *skipped_b))):
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK
