"""Exporters: each writes a report for one kind of reader. They print findings and conclude nothing.

A module is a plugin; modules with an underscore are shared parts. Of `analysis` they import only `findings`, and of
`report` the sections, tables, charts and text. Start with `json`, or with `html` (the page).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.analysis.findings import Report

if TYPE_CHECKING:
    from pathlib import Path


class Exporter(Protocol):
    """An exporter that needs a package or a folder of its own also has `check(directory)`, which raises a RequestError
    before any exporter writes anything."""

    def export(self, report: Report, directory: Path) -> list[Path]: ...
