"""The experiment that repeats one cell: every field that was asked, none left to a default that may change."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from paceline.analysis.findings import Recipe
from paceline.experiment import recipe
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord


def recipes(records: Iterable[RunRecord]) -> tuple[Recipe, ...]:
    """One per cell in the order of its first run; references follow from the cells that need them."""
    specs: dict[str, list[RunSpec]] = {}
    for record in records:
        if not record.is_reference:
            specs.setdefault(record.spec.cell, []).append(record.spec)
    return tuple(_recipe(found[0], repeats=max(spec.repeat for spec in found) + 1) for found in specs.values())


def _recipe(spec: RunSpec, repeats: int) -> Recipe:
    # A name of its own: runs of the same name in the same folder are sealed, so nothing would run.
    name = f"{spec.run_id.rpartition(f'-r{spec.repeat}-')[0]}-{spec.cell[:8]}"
    asked = {field: value for field, value in recipe.fields(spec).items() if value is not None}
    document = {"name": name, "repeats": repeats, "base": asked}
    return Recipe(
        cell=spec.cell,
        file=f"{name}.yaml",
        experiment=yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000),
        command=f"paceline run {name}.yaml",
    )
