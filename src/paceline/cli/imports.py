"""The verb that takes in what others published."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.verbs import DEFAULT_OUT, OK, add_verb


def add_verbs(verbs: Any) -> None:
    text = "a published table as claimed runs, to see what can be concluded from it; nothing ranks them"
    verb = add_verb(verbs, "import", import_claims, text)
    verb.add_argument("table", type=Path, metavar="CSV", help="one row per claimed run; see docs/seed-table.md")
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="results folder (default: %(default)s)")


def import_claims(arguments: argparse.Namespace) -> int:
    from paceline.results.claims import import_table

    directory, count = import_table(arguments.table, arguments.out)
    print(f"{count} claimed runs in {directory}; next: paceline report {directory}")
    return OK
