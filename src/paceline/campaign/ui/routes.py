"""The page of every address. Pure of sockets: a request is a path and a query, an answer is text or a stream."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl

from paceline.campaign.live import logs, metrics_endpoint
from paceline.campaign.live.nodes import Watches
from paceline.campaign.ui import builder, live, pages
from paceline.campaign.ui.library import RUNNING, UNFINISHED, Campaign, Library, RunRow, due_after
from paceline.errors import PacelineError, RequestError
from paceline.report.exporters.html import asset
from paceline.report.exporters.prometheus import CONTENT_TYPE
from paceline.results import campaign_file, safe_text, store
from paceline.results.campaign_file import CampaignView

HTML, TEXT, EVENTS = "text/html; charset=utf-8", "text/plain; charset=utf-8", "text/event-stream"
TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
OWN_ASSETS = ("ui.js", "live.js")
PAGE_ASSETS = ("page.css", "page.js", "charts.js", "vendor/d3.min.js", "vendor/plot.umd.min.js")
# Scripts, styles and connections of this server only.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
# Pages that are one file bring their own policy.
ONE_FILE_POLICY = "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
# The end of a log that is shown.
LOG_BYTES = 1 << 20
MOST_LINES = 500
PATIENCE_S = 5.0

Query = Mapping[str, list[str]]


class Channel(Protocol):
    """A reader of events."""

    def send(self, data: bytes) -> None: ...

    def is_open(self) -> bool: ...


Stream = Callable[[Channel], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a request gets: a body, or a stream of events."""

    body: bytes = b""
    kind: str = HTML
    status: int = 200
    policy: str = POLICY
    stream: Stream | None = None


@dataclass(frozen=True, slots=True)
class NotFound(Exception):
    """No page has this address."""

    sentence: str = "There is no such page."


