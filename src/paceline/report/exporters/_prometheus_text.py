"""Prometheus' text exposition format 0.0.4: families of gauges and counters with HELP, TYPE and escaped labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
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
        if value is None:
            return
        shown = []
        for name, label in (labels or {}).items():
            # An empty label means the same to Prometheus as none.
            if label not in (None, ""):
                name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                name = name if re.match(r"[a-zA-Z]", name) else f"label_{name}"
                text = str(label).lower() if isinstance(label, bool) else str(label)
                escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
                shown.append(f'{name}="{escaped}"')
        self.samples["{" + ",".join(shown) + "}" if shown else ""] = float(value)


def render(families: Iterable[Family]) -> str:
    """Families without a sample are left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        name = metric_name(family.name)
        help_text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {family.kind}"]
        for labels, value in family.samples.items():
            if not math.isfinite(value):
                number = "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
            else:
                number = repr(int(value) if value.is_integer() and abs(value) < 2**53 else value)
            lines.append(f"{name}{labels} {number}")
    return "".join(f"{line}\n" for line in lines)


def metric_name(text: str) -> str:
    """Our prefix, then letters, digits and _, with units spelled out as Prometheus asks: tokens_per_s is
    paceline_tokens_per_second. A colon is allowed by the format but reserved for recording rules."""
    words = re.sub(r"[^a-zA-Z0-9_]", "_", text).split("_")
    pairs = zip(("", *words), words, strict=False)
    return PREFIX + "_".join("second" if pair == ("per", "s") else UNITS.get(pair[1], pair[1]) for pair in pairs)
