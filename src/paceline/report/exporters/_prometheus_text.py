"""Prometheus' text exposition format 0.0.4: families of gauges and counters with HELP, TYPE and escaped labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.errors import Scalar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "paceline_"
UNITS = {"s": "seconds", "w": "watts", "c": "celsius", "hz": "hertz", "j": "joules"}


@dataclass(slots=True)
class Family:
    """All samples of one name. kind is gauge or counter; of equal labels the last value is kept."""

    name: str
    help: str
    kind: str = "gauge"
    samples: dict[str, float] = field(default_factory=dict)

    def add(self, value: float | None, labels: Mapping[str, Scalar] | None = None) -> None:
        """What is missing has no sample: a zero would be a measurement."""
        if value is not None:
            self.samples[_labels(labels or {})] = float(value)


def render(families: Iterable[Family]) -> str:
    """Families without a sample are left out."""
    return "".join(f"{line}\n" for family in families if family.samples for line in _lines(family))


def metric_name(text: str) -> str:
    """Our prefix, then letters, digits and _, with units spelled out as Prometheus asks: tokens_per_s is
    paceline_tokens_per_second. A colon is allowed by the format but reserved for recording rules."""
    words = re.sub(r"[^a-zA-Z0-9_]", "_", text).split("_")
    pairs = zip(("", *words), words, strict=False)
    return PREFIX + "_".join("second" if pair == ("per", "s") else UNITS.get(pair[1], pair[1]) for pair in pairs)


def _lines(family: Family) -> Iterator[str]:
    name = metric_name(family.name)
    help_text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value in family.samples.items():
        yield f"{name}{labels} {_number(value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _labels(labels: Mapping[str, Scalar]) -> str:
    """An empty label means the same to Prometheus as none, so missing ones are left out."""
    shown = [f'{_label_name(name)}="{_escaped(_text(v))}"' for name, v in labels.items() if v not in (None, "")]
    return "{" + ",".join(shown) + "}" if shown else ""


def _label_name(text: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_]", "_", text)
    return name if re.match(r"[a-zA-Z]", name) else f"label_{name}"


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
