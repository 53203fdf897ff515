"""Numbers and verdicts for people: familiar units, rounded to the uncertainty. Missing is a dash, never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DETECTABLE = "smallest detectable difference"
MISSING = "\u2013"
TIMES = "\u00d7"
DIGITS_OF_INTERVAL = 2
LEAST_DIGITS = 3
# With thousands of requests an interval is narrower than day-to-day variation.
MOST_DIGITS = 5
DIGITS_OF_RATIO = 3

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Scale:
    """A displayed unit and the factor from the SI value to it."""

    unit: str
    factor: float = 1.0

    def apply(self, value: float | None) -> float | None:
        """None for a value that is missing or not finite."""
        return value * self.factor if value is not None and math.isfinite(value) else None


def scale_of(unit: str, metric: str = "", values: Iterable[float | None] = ()) -> Scale:
    """Seconds in ms, memory in GiB, traffic in SI multiples of bytes (by the largest value), shares in %."""
    if unit == "s":
        return Scale("ms", 1e3)
    if unit == "ratio":
        return Scale(TIMES) if "speedup" in metric else Scale("%", 100.0)
    if unit == "bytes" and "wire" not in metric and "h2d" not in metric:
        return Scale("GiB", 2.0**-30)
    if unit.startswith("bytes"):
        return _si_scale("B" + unit.removeprefix("bytes"), values)
    return Scale(unit)


def _si_scale(unit: str, values: Iterable[float | None]) -> Scale:
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    size, prefix = next(((size, prefix) for size, prefix in _SI if largest >= size), (1.0, ""))
    return Scale(f"{prefix}{unit}", 1.0 / size)


def places(value: float, low: float | None, high: float | None) -> int:
    """Decimal digits that show two digits of the interval's half width, and between LEAST_DIGITS and MOST_DIGITS
    significant digits of the value. A difference whose interval includes 0 has the digits of its interval.

    >>> places(12345.0, 12290.0, 12400.0), places(0.793, 0.766, 0.821)
    (0, 3)
    """
    if low is None or high is None or high <= low:
        return _places_of(value, LEAST_DIGITS) if value else 0
    of_interval = _places_of((high - low) / 2, DIGITS_OF_INTERVAL)
    if not value:
        return of_interval
    least = of_interval if low < 0 < high else _places_of(value, LEAST_DIGITS)
    return min(max(of_interval, least), _places_of(value, MOST_DIGITS))


def _places_of(value: float, digits: int) -> int:
    """Decimal digits that show this many significant digits of the rounded value.

    >>> _places_of(9.96, 3), _places_of(9.996, 3)  # prints 9.96 and 10.0
    (2, 1)
    """
    return digits - 1 - int(f"{abs(value):.{digits - 1}e}".partition("e")[2])


def format_number(value: float | None, decimal_places: int) -> str:
    """`12,345`; negative digits round before the decimal point."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = round(value, decimal_places) + 0.0  # a negative zero becomes 0
    return f"{rounded:,.{max(decimal_places, 0)}f}"


def format_own(value: float, decimal_places: int) -> str:
    """As format_number, with more digits if needed: a value that is not 0 never reads as 0."""
    return format_number(value, max(decimal_places, _places_of(value, 1)) if value else decimal_places)


def format_parts(
    value: float | None, low: float | None, high: float | None, scale: Scale | None = None
) -> tuple[str, str]:
    """The value and its interval as two texts; the interval is empty if it is unknown or has no width."""
    scale = scale or Scale("")
    value, low, high = scale.apply(value), scale.apply(low), scale.apply(high)
    if value is None:
        return MISSING, ""
    digits = places(value, low, high)
    return format_own(value, digits), _interval(low, high, digits)


def _interval(low: float | None, high: float | None, digits: int) -> str:
    if low is None or high is None or low == high:
        return ""
    return f"[{format_own(low, digits)}, {format_own(high, digits)}]"


def format_quantity(
    value: float | None, low: float | None, high: float | None, unit: str, metric: str = "", scale: Scale | None = None
) -> str:
    """One text with interval and unit: `12,345 [12,290, 12,400] tokens/s`; unit is the SI one of the measurement."""
    scale = scale or scale_of(unit, metric, (value,))
    number, interval = format_parts(value, low, high, scale)
    if number == MISSING:
        return MISSING
    glue = "" if scale.unit == TIMES else " "
    return f"{number}{glue}{scale.unit}".strip() if not interval else f"{number} {interval} {scale.unit}".strip()


def format_si(value: float, unit: str) -> str:
    """A hardware fact with its prefix: `989 TFLOP/s`."""
    return format_quantity(value, None, None, unit, scale=_si_scale(unit, (value,)))


