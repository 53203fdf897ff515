"""How close a load came to the client's own limit (its ceiling), as `paceline selftest` measured it on the same host.

The load is its busiest second, or all of it if shorter: a mean over the run would hide the burst in which a client is
late. Only events of complete answers are counted, so failed requests are named beside the share. The share is shown
beside the verdict and does not affect it: the run itself measures how late its client was.
"""

from __future__ import annotations

from datetime import UTC, datetime

from paceline.analysis.findings.served import CeilingUse
from paceline.analysis.served.loads import Served, Stretch
from paceline.analysis.served.token_times import busiest_second
from paceline.experiment.serving import MOST_CEILING_RATIO

# The end of the year 9999: a record may contain any number.
LAST_DAY_S = 253_402_300_799.0
SELFTEST = "run `paceline selftest`"


def use_of(served: Served) -> CeilingUse:
    """The launch closest to its ceiling; if no ceiling is known, the first launch with the reason."""
    uses = list(map(_use, served.stretches))
    known = [use for use in uses if use.ratio is not None]
    if not known:
        return uses[0] if uses else _unknown(None, f"not measured: {SELFTEST}")
    return max(known, key=lambda use: use.ratio or 0.0)


def _use(stretch: Stretch) -> CeilingUse:
    count = busiest_second(stretch.requests)
    if count is None or stretch.wall_s <= 0:
        return _unknown(None, "unknown: no event with content has a time")
    events = count / min(1.0, stretch.wall_s)
    stage = stretch.stage.stage if stretch.stage else 0
    clients = [client for client in stretch.record.clients if client.stage == stage]
    ceilings, processes = stretch.record.client_ceilings, len(clients)
    ceiling = next((c for c in ceilings if c.processes == processes and c.events_per_s > 0), None)
    options = stretch.record.spec.engine.options if stretch.record.spec.engine else {}
    given = (options.get("url"), options.get("urls"))
    urls = (url for each in given for url in (each if isinstance(each, list | tuple) else (each,)))
    if any(str(url).lower().startswith("https:") for url in urls):
        return _unknown(events, "not measured: `paceline selftest` runs without TLS, which costs a client more")
    if not ceilings or not processes:
        return _unknown(events, f"not measured: {SELFTEST}")
    if ceiling is None:
        shards = f"{SELFTEST[:-1]} --shards {processes}`"
        return _unknown(events, f"not measured for a client with {processes} processes: {shards}")
    ratio = events / ceiling.events_per_s
    share = "under 1 %" if ratio < 0.01 else f"{100 * ratio:.0f} %"
    day = datetime.fromtimestamp(min(max(ceiling.measured_at_s, 0.0), LAST_DAY_S), UTC).strftime("%Y-%m-%d")
    streams = sum(client.most_in_flight for client in clients)
    how = "measured briefly" if ceiling.is_brief else "measured"
    beyond = f", with up to {streams:,} here" if streams > ceiling.streams else ""
    known = f"{ceiling.events_per_s:,.0f} events/s over {ceiling.streams:,} streams{beyond}, {how} {day}"
    # Events that arrived before a request failed are in no share.
    failed = sum(request.error is not None for request in stretch.requests)
    uncounted = f" ({failed:,} failed and are not counted)" if failed else ""
    return CeilingUse(
        events_per_s=events,
        ratio=ratio,
        ceiling_events_per_s=ceiling.events_per_s,
        ceiling_streams=ceiling.streams,
        measured_at_s=ceiling.measured_at_s,
        text=f"{share} of the client ceiling ({known}), counting complete answers{uncounted}",
        # A brief measurement is a lower bound.
        is_near=ratio > MOST_CEILING_RATIO and not ceiling.is_brief,
    )


def _unknown(events_per_s: float | None, text: str) -> CeilingUse:
    return CeilingUse(
        events_per_s=events_per_s,
        ratio=None,
        ceiling_events_per_s=None,
        ceiling_streams=None,
        measured_at_s=None,
        text=text,
    )
