"""Lists of campaigns and runs, one run, its log, and the live view, as HTML made of the components of report.html."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from paceline.campaign.live.progress import left_text, pulse_text
from paceline.campaign.live.progress import title as run_title
from paceline.campaign.ui.library import Campaign, RunRow, is_bad
from paceline.report.exporters._page_parts import document, paragraph, scripted
from paceline.report.exporters.html import chart_data
from paceline.results.campaign_file import CampaignView
from paceline.wording import MISSING, format_duration

MOST_ROWS = 500
NOT_YET = "open its report: answers are not computed while a campaign runs"
# What the map of nodes can show, by the column of the live events.
GAUGES = {
    "utilisation": "utilisation",
    "memory": "memory",
    "power": "power",
    "temperature": "temperature",
    "clock": "SM clock",
    "throttle": "throttling",
    "cpu": "host CPU",
    "host_memory": "host memory",
    "received": "network in",
    "sent": "network out",
}
ASSETS = Path(__file__).parent / "page"


def style() -> str:
    return (ASSETS / "ui.css").read_text(encoding="utf-8")


def bar(directory: str, current: str = "", running: Sequence[Campaign] = ()) -> str:
    """The links above every page."""
    links = [("Campaigns", "/"), ("Runs", "/runs"), ("History", "/history")]
    shown = [f'<a href="{href}"{_current(name == current)}>{name}</a>' for name, href in links]
    if running:
        shown.insert(2, f'<a class="running" href="{link(running[0], "live")}"{_current(current == "Live")}>Live</a>')
    return (
        '<nav class="bar" aria-label="Pages"><a class="home" href="/"><b>Paceline</b> '
        f"<span>{escape(directory)}</span></a>"
        f"{''.join(shown)}</nav>\n"
    )


def _current(is_it: bool) -> str:
    return ' aria-current="page"' if is_it else ""


def above(directory: str, current: str = "", running: Sequence[Campaign] = ()) -> str:
    """The same for a page that is sent as one file: with the style of the links."""
    return f"<style>{style()}</style>\n{bar(directory, current, running)}"


def link(campaign: Campaign, *parts: str) -> str:
    return "/".join(("/campaign", campaign.slug, *parts))


def page(title: str, header: str, body: str, links: str, scripts: Iterable[str] = ()) -> str:
    """A page of the app. header: beside the title; all but the title are HTML."""
    top = (
        f'<header><div class="top"><h1>{escape(title)}</h1>{header}'
        '<button type="button" id="theme" class="scripted">Dark</button></div></header>'
    )
    head = f'<link rel="stylesheet" href="/assets/page.css">\n<link rel="icon" href="data:,">\n<style>{style()}</style>'
    sources = "".join(f'<script src="/assets/{name}"></script>\n' for name in (*scripts, "page.js", "ui.js"))
    return document(f"{title} - Paceline", head, top + body, links, scripted(chart_data(()), sources))


def message(title: str, sentence: str, links: str) -> str:
    """A page with one sentence: what was wrong with a request."""
    return page(title, "", paragraph(sentence, "headline"), links)


# --- campaigns ---


def campaigns(
    found: Sequence[tuple[Campaign, CampaignView, float | None, str | None]], links: str, directory: str
) -> str:
    """Every campaign, the running ones first. Each comes with its state, when it last ran, and its answer if that is
    known."""
    if not found:
        sentence = "There are no runs here yet. Start one with `paceline run quick --out` and this directory."
        return message(directory, sentence, links)
    is_busy = any(view.running for _, view, _, _ in found)
    ordered = sorted(found, key=lambda item: (not item[1].running, -(item[2] or 0.0)))
    rows = "".join(_campaign_row(*row, is_busy) for row in ordered)
    head = "<th class=n>tick</th><th>campaign</th><th>answer</th><th>state</th><th class=n>runs</th><th>last run</th>"
    count = f"{len(found)} campaign{'' if len(found) == 1 else 's'}"
    tools = (
        '<div class="actions"><button formaction="/compare" id="compare">Compare two ticked</button>'
        '<button formaction="/history">History of ticked</button>'
        f'<span class="quiet" id="ticked">{escape(count)}</span></div>'
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return page(directory, "", f'<form class="list">{tools}<div class="scroll wide">{table}</div></form>', links)


def _campaign_row(campaign: Campaign, view: CampaignView, at: float | None, known: str | None, is_busy: bool) -> str:
    ended = sum(view.ended.values())
    count = str(ended) if view.planned is None else f"{ended} of {view.planned}"
    bad = any(is_bad(name) for name in view.ended) or view.interrupted
    words = ", ".join(f"{number} {name}" for name, number in view.ended.items())
    if view.running:
        words = f"running, {left_text(view.left_s)}" + (f"; {words}" if words else "")
    elif view.planned is not None and view.planned > ended:
        words += f"{'; ' if words else ''}{view.planned - ended} left"
    state = f'<span class="{"good" if view.running else "bad" if bad else "quiet"}">{escape(words)}</span>'
    more = _live_link(campaign) if view.running else ""
    more += f'<a href="{link(campaign)}">runs</a>'
    if ended:
        more += f'<a href="{link(campaign, "report")}">report</a>'
    # Answers are computed on demand, but not while a campaign is running: this host may be the one that it measures.
    is_asked = bool(ended) and known is None and not view.running
    answer = f' data-answer="{link(campaign, "headline")}"' if is_asked and not is_busy else ""
    text = escape(known or _now(view)) or (f'<span class="quiet">{NOT_YET}</span>' if is_asked and is_busy else "")
    target = link(campaign, "report") if ended and not view.running else link(campaign, "live" if view.running else "")
    return (
        f"<tr><td class=n>{_tick(campaign.slug, campaign.title)}</td>"
        f'<td class="w"><a href="{target.rstrip("/")}"><b>{escape(campaign.title)}</b></a>'
        f'<small class="links">{more}</small></td>'
        f'<td class="prose answer"{answer}>{text}</td>'
        f'<td class="prose">{state}</td><td class="n">{count}</td>'
        f"{_when(at)}</tr>"
    )


def _now(view: CampaignView) -> str:
    """What a running campaign does; empty for others."""
    doing = [f"{run_title(pulse.spec)}: {pulse_text(pulse)}" for pulse in view.pulses]
    doing += [f"waiting: {why}" for why in view.waiting.values()]
    return "; ".join(doing) or ("starting" if view.starting else "")


def _tick(value: str, label: str) -> str:
    return f'<input type="checkbox" name="tick" value="{escape(value)}" aria-label="{escape(f"Tick {label}")}">'


def _when(at: float | None) -> str:
    """A cell with a time; the script sorts by the number."""
    if at is None:
        return f'<td class="w">{MISSING}</td>'
    return f'<td class="w" data-text="{at:.0f}">{time.strftime("%Y-%m-%d %H:%M", time.localtime(at))}</td>'


# --- runs ---


def runs(
    rows: Sequence[RunRow],
    chosen: Mapping[str, str],
    every: Sequence[RunRow],
    links: str,
    campaign: Campaign | None = None,
    is_running: bool = False,
) -> str:
    """Runs that match. chosen: the search words and the value of each filter; every: all runs, for the filters."""
    campaign_names = {row.campaign.slug: row.campaign.title for row in every}
    statuses, workloads = sorted({row.status for row in every}), sorted({row.workload for row in every if row.workload})
    fields = (
        f'<input type="search" name="q" value="{escape(chosen.get("q", ""))}" placeholder="Names, models, errors" '
        'aria-label="Search">'
        + (_choice("campaign", campaign_names, chosen) if len(campaign_names) > 1 else "")
        + _choice("status", {name: name for name in statuses}, chosen)
        + _choice("workload", {name: name for name in workloads}, chosen)
        + '<button>Search</button><button formaction="/compare">Compare two ticked</button>'
    )
    ways = ""
    if campaign is not None:
        over_time = f"/history?{urlencode({'tick': campaign.slug})}"
        ways = f'<a href="{link(campaign, "report")}">report</a><a href="{over_time}">history</a>'
        ways = f'<p class="links">{_live_link(campaign) if is_running else ""}{ways}</p>'
    body = f'{ways}<form class="list" id="search"><div class="actions">{fields}</div>'
    body += f'<div id="rows">{_rows(rows, every)}</div></form>'
    return page("Runs" if campaign is None else campaign.title, "", body, links)


def _live_link(campaign: Campaign) -> str:
    return f'<a class="running" href="{link(campaign, "live")}">live</a>'


def _rows(rows: Sequence[RunRow], every: Sequence[RunRow]) -> str:
    if not rows:
        return paragraph("No run matches.", "quiet")
    shown = rows[:MOST_ROWS]
    count = f"{len(rows)} of {len(every)} runs" if len(rows) < len(every) else f"{len(rows)} runs"
    more = f"; the newest {MOST_ROWS} are shown" if len(rows) > MOST_ROWS else ""
    head = "<th class=n>tick</th><th>run</th><th>campaign</th><th>status</th><th>started</th><th class=n>took</th>"
    body = "".join(map(_run_row, shown))
    return (
        f'<p class="quiet">{escape(count + more)}.</p>'
        f'<div class="scroll wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _run_row(row: RunRow) -> str:
    took = MISSING if row.seconds is None else format_duration(row.seconds)
    tone = "bad" if is_bad(row.status) else "good" if row.status == "ok" else "quiet"
    target = link(row.campaign, "run", row.slug)
    return (
        f"<tr><td class=n>{_tick(f'{row.campaign.slug}/{row.slug}', row.title)}</td>"
        f'<td class="prose"><a href="{target}"><b>{escape(row.title)}</b></a><small>{escape(row.name)}</small></td>'
        f'<td class="w"><a href="{link(row.campaign)}">{escape(row.campaign.title)}</a></td>'
        f'<td class="prose"><span class="{tone}">{escape(row.status)}</span><small>{escape(row.error)}</small></td>'
        f'{_when(row.began_at)}<td class="n" data-text="{row.seconds or 0:.1f}">{escape(took)}</td></tr>'
    )


def _choice(name: str, values: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    options = "".join(
        f'<option value="{escape(value)}"{" selected" if chosen.get(name) == value else ""}>{escape(text)}</option>'
        for value, text in values.items()
    )
    return f'<select name="{name}" aria-label="{name}"><option value="">any {name}</option>{options}</select>'


# --- one run ---


def run(row: RunRow, text: str, links: str) -> str:
    """What `paceline show` prints, and the way to its log."""
    target = link(row.campaign, "run", row.slug)
    ways = f'<a href="{target}/log">log</a> <a href="{link(row.campaign)}">{escape(row.campaign.title)}</a>'
    body = f'<p class="links">{ways}</p><pre class="text" tabindex="0">{escape(text)}</pre>'
    return page(row.title, _chip(row.status), body, links)


def _chip(words: str) -> str:
    return f'<div class="badges"><span class="chip">{escape(words)}</span></div>'


def live(campaign: Campaign, links: str) -> str:
    """Every node and GPU of a running campaign; the script fills it once a second."""
    target = link(campaign)
    tiles = "".join(
        f'<div class="tile" id="tile-{name}"><span class="name">{text}</span><span class="value">{MISSING}</span>'
        '<span class="interval">&nbsp;</span><svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" '
        'aria-hidden="true"><polyline fill="none" stroke-width="1.6" vector-effect="non-scaling-stroke"/></svg>'
        '<span class="note"></span></div>'
        for name, text in (("rate", "Step rate"), ("loss", "Loss"), ("left", "Time left"), ("gpus", "GPUs"))
    )
    choices = "".join(f'<option value="{name}">{text}</option>' for name, text in GAUGES.items())
    body = (
        f'<div id="live" data-events="{target}/live/events" data-campaign="{target}">'
        f'<p class="headline" role="status" id="now">Connecting</p><div class="tiles">{tiles}</div>'
        '<ul class="notes" id="alerts" aria-live="polite"></ul>'
        f'<section><div class="actions"><h2>Nodes</h2><select id="gauge" aria-label="Gauge">{choices}</select>'
        '<span class="scale"><b id="low"></b><i></i><b id="high"></b></span>'
        '<span class="quiet" id="summary"></span></div>'
        '<div class="map"><canvas id="map" tabindex="0" role="img" aria-label="Nodes and GPUs"></canvas></div>'
        '<div id="node" hidden></div></section>'
        '<section class="pair"><div><h3>Step time, s</h3><canvas class="line" id="line-step" role="img" '
        'aria-label="Step time"></canvas></div><div><h3>Loss</h3><canvas class="line" id="line-loss" role="img" '
        'aria-label="Loss"></canvas></div></section>'
        f'<section><h2>Results so far</h2><p id="report" hidden><span id="answer"></span> '
        f'<a href="{target}/report">Report</a></p>'
        '<div class="scroll wide" id="ended"><p class="quiet">No run has ended yet.</p></div></section>'
        f"<section><h2>Log</h2>{log_panel('', None, 1)}</section></div>"
    )
    return page(campaign.title, _chip("live"), body, links, ("live.js",))


def log(row: RunRow, rank: int | None, ranks: int, links: str) -> str:
    """The log of a run, filled by the script as lines arrive."""
    target = link(row.campaign, "run", row.slug)
    body = (
        f'<p class="links"><a href="{target}">run</a> '
        f'<a href="{target}/log/text?{urlencode({} if rank is None else {"rank": rank})}">as plain text</a></p>'
        + log_panel(f"{target}/log/events", rank, ranks)
    )
    return page(f"Log of {row.title}", _chip(row.status), body, links)


def log_panel(events: str, rank: int | None, ranks: int) -> str:
    """A chosen rank, or all, and its lines."""
    value = "" if rank is None else str(rank)
    return (
        f'<div class="log" data-events="{escape(quote(events, safe="/%"))}"><div class="actions"><label>Rank '
        f'<input type="number" name="rank" min="0" max="{ranks - 1}" value="{value}" placeholder="all"></label>'
        '<label>Find <input type="search" name="find"></label>'
        '<label><input type="checkbox" name="follow" checked> follow</label>'
        '<span class="quiet" role="status"></span></div><pre tabindex="0" aria-label="Log"></pre></div>'
    )