def format_duration(seconds: float) -> str:
    """Wall time for people: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_PREFIXES = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def short_count(count: int) -> str:
    """`1.5B`; a number without a short form is written out."""
    size, prefix = next(((s, p) for s, p in _PREFIXES if count >= s), (1, ""))
    short = f"{count / size:g}{prefix}"
    return short if float(f"{count / size:g}") * size == count else f"{count:,}"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; empty of none."""
    known = list(names)
    return f"{', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else "".join(known)


def percent_words(ratio: float, low: float | None = None, high: float | None = None) -> tuple[str, str]:
    """The distance of a ratio from 1, and its interval in the direction of the ratio; no interval if both ends print
    alike.

    >>> percent_words(1.345, 1.312, 1.371), percent_words(0.965, 0.955, 0.975)
    (('34 %', '31 to 37 %'), ('3.5 %', '2.5 to 4.5 %'))
    """
    percent, sign = abs(ratio - 1) * 100, 1 if ratio >= 1 else -1
    digits = 0 if percent >= 10 else 1
    ends = () if low is None or high is None else sorted(sign * (end - 1) * 100 for end in (low, high))
    shown = dict.fromkeys(format_own(end, digits) for end in ends)
    return f"{format_own(percent, digits)} %", f"{' to '.join(shown)} %" if len(shown) > 1 else ""


