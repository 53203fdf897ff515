"""Concluded about asking again: how a reader repeats one cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What repeats one cell: an experiment of that cell alone, the file to save it as, and the command that runs it.

    Loading the experiment gives the same cell, as often as it was run.
    """

    cell: str
    file: str
    experiment: str
    command: str
