"""From the design block of an experiment to its cells: factors of the file and the command line, then every point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import require
from paceline.experiment import factorial, recipe, variables
from paceline.experiment.factorial import Design, Level
from paceline.experiment.fields import Cell, DesignFields, validate
from paceline.experiment.spec import NO_CELL, RunSpec, check_runs

PREFIX = "design."
# An experiment has one device, and a warm-up is not a single value. Two levels of a field that is not part of the cell
# would be the same run.
NO_FACTORS = ("device", "warmup", variables.FIELD, *NO_CELL)
FACTORS = tuple(name for name in Cell.model_fields if name not in NO_FACTORS)

Fields = Mapping[str, Any]
Make = Callable[[Fields], RunSpec]


def split(given: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the design itself (`design.kind=factorial`), by its fields, and all other settings."""
    own = {key.removeprefix(PREFIX): value for key, value in given.items() if key.startswith(PREFIX)}
    return own, {key: value for key, value in given.items() if not key.startswith(PREFIX)}


def requested(block: DesignFields | None, own: Fields, axes: Fields, fixed: Fields) -> DesignFields | None:
    """The design of the file with the command line applied; None if neither has one.

    A list setting is a factor. A field that is set to one value is no longer a factor, and combined points that change
    it are left out."""
    if block is None and not own:
        return None
    merged = validate(DesignFields, {**(block.model_dump() if block else {}), **own}, "design")
    kept = {name: levels for name, levels in merged.factors.items() if name not in fixed}
    combined = [point for point in merged.combined if not set(point) & set(fixed)]
    return DesignFields(kind=merged.kind, factors={**kept, **axes}, combined=combined, resolution=merged.resolution)


def expand(block: DesignFields, make: Make, keeps: Callable[[Fields], bool]) -> list[RunSpec]:
    """The specs of every point that is not excluded, the baseline first. Each spec has the whole design."""
    accepted = "at least one field with its levels, the baseline first"
    require(bool(block.factors), "design.factors", block.factors, accepted)
    for name, levels in block.factors.items():
        require(_is_factor(name), "design.factors", name, f"env.VARIABLE or one of {', '.join(FACTORS)}")
        require(len(levels) > 1, f"design.factors.{name}", levels, "two levels or more, the baseline first")
    if block.kind == factorial.FACTORIAL:
        check_runs("design.factors", math.prod(len(levels) for levels in block.factors.values()))
    generators = _generators(block) if block.kind == factorial.FRACTIONAL else {}
    first = {name: levels[0] for name, levels in block.factors.items()}
    changed = [name for point in block.combined for name in point if name != "name"]
    spec = make(first)
    design = Design(
        kind=block.kind,
        baseline={name: recipe.setting(spec, name) for name in dict.fromkeys((*block.factors, *changed))},
        levels={name: _levels(name, levels[1:], first, make) for name, levels in block.factors.items()},
        combined=_combined(block, first, make),
        generators=generators,
    )
    points = [*design.points(), *design.combined_points().values()]
    return [replace(make(point), design=design) for point in points if keeps(point)]


def _is_factor(name: str) -> bool:
    return name in FACTORS or name.startswith(variables.PREFIX)


def _generators(block: DesignFields) -> dict[str, tuple[str, ...]]:
    most, count = factorial.MOST_FACTORS, len(block.factors)
    sound = factorial.FEWEST_FACTORS <= count <= most and all(len(v) == 2 for v in block.factors.values())
    accepted = f"{factorial.FEWEST_FACTORS} to {most} factors of two levels each, or kind: factorial"
    require(sound, "design.factors of a fraction", block.factors, accepted)
    chosen = factorial.generators(tuple(block.factors), block.resolution)
    accepted = f"a lower resolution, or kind: factorial; {count} factors have no such fraction"
    require(chosen is not None, "design.resolution", block.resolution, accepted)
    return chosen or {}


def _levels(name: str, others: list[Any], first: Fields, make: Make) -> tuple[Level, ...]:
    """The levels as specs state them (`processes: all` becomes a number). Each level must make a different cell."""
    specs = [make({**first, name: level}) for level in (first[name], *others)]
    distinct = len({spec.cell for spec in specs}) == len(specs)
    require(distinct, f"design.factors.{name}", [first[name], *others], "levels that each make a different cell")
    return tuple(recipe.setting(spec, name) for spec in specs[1:])


def _combined(block: DesignFields, first: Fields, make: Make) -> dict[str, dict[str, Level]]:
    found: dict[str, dict[str, Level]] = {}
    for point in block.combined:
        changes = {name: value for name, value in point.items() if name != "name"}
        known = all(map(_is_factor, changes))
        accepted = f"a name and some of {', '.join(FACTORS)} and env.VARIABLE"
        require(bool(changes) and known, "design.combined", point, accepted)
        spec = make({**first, **changes})
        name = str(point.get("name") or ", ".join(f"{key} {value}" for key, value in changes.items()))
        require(name not in found, "design.combined", name, "a different name for each point")
        found[name] = {key: recipe.setting(spec, key) for key in changes}
    return found
