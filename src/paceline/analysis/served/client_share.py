"""How near a load came to the ceiling of its client, as `paceline selftest` had measured it on the same host before.

A load is known by its busiest second, a shorter one by all of its time: a mean over a whole run would hide the burst in
which a client is late. Events are known of answers that came whole, not of all requests that failed on their way, so
that failed ones are named beside the share. It is told beside the verdict and decides nothing: what a client was late
by is measured in the run itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from paceline.analysis.findings.served import CeilingUse
from paceline.analysis.served.loads import Served, Stretch
from paceline.analysis.served.token_times import busiest_second
from paceline.experiment.serving import MOST_CEILING_RATIO
from paceline.results.served_samples import CeilingSample, ClientSample

# The end of the year 9999: a record may hold any number.
LAST_DAY_S = 253_402_300_799.0
SELFTEST = "run `paceline selftest`"


def use_of(served: Served) -> CeilingUse:
    """Of all launches the one nearest to its ceiling; of those whose ceiling is unknown the first, with the reason."""
    uses = list(map(_use, served.stretches))
    known = [use for use in uses if use.ratio is not None]
    if not known:
        return uses[0] if uses else _unknown(None, f"not measured: {SELFTEST}")
    return max(known, key=lambda use: use.ratio or 0.0)


def _use(stretch: Stretch) -> CeilingUse:
    events = _events_per_s(stretch)
    clients = list(_clients(stretch))
    known = (c for c in stretch.record.client_ceilings if c.processes == len(clients) and c.events_per_s > 0)
    ceiling = next(known, None)
    if events is None:
        return _unknown(None, "not told: no event with content has a time")
    if ceiling is None or _is_encrypted(stretch):
        return _unknown(events, _reason(stretch, len(clients)))
    ratio = events / ceiling.events_per_s
    return CeilingUse(
        events_per_s=events,
        ratio=ratio,
        ceiling_events_per_s=ceiling.events_per_s,
        ceiling_streams=ceiling.streams,
        measured_at_s=ceiling.measured_at_s,
        text=_text(ratio, ceiling, sum(client.most_in_flight for client in clients)) + _failed(stretch),
        is_near=ratio > MOST_CEILING_RATIO,
    )


def _events_per_s(stretch: Stretch) -> float | None:
    count = busiest_second(stretch.requests)
    return None if count is None or stretch.wall_s <= 0 else count / min(1.0, stretch.wall_s)


def _clients(stretch: Stretch) -> Iterator[ClientSample]:
    number = stretch.stage.stage if stretch.stage else 0
    return (client for client in stretch.record.clients if client.stage == number)


def _unknown(events_per_s: float | None, text: str) -> CeilingUse:
    return CeilingUse(
        events_per_s=events_per_s,
        ratio=None,
        ceiling_events_per_s=None,
        ceiling_streams=None,
        measured_at_s=None,
        text=text,
    )


def _reason(stretch: Stretch, processes: int) -> str:
    if _is_encrypted(stretch):
        return "not measured: `paceline selftest` asks without TLS, which costs a client more"
    if not stretch.record.client_ceilings or not processes:
        return f"not measured: {SELFTEST}"
    return f"not measured of a client of {processes} processes: {SELFTEST[:-1]} --shards {processes}`"


def _is_encrypted(stretch: Stretch) -> bool:
    engine = stretch.record.spec.engine
    if engine is None:
        return False
    told = (engine.options.get("url"), engine.options.get("urls"))
    urls = (url for each in told for url in (each if isinstance(each, list | tuple) else (each,)))
    return any(str(url).lower().startswith("https:") for url in urls)


def _text(ratio: float, ceiling: CeilingSample, streams: int) -> str:
    share = "under 1 %" if ratio < 0.01 else f"{100 * ratio:.0f} %"
    day = datetime.fromtimestamp(min(max(ceiling.measured_at_s, 0.0), LAST_DAY_S), UTC).strftime("%Y-%m-%d")
    beyond = f", with up to {streams:,} here" if streams > ceiling.streams else ""
    told = f"{ceiling.events_per_s:,.0f} events/s over {ceiling.streams:,} streams{beyond}, measured {day}"
    return f"{share} of the ceiling of this client ({told}), by answers that came whole"


def _failed(stretch: Stretch) -> str:
    """What came of these before they failed is in no share."""
    count = sum(request.error is not None for request in stretch.requests)
    return f" ({count:,} failed and are not counted)" if count else ""