def metric_words(metric: str, unit: str = "") -> str:
    """A metric for people: its name without the unit, except rates; that of a throughput is its unit, where known.

    >>> metric_words("output_tokens_per_s"), metric_words("peak_memory_bytes"), metric_words("ttft_p99_s")
    ('output tokens/s', 'peak memory', 'ttft p99')
    >>> metric_words("tokens_per_s", "samples/s")
    'samples/s'
    """
    if metric == "tokens_per_s" and unit:
        return unit
    name = metric.replace("_per_s", "/s")
    for unit in ("_bytes", "_ratio", "_s"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def direction(metric: str, ratio: float) -> str:
    """The word for a change of a metric by this ratio.

    >>> direction("tokens_per_s", 0.79), direction("peak_memory_bytes", 0.79)
    ('slower', 'lower')
    """
    if metric.endswith("_per_s") and metric != "max_rate_per_s":
        return "faster" if ratio > 1 else "slower"
    return "higher" if ratio > 1 else "lower"


def verdict_text(
    verdict: str | None,
    ratio: float,
    low: float | None,
    high: float | None,
    word: str,
    detectable_ratio: float | None = None,
) -> tuple[str, str]:
    """A verdict for people, and its ratio with the interval. verdict is the stored one: better, worse, equal,
    inconclusive or None.

    >>> verdict_text("worse", 0.793, 0.766, 0.821, "slower")
    ('21 % slower', '0.79x [0.77, 0.82]')
    >>> verdict_text("equal", 1.004, 0.992, 1.016, "faster")
    ('equal (within 2 %)', '1.00x [0.99, 1.02]')
    >>> verdict_text("inconclusive", 0.576, 0.338, 0.977, "slower", 0.45)
    ('inconclusive', '0.58x [0.34, 0.98], smallest detectable difference 45 %')
    """
    digits = min(max(places(ratio, low, high) - 1, 1), DIGITS_OF_RATIO)
    number = f"{format_own(ratio, digits)}x {_interval(low, high, digits)}".strip()
    if verdict is None:
        return "no verdict", number
    if verdict == "equal":
        return "equal" if low is None or high is None else f"equal ({within_words([(low, high)])})", number
    if verdict == "inconclusive":
        detectable = f", {DETECTABLE} {short_percent(detectable_ratio)}" if detectable_ratio else ""
        return verdict, f"{number}{detectable}"
    return f"{percent_words(ratio)[0]} {word}", number


# From here on a factor reads better than percent: 15 times as fast, and not 1,400 % faster.
FACTOR = 3.0
# By metric, from the side of the better one.
_MARGINS = {
    "tokens_per_s": "{best} is {size} faster than {other}",
    "output_tokens_per_s": "{best} is {size} faster than {other}",
    "step_time_s": "A step of {best} takes {size} less time than one of {other}",
    "peak_memory_bytes": "{best} needs {size} less peak memory than {other}",
    "usd_per_mtok": "A {counted} of {best} costs {size} less than one of {other}",
    "scaling_efficiency_ratio": "{best} scales {size} better than {other}",
}


def margin_sentence(
    metric: str,
    best: str,
    other: str,
    ratio: float,
    low: float | None,
    high: float | None,
    *,
    interval: bool = True,
    counted: str = "token",
) -> str:
    """How far the better of two is from the other, without a full stop; the ratio is from the side of the better one.
    counted: what a cost is of.

    >>> margin_sentence("tokens_per_s", "ddp", "fsdp2 on 4 GPUs", 1.345, 1.312, 1.371)
    'ddp is 34 % faster than fsdp2 on 4 GPUs (95 % interval 31 to 37 %)'
    >>> margin_sentence("tokens_per_s", "ddp", "mesh:tp=2", 15.1, 6.6, 34.9)
    'ddp is 15 times as fast as mesh:tp=2 (95 % interval 6.6 to 35)'
    >>> margin_sentence("peak_memory_bytes", "fsdp2", "ddp", 0.75, 0.75, 0.75)
    'fsdp2 needs 25 % less peak memory than ddp'
    """
    if ratio >= FACTOR and "faster" in _MARGINS[metric]:
        span = "" if low is None or high is None or low == high else f"{factor(low)} to {factor(high)}"
        text = f"{best} is {factor(ratio)} times as fast as {other}"
    else:
        size, span = percent_words(ratio, low, high)
        text = _MARGINS[metric].format(best=best, other=other, size=size, counted=counted)
    return f"{text} (95 % interval {span})" if span and interval else text


def factor(ratio: float) -> str:
    """Two significant digits, without an exponent.

    >>> factor(15.12), factor(1234.5)
    ('15', '1,200')
    """
    return f"{float(f'{ratio:.2g}'):,.10g}"


def speed_clause(verdict: str, ratio: float, than: str = "") -> str:
    """A speed against another one as a part of a sentence; verdict is the stored one, as in `verdict_text`.

    >>> speed_clause("better", 1.25, "bf16"), speed_clause("equal", 1.004, "bf16"), speed_clause("inconclusive", 0.98)
    ('25 % faster than bf16', 'speed equal to bf16', 'speed inconclusive (-2.0 %)')
    """
    if verdict == "equal":
        return f"speed equal to {than}" if than else "speed equal"
    if verdict == "inconclusive":
        return f"speed inconclusive ({'+' if ratio >= 1 else '-'}{percent_words(ratio)[0]})"
    if ratio >= FACTOR:
        return f"{factor(ratio)} times as fast{f' as {than}' if than else ''}"
    return f"{percent_words(ratio)[0]} {'faster' if ratio > 1 else 'slower'}{f' than {than}' if than else ''}"


def equal_sentence(names: str, intervals: Iterable[tuple[float, float]]) -> str:
    """
    >>> equal_sentence("ddp and fsdp2", [(0.992, 1.013)])
    'ddp and fsdp2 are equal (within 2 %)'
    """
    return f"{names} are equal ({within_words(intervals)})"


def within_words(intervals: Iterable[tuple[float, float]]) -> str:
    """How far ratios are from 1 at most, by their intervals.

    >>> within_words([(0.992, 1.004), (0.998, 1.013)])
    'within 2 %'
    """
    return f"within {max(math.ceil(max(max(high - 1, 1 - low) for low, high in intervals) * 100 - 1e-6), 1)} %"


def inconclusive_sentence(names: str, detectable_ratio: float | None, launches_needed: int | None = None) -> str:
    """
    >>> inconclusive_sentence("ddp and fsdp2", 0.045, 12)
    'Inconclusive: ddp and fsdp2; smallest detectable difference 4.5 %; about 12 launches of each would decide'
    """
    return "; ".join((f"Inconclusive: {names}", *undecided_parts(detectable_ratio, launches_needed)))


def undecided_parts(detectable_ratio: float | None, launches_needed: int | None) -> list[str]:
    """What the data could have shown, and how many launches would decide; nothing if it is unknown."""
    if not detectable_ratio:
        return []
    needed = [] if launches_needed is None else [f"about {launches_needed} launches of each would decide"]
    return [f"{DETECTABLE} {short_percent(detectable_ratio)}", *needed]


def short_names(series: Sequence[str]) -> dict[str, str]:
    """Each series by the parts of its name that not all share; its first part if there are none."""
    words = {name: name.split(", ") for name in series}
    shared = set.intersection(*map(set, words.values())) if words else set()
    return {name: ", ".join(w for w in found if w not in shared) or found[0] for name, found in words.items()}


_BINARY = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_size(size_bytes: float) -> str:
    """`8 B`, `4 KiB`, `1.5 MiB`: powers of two read as such."""
    scale, unit = next(((s, u) for s, u in _BINARY if size_bytes >= s), (1, "B"))
    return f"{size_bytes / scale:.4g} {unit}"


def short_percent(ratio: float) -> str:
    """`5.8 %`: two significant digits, without an exponent.

    >>> short_percent(0.0583), short_percent(2.514), short_percent(1e9)
    ('5.8 %', '251 %', 'over 1,000 %')
    """
    percent = ratio * 100
    if percent > 1000:
        return "over 1,000 %"
    return f"{percent:.2g} %" if percent < 99.5 else f"{percent:.0f} %"


def percent_up(bound: float | None) -> str:
    """A ratio in percent, rounded up to a tenth: an upper bound stays one."""
    if bound is None:
        return MISSING
    return f"{max(math.ceil(bound * 1000 - 1e-6), 1) / 10:g}"