@dataclass
class App:
    """A results directory as pages."""

    library: Library
    builder: builder.Builder = field(default_factory=builder.Builder)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _views: dict[str, CampaignView] = field(default_factory=dict)
    _due: float = float("-inf")
    _feeds: dict[str, live.Feed] = field(default_factory=dict)
    _watches: Watches = field(default_factory=Watches)

    @property
    def name(self) -> str:
        return safe_text.text(self.library.root.resolve().name or str(self.library.root))

    def answer(self, path: str, query: str) -> Answer:
        """The answer to a request. A wrong one gets a page with a sentence."""
        words: dict[str, list[str]] = {}
        try:
            for name, value in parse_qsl(query, max_num_fields=200):
                words.setdefault(name, []).append(value)
            return self._route(path.strip("/").split("/"), words)
        except NotFound as missing:
            return self._sentence("Not found", missing.sentence, 404)
        except (PacelineError, ValueError) as error:
            return self._sentence("This cannot be shown", safe_text.text(str(error)), 422)

    def _sentence(self, title: str, sentence: str, status: int) -> Answer:
        return Answer(body=pages.message(title, sentence, self._bar()).encode(errors="replace"), status=status)

    def _route(self, parts: list[str], query: Query) -> Answer:
        match parts:
            case [""]:
                return self._html(self._campaigns())
            case ["runs"]:
                return self._html(self._runs(query))
            case ["compare"]:
                return self._compare(query)
            case ["history"]:
                return self._history(query)
            case ["metrics"]:
                return Answer(body=self._metrics().encode(), kind=CONTENT_TYPE)
            case ["assets", *rest]:
                return self._asset("/".join(rest))
            case ["campaign", slug, *rest]:
                campaign = self.library.campaign(slug)
                if campaign is None:
                    raise NotFound("There is no such campaign in this directory.")
                return self._campaign(campaign, rest, query)
        raise NotFound

    def _html(self, text: str) -> Answer:
        # A name may have bytes that are no text.
        return Answer(body=text.encode(errors="replace"))

    def _asset(self, name: str) -> Answer:
        kind = TYPES.get(name.rpartition(".")[2], TEXT)
        if name in OWN_ASSETS:
            return Answer(body=(pages.ASSETS / name).read_bytes(), kind=kind)
        if name in PAGE_ASSETS:
            return Answer(body=asset(name).encode(), kind=kind)
        raise NotFound

    # --- lists ---

    def views(self) -> dict[str, CampaignView]:
        """The state of every campaign, a few seconds old at most."""
        with self._lock:
            began = time.monotonic()
            if began > self._due:
                found = self.library.campaigns()
                self._views = {name: campaign_file.read_view(campaign.path) for name, campaign in found.items()}
                self._due = due_after(began)
            return self._views

    def running(self) -> list[Campaign]:
        views = self.views()
        return [one for name, one in self.library.campaigns().items() if name in views and views[name].running]

    def rows(self, campaign: Campaign | None = None) -> list[RunRow]:
        """Every run of a campaign or of the directory; those that run now say so."""
        rows, views = self.library.rows(None if campaign is None else (campaign,)), self.views()
        active = {
            (name, run)
            for name, view in views.items()
            for run in (*(pulse.spec.run_id for pulse in view.pulses), *view.waiting, *view.starting)
        }
        return [
            dataclasses.replace(row, status=RUNNING)
            if row.status == UNFINISHED and (row.campaign.name, row.name) in active
            else row
            for row in rows
        ]

    def _campaigns(self) -> str:
        found, views = [], self.views()
        for name, campaign in self.library.campaigns().items():
            times = [row.began_at for row in self.library.rows((campaign,)) if row.began_at is not None]
            if name in views:
                known = self.builder.known(campaign.state, builder.headline, campaign.path)
                answer = None if views[name].running else known
                found.append((campaign, views[name], max(times, default=None), answer))
        return pages.campaigns(found, self._bar("Campaigns"), self.name)

    def _bar(self, current: str = "") -> str:
        return pages.bar(self.name, current, self.running())

    def _runs(self, query: Query, campaign: Campaign | None = None) -> str:
        every = self.rows(campaign)
        chosen = {name: values[-1] for name, values in query.items()}
        words = chosen.get("q", "").lower().split()
        rows = [row for row in every if _matches(row, chosen) and all(word in _words(row) for word in words)]
        bar = self._bar("Runs" if campaign is None else "")
        return pages.runs(rows, chosen, every, bar, campaign, campaign in self.running())

    def _metrics(self) -> str:
        return metrics_endpoint.page_text(None, tuple(self.views().values()), self.library.root, self._watches)

    # --- pages that are computed ---

    def _one_file(self, state: object, make: Callable[..., str], *arguments: object, current: str = "") -> Answer:
        text = self.builder.page((state,), make, *arguments, pages.above(self.name, current, self.running()))
        return Answer(body=text.encode(errors="replace"), policy=ONE_FILE_POLICY)

    def _ticked(self, query: Query) -> list[tuple[Campaign, Path]]:
        """The campaigns and runs that were ticked."""
        found = []
        for value in query.get("tick", []):
            slug, _, run_slug = value.partition("/")
            campaign = self.library.campaign(slug)
            if campaign is None:
                raise NotFound("There is no such campaign in this directory.")
            path = self.library.run(campaign, run_slug) if run_slug else campaign.path
            if path is None:
                raise NotFound("There is no such run in this campaign.")
            found.append((campaign, path))
        return found

    def _compare(self, query: Query) -> Answer:
        ticked = self._ticked(query)
        if len(ticked) != 2:
            raise RequestError(f"compare: got {len(ticked)} ticked, expected two. Tick two campaigns or two runs.")
        if "order" not in query:
            # The earlier one is the baseline.
            ticked.sort(key=lambda pair: min((run.stat().st_mtime for run in _sealed(pair[1])), default=0.0))
        state = tuple(campaign.state for campaign, _ in ticked)
        (_, a), (_, b) = ticked
        return self._one_file(state, builder.comparison_page, a, b)

    def _history(self, query: Query) -> Answer:
        ticked = self._ticked(query) or [(one, one.path) for one in self.library.campaigns().values() if one.runs]
        if not ticked:
            raise RequestError("history: got a directory without runs, expected finished runs. Run something first.")
        state = tuple(campaign.state for campaign, _ in ticked)
        return self._one_file(state, builder.over_time_page, [path for _, path in ticked], current="History")

    # --- one campaign ---

    def _campaign(self, campaign: Campaign, rest: list[str], query: Query) -> Answer:
        match rest:
            case []:
                return self._html(self._runs(query, campaign))
            case ["report"]:
                return self._one_file(campaign.state, builder.report_page, campaign.path)
            case ["live"]:
                return self._html(pages.live(campaign, self._bar("Live")))
            case ["live", "events"]:
                return Answer(kind=EVENTS, stream=lambda channel: self._send_live(campaign, channel))
            case ["headline"]:
                text = self.builder.page(campaign.state, builder.headline, campaign.path)
                return Answer(body=text.encode(errors="replace"), kind=TEXT)
            case ["run", slug, *after]:
                run_dir = self.library.run(campaign, slug)
                if run_dir is None:
                    raise NotFound("There is no such run in this campaign.")
                return self._run(campaign, run_dir, after, query)
        raise NotFound

    def _send_live(self, campaign: Campaign, channel: Channel) -> None:
        with self._lock:
            known = self._feeds.get(campaign.name)
            feed = known or live.Feed(campaign, lambda: self._ended(campaign.name))
            self._feeds[campaign.name] = feed
        with feed.subscribed() as (first, number):
            channel.send(first)
            while channel.is_open():
                message, number = feed.next(number, PATIENCE_S)
                # A comment keeps proxies from closing a silent connection.
                channel.send(message or b": still here\n\n")

    def _ended(self, name: str) -> list[RunRow]:
        """The finished runs of a campaign, read again each time; most of it is known."""
        campaign = self.library.campaigns().get(name)
        rows = self.library.rows((campaign,)) if campaign else []
        return [row for row in rows if row.seconds is not None or row.error]

    def _run(self, campaign: Campaign, run_dir: Path, rest: list[str], query: Query) -> Answer:
        row = next((row for row in self.rows(campaign) if row.name == safe_text.text(run_dir.name)), None)
        if row is None:
            raise NotFound("This run was moved meanwhile.")
        if not rest:
            if row.seconds is not None:
                text = self.builder.page(campaign.state, builder.run_text, run_dir)
            else:
                positions = store.read_progress(run_dir)
                where = (f"rank {p.rank} at step {p.step} in {p.phase}" for p in positions)
                text = row.error or "\n".join(("not finished (running or interrupted)", *where))
            return self._html(pages.run(row, text, self._bar()))
        if rest[0] != "log" or len(rest) > 2:
            raise NotFound
        if self.library.file(run_dir / logs.LOG) is None and (run_dir / logs.LOG).exists():
            raise RequestError("log.txt: got a link that leaves the results directory, expected a file.")
        rank = _rank(query)
        logs.check(run_dir, rank)
        match rest:
            case ["log"]:
                ranks = store.read_spec(run_dir).topology.world_size
                return self._html(pages.log(row, rank, ranks, self._bar()))
            case ["log", "text"]:
                lines = logs.read(run_dir, rank, False, lambda _: None, lambda: True)
                return Answer(body="\n".join(lines).encode(errors="replace") + b"\n", kind=TEXT)
            case ["log", "events"]:
                return Answer(kind=EVENTS, stream=lambda channel: send_log(run_dir, rank, channel))
        raise NotFound


