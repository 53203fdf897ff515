"""How findings read inside a sentence: names in a row, names cut short, a ratio with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.wording import DIGITS_OF_RATIO, format_own, places


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; empty of none."""
    known = list(names)
    return f"{', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else "".join(known)


def ratio_words(ratio: float, low: float, high: float) -> tuple[str, str]:
    """`1.34` and ` (95 % interval 1.31 to 1.37)`: as many digits as the interval supports, the same everywhere.

    The interval is empty where both ends print alike: it would say no more than the ratio.
    """
    digits = min(max(places(ratio, low, high) - 1, 1), DIGITS_OF_RATIO)
    value, start, end = (format_own(x, digits) for x in (ratio, low, high))
    return value, f" (95 % interval {start} to {end})" if start != end else ""


def short_names(series: Sequence[str]) -> dict[str, str]:
    """Each series by the words that the others lack; the first word where it has none of its own."""
    words = {name: name.split(", ") for name in series}
    shared = set.intersection(*map(set, words.values())) if words else set()
    return {name: ", ".join(w for w in found if w not in shared) or found[0] for name, found in words.items()}
