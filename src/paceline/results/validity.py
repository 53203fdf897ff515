"""Types, ranges and finiteness of what run directories contain, checked in one place when they are read.

The rules follow from the dataclasses of the records: an annotation gives the type, a name the range. A value that
cannot be is never used: a duration that is negative, zero or NaN, a text where a number belongs, a count of -1. Losses
and gradient norms may be NaN or infinite, because a diverged run is a result too; the certificate judges them.

Values are checked by column, which takes a fraction of the time that parsing takes.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

from paceline.host.machine import Gpu, Machine
from paceline.host.topology import Nic, Topology
from paceline.host.usage import HostUsage

# Numbers that may be NaN or infinite.
UNBOUNDED = frozenset({"loss", "losses", "grad_norm", "squares", "found", "expected", "movements", "numbers"})
# Numbers that may be negative: instants relative to a start, differences of clocks, temperatures, foreign settings.
SIGNED = frozenset({"temperature_c", "settings", "optimizer", "groups", "facts", "shape"})
# Durations by which something is divided.
POSITIVE = frozenset({"duration_s", "durations_s", "collective_s", "together_s"})
# Unix time of the year 2286: later times are damage, and calendars fail at some of them.
LATEST_S = 1e10
# A larger whole number does not fit into the arithmetic of floats, and none is measured.
MOST = 2**200
_NUMBERS = frozenset({int, float})


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value may be. low: the smallest number, excluded if `above`. high: the largest. words: the only texts.
    items: the rule for each item of a list or value of a mapping. fields: rules for the keys of a mapping, which must
    have those in needed, and others only if it is open."""

    types: frozenset[type]
    finite: bool = True
    low: float = -math.inf
    above: bool = False
    high: float = math.inf
    items: Rule | None = None
    fields: Mapping[str, Rule] | None = None
    needed: frozenset[str] = frozenset()
    is_open: bool = True
    words: frozenset[str] | None = None

    def fits(self, values: Collection[Any]) -> bool:
        """Whether all values fit."""
        kinds = set(map(type, values))
        if not kinds <= self.types or (self.words is not None and not self.words.issuperset(values)):
            return False
        if kinds & _NUMBERS:
            numbers = [value for value in values if type(value) in _NUMBERS] if kinds - _NUMBERS else values
            if not self._numbers_fit(numbers, kinds):
                return False
        if self.items is not None and list in kinds:
            lists = (value for value in values if type(value) is list)
            if not self.items.fits([*chain.from_iterable(lists)]):
                return False
        return dict not in kinds or self._mappings_fit([value for value in values if type(value) is dict])

    def fits_range(self, low: float, high: float) -> bool:
        """As `fits`, for numbers of one type with this smallest and largest; both are NaN if one is."""
        # Comparisons with NaN are false.
        kind_fits = type(low) in self.types and (
            type(low) is int or not self.finite or (low > -math.inf and high < math.inf)
        )
        if not kind_fits or (self.high < math.inf and high > self.high):
            return False
        return self.low == -math.inf or (low > self.low if self.above else low >= self.low)

    def _numbers_fit(self, numbers: Collection[Any], kinds: Collection[type]) -> bool:
        # First: the size of a whole number decides whether it can be compared with others at all.
        if int in kinds:
            whole = [number for number in numbers if type(number) is int] if float in kinds else numbers
            if not (min(whole) > -MOST and max(whole) < MOST):
                return False
        # A finite sum has finite terms, and is faster than asking for each; sums of finite terms may overflow.
        if self.finite and float in kinds and not (math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))):
            return False
        if self.high < math.inf and max(numbers) > self.high:
            return False
        return self.low == -math.inf or (min(numbers) > self.low if self.above else min(numbers) >= self.low)

    def _mappings_fit(self, mappings: Sequence[dict[str, Any]]) -> bool:
        if self.items is not None and not self.items.fits([*chain.from_iterable(m.values() for m in mappings)]):
            return False
        fields = self.fields or {}
        if not self.is_open and (columns := _columns_of(mappings, fields)) is not None:
            return all(rule.fits(column) for rule, column in zip(fields.values(), columns, strict=True))
        if not all(self.needed <= m.keys() and (self.is_open or m.keys() <= fields.keys()) for m in mappings):
            return False
        return all(rule.fits([m[key] for m in mappings if key in m]) for key, rule in fields.items())

    def problem(self, value: Any, name: str = "") -> str | None:
        """What is wrong with a value, by the name of its field; None if it fits."""
        if self.fits([value]):
            return None
        inner: list[tuple[str, Rule | None, Any]] = []
        if type(value) is list and list in self.types:
            inner = [(f"{name}[{number}]", self.items, item) for number, item in enumerate(value)]
        elif type(value) is dict and dict in self.types:
            rules, dot = self.fields or {}, "." if name else ""
            inner = [(f"{name}{dot}{key}", rules.get(key, self.items), item) for key, item in value.items()]
            if missing := self.needed - value.keys():
                return f"{name}{dot}{min(missing)} is missing"
            if not self.is_open and (unknown := value.keys() - rules.keys()):
                return f"{name}{dot}{min(unknown):.60} is unknown"
        problems = (rule.problem(item, path) for path, rule, item in inner if rule is not None)
        where = f"{name}: " if name else ""
        return next(filter(None, problems), f"{where}got {_short(value)}, expected {self}")

    def __str__(self) -> str:
        if self.words is not None:
            return f"one of {', '.join(sorted(self.words))}"
        words = {str: "text", bool: "true or false", list: "a list", dict: "an object", type(None): "null"}
        expected = [word for kind, word in words.items() if kind in self.types]
        if self.types & _NUMBERS:
            what = "a number" if float in self.types else "a whole number"
            bound = f" {'above' if self.above else 'from'} {self.low:g}" if self.low > -math.inf else ""
            bound += f" to {self.high:g}" if self.high < math.inf else ""
            expected.insert(0, f"{what}{bound}")
        return " or ".join(expected)

    def or_null(self) -> Rule:
        return dataclasses.replace(self, types=self.types | {type(None)})