def send_log(run_dir: Path, rank: int | None, channel: Channel) -> None:
    """The end of a log, then its new lines until the run ends or nobody reads."""
    lines: list[str] = []

    def flush() -> bool:
        if lines:
            channel.send(live.event("lines", lines))
            lines.clear()
        return channel.is_open()

    def notify(sentence: str) -> None:
        flush()
        channel.send(live.event("note", sentence))

    for line in logs.read(run_dir, rank, True, notify, flush, LOG_BYTES):
        lines.append(line)
        if len(lines) >= MOST_LINES:
            flush()
    flush()
    channel.send(live.event("end", None))


def _rank(query: Query) -> int | None:
    given = query.get("rank", [""])[-1]
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 8):
        raise RequestError(f"rank: got {given[:50]!r}, expected the number of a rank.")
    return int(given)


def _matches(row: RunRow, chosen: Mapping[str, str]) -> bool:
    own = {"campaign": row.campaign.slug, "status": row.status, "workload": row.workload}
    return all(chosen.get(name, "") in ("", value) for name, value in own.items())


def _words(row: RunRow) -> str:
    return f"{row.title} {row.name} {row.campaign.title} {row.workload} {row.status} {row.error}".lower()


def _sealed(directory: Path) -> list[Path]:
    return [path / "status.json" for path in store.run_dirs(directory) if store.is_sealed(path)]
