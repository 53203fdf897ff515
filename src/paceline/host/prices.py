"""GPU-hour prices: the table of published prices and the user's own, each with its source."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RequestError, did_you_mean, require
from paceline.host import machine

ON_DEMAND, SPOT, GIVEN = "on demand", "spot", "as given"
# The name of a price that is a number on the command line.
OWN = "own"
KINDS = (ON_DEMAND, SPOT, GIVEN)
# Values outside this range are mistakes of units: the cheapest device costs more, a rack of the dearest less.
LOWEST_USD, HIGHEST_USD = 1e-4, 1e5
_RANGE = f"from {LOWEST_USD} to {HIGHEST_USD:g}"
_ACCEPTED = f"USD per GPU-hour ({_RANGE}), a .toml file of prices, or a name from `paceline list prices`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """USD for one GPU for one hour. gpu is None if the price applies to any device; other Nones are unknown."""

    name: str
    usd_per_gpu_hour: float
    kind: str = GIVEN
    provider: str | None = None
    gpu: str | None = None
    instance: str | None = None
    region: str | None = None
    source: str | None = None
    date: str | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "usd_per_gpu_hour":
                number = isinstance(value, int | float) and not isinstance(value, bool)
                require(number and _is_price(value), "usd_per_gpu_hour", value, f"a number {_RANGE}")
            else:
                required = field.name in ("name", "kind")
                text = isinstance(value, str) and bool(value.strip())
                require(text or (value is None and not required), field.name, value, "text")
        require(self.kind in KINDS, "kind", self.kind, ", ".join(KINDS))

    def holds_for(self, gpu: str | None) -> bool:
        """Whether the price applies to this GPU, by any of its names in the GPU table."""
        if self.gpu is None:
            return True
        if gpu is None:
            return False
        row = machine.gpu_row(self.gpu)
        return (row is not None and row is machine.gpu_row(gpu)) or self.gpu.casefold() == gpu.casefold()

    @property
    def title(self) -> str:
        """`aws-h200, on demand`; `the given price` for a number on the command line."""
        if self.name == OWN:
            return "the given price"
        return self.name if self.kind == GIVEN else f"{self.name}, {self.kind}"

    @property
    def origin(self) -> str:
        """`oci-a10: 2 USD per GPU-hour on demand (Oracle Cloud price list, 2025-06)`."""
        where = ", ".join(filter(None, (self.source, self.date)))
        kind = "" if self.kind == GIVEN else f" {self.kind}"
        return f"{self.name}: {self.usd_per_gpu_hour:g} USD per GPU-hour{kind}" + (f" ({where})" if where else "")


def _is_price(usd_per_gpu_hour: float) -> bool:
    return LOWEST_USD <= usd_per_gpu_hour <= HIGHEST_USD


@functools.cache
def table() -> tuple[Price, ...]:
    """The published prices shipped with Paceline."""
    return read(Path(__file__).parent / "prices.toml")


def read(path: Path) -> tuple[Price, ...]:
    """All rows of a price file, in order; an invalid file is rejected with the row at fault."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"--price: got {str(path)!r}, which cannot be read ({error.strerror}), expected {_ACCEPTED}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"--price: got {str(path)!r}, which is not TOML ({error}), expected {_ACCEPTED}.") from None
    rows = raw.get("price")
    listed = isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
    require(listed and set(raw) == {"price"}, f"--price: {path}", sorted(raw), "one or more tables [[price]]")
    prices, fields = [], [field.name for field in dataclasses.fields(Price)]
    for number, row in enumerate(rows or (), 1):
        where = f"--price: {path}, row {number}"
        unknown = next((key for key in row if key not in fields), None)
        require(unknown is None, where, unknown, ", ".join(fields))
        for needed in ("name", "usd_per_gpu_hour"):
            require(needed in row, where, f"no {needed}", f"at least name and usd_per_gpu_hour, of {', '.join(fields)}")
        values = {key: value.isoformat() if hasattr(value, "isoformat") else value for key, value in row.items()}
        try:
            prices.append(Price(**values))
        except RequestError as error:
            raise RequestError(f"{where}, {error}") from None
    names = [price.name for price in prices]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"--price: {path}, name", twice, "a different name in every row")
    return tuple(prices)


def chosen(text: str) -> tuple[Price, ...]:
    """The prices selected by `--price TEXT`: a number for every device, the rows of a file, or one row of the table."""
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None:
        require(_is_price(number), "--price", text, _ACCEPTED)
        return (Price(name=OWN, usd_per_gpu_hour=number, source="given with --price"),)
    if text.endswith(".toml"):
        return read(Path(text))
    known = {price.name: price for price in table()}
    if text not in known:
        raise RequestError(f"--price: got {text!r}, expected {_ACCEPTED}.{did_you_mean(text, known)}")
    return (known[text],)


def summaries() -> dict[str, str]:
    """Every price as `paceline list prices` shows it."""
    return {
        p.name: f"{p.usd_per_gpu_hour:>7.3f} USD per GPU-hour {p.kind}, {p.gpu}, {p.instance}, {p.date} ({p.source})"
        for p in table()
    }