def _columns_of(mappings: Sequence[dict[str, Any]], names: Collection[str]) -> list[tuple[Any, ...]] | None:
    """The values of each name, if every mapping has all names and no other; None otherwise."""
    if len(names) < 2 or any(len(mapping) != len(names) for mapping in mappings):
        return None
    try:
        return list(zip(*map(itemgetter(*names), mappings), strict=True))
    except KeyError:
        return None


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    # A whole number of thousands of digits cannot even be printed.
    text = f"about 2**{value.bit_length()}" if type(value) is int and abs(value) >= MOST else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@cache
def rule_of(kind: type) -> Rule:
    """The rule of a JSON object with the fields of a dataclass, and no others.

    >>> rule_of(HostUsage).problem({"at_s": -1.0})
    'at_s: got -1.0, expected a number from 0'
    """
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    rules = {field.name: _rule(hints[field.name], field.name) for field in fields}
    if "usage" in rules:
        rules["usage"] = usage_rule().or_null()
    missing = dataclasses.MISSING
    needed = {field.name for field in fields if field.default is missing and field.default_factory is missing}
    return Rule(frozenset({dict}), fields=rules, needed=frozenset(needed), is_open=False)


def _rule(hint: Any, name: str) -> Rule:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [_rule(part, name) for part in inner]
        # Of the parts, at most one kind has more to check than its type.
        main = max(
            parts, key=lambda part: (part.items is not None or part.fields is not None, bool(part.types & _NUMBERS))
        )
        return dataclasses.replace(main, types=frozenset().union(*(part.types for part in parts)))
    if origin in (tuple, list, Sequence):
        return Rule(frozenset({list}), items=_rule(inner[0], name))
    if origin in (dict, Mapping):
        return Rule(frozenset({dict}), items=_rule(inner[1], name))
    if origin is typing.Literal:
        return Rule(frozenset({str}), words=frozenset(inner))
    if hint is Any:
        return Rule(frozenset({str, int, float, bool, list, dict, type(None)}), finite=False)
    if dataclasses.is_dataclass(hint):
        return rule_of(hint)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Rule(frozenset({str}))
    is_signed = name in SIGNED or name in UNBOUNDED or name.endswith("_ns")
    return Rule(
        frozenset({int, float} if hint is float else {hint}),
        finite=name not in UNBOUNDED,
        low=-math.inf if is_signed else 0.0,
        above=name in POSITIVE,
        high=LATEST_S if name.endswith("_at") else math.inf,
    )


def some_of(kind: type) -> Rule:
    """The rule of a JSON object that may have fields of a dataclass, each null or as declared, and others."""
    rules = {name: rule.or_null() for name, rule in (rule_of(kind).fields or {}).items()}
    return Rule(frozenset({dict}), fields=rules)


@cache
def usage_rule() -> Rule:
    """A reading of `HostUsage`. Versions of Paceline differ in its counters, but all of them have its time."""
    rule = some_of(HostUsage)
    at_s = _rule(float, "at_s")
    return dataclasses.replace(rule, fields={**(rule.fields or {}), "at_s": at_s}, needed=frozenset({"at_s"}))


@cache
def machine_rule() -> Rule:
    """The recorded facts of a host. Versions of Paceline differ in what they record."""
    rule = some_of(Machine)
    gpus = Rule(frozenset({list, type(None)}), items=some_of(Gpu))
    topology = some_of(Topology).or_null()
    nics = Rule(frozenset({dict, type(None)}), items=some_of(Nic))
    topology = dataclasses.replace(topology, fields={**(topology.fields or {}), "nics": nics})
    return dataclasses.replace(rule, fields={**(rule.fields or {}), "gpus": gpus, "topology": topology})
