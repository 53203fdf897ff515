"""Verbs about the machine and what runs on it: doctor, monitor, status, and what exists."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.verbs import DEFAULT_OUT, OK, SOME_FAILED, add_verb, console, print_hanging
from paceline.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.campaign.live.monitor import Tally
    from paceline.host.gauges import Snapshot

DEFAULT_ADDRESS = "127.0.0.1:9109"
LONGEST_INTERVAL_S = 86_400

PLUGINS = ("workloads", "strategies", "launchers", "engines", "exporters")
LISTS = (*PLUGINS, "models", "presets", "gpus", "prices", "metrics")


def add_verbs(verbs: Any) -> None:
    add_verb(verbs, "list", list_kind, "what exists: strategies, models, presets, ...").add_argument(
        "kind", nargs="?", help="; ".join(LISTS)
    )
    verb = add_verb(
        verbs, "doctor", doctor, "say whether this machine is fit to run and to measure, and how to mend it"
    )
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="results folder to check")
    verb = add_verb(verbs, "monitor", monitor, "live use of GPUs, processors and memory")
    verb.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
    verb.add_argument("--count", type=int, metavar="N", help="stop after N readings")
    verb.add_argument("--record", type=Path, metavar="FILE", help="append every reading to FILE.jsonl or FILE.csv")
    verb.add_argument(
        "--serve", nargs="?", const=DEFAULT_ADDRESS, metavar="HOST:PORT", help="serve /metrics for Prometheus"
    )
    verb.add_argument("--out", type=Path, metavar="DIR", help="with --serve: also the campaigns of a results folder")
    verb = add_verb(verbs, "status", status, "what is running, what ended, what is left in a results folder")
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT))
    verb.add_argument("--watch", action="store_true", help="refresh until nothing runs")


def list_kind(arguments: argparse.Namespace) -> int:
    if arguments.kind is None:
        print("\n".join(LISTS))
        return OK
    if arguments.kind not in LISTS:
        raise RequestError(f"list: got {arguments.kind!r}, expected {', '.join(LISTS)}.")
    rows = _listing(arguments.kind)
    width = max(len(name) for name in rows)
    screen = console()
    for name, text in rows.items():
        print_hanging(screen, f"{name:<{width}}  {text}", width + 2)
    return OK


def _listing(kind: str) -> dict[str, str]:
    from paceline.analysis.cost import served as served_cost
    from paceline.analysis.cost import training
    from paceline.analysis.machine import ceilings, sweep
    from paceline.analysis.served import accuracy, measurements
    from paceline.analysis.training.metrics import METRICS
    from paceline.experiment import plugins, reading
    from paceline.experiment.choices import Choice
    from paceline.host import machine, prices
    from paceline.models import arithmetic

    if kind == "models":
        return {
            name: f"{arithmetic.parameters(arithmetic.load(Choice(name))):>15,} parameters"
            for name in arithmetic.names()
        }
    if kind == "presets":
        return reading.presets()
    if kind == "gpus":
        return {name: _with_profile(name, text) for name, text in machine.gpu_summaries().items()}
    if kind == "prices":
        return prices.summaries()
    if kind == "metrics":
        known = {metric.name: (metric.unit, metric.better) for metric in METRICS}
        known |= training.METRICS | sweep.METRICS | measurements.METRICS | accuracy.METRICS | served_cost.METRICS
        known |= {name: (unit, "higher") for name, unit in ceilings.METRICS.values()}
        return {name: f"{unit}, {better} is better" for name, (unit, better) in known.items()}
    return plugins.names(kind)


def _with_profile(name: str, text: str) -> str:
    """The peaks of a GPU, and what others recommend to start with."""
    from paceline.host import recommended

    profile = recommended.of(name)
    return f"{text}; {profile}" if profile else text


def doctor(arguments: argparse.Namespace) -> int:
    from paceline.host.doctor import checks

    found = checks(arguments.out)
    marks = {True: "ok  ", None: "note", False: "BAD "}
    for item in found:
        print(f"{marks[item.ok]} {item.name}: {item.text}" + (f"\n       fix: {item.fix}" if item.fix else ""))
    return SOME_FAILED if any(item.ok is False for item in found) else OK


def monitor(arguments: argparse.Namespace) -> int:
    """Ctrl-C is the way to end it, and the summary comes then."""
    from paceline.campaign.live import metrics_endpoint
    from paceline.campaign.live import monitor as readings
    from paceline.results import campaign_file

    if not 0 < arguments.interval <= LONGEST_INTERVAL_S:
        raise RequestError(
            f"--interval: {arguments.interval} was given; "
            f"accepted is a positive number of seconds up to {LONGEST_INTERVAL_S} (a day)"
        )
    if arguments.count is not None and arguments.count < 1:
        raise RequestError(f"--count: {arguments.count} was given; accepted is a whole number from 1")
    if arguments.out is not None:
        _require_folder(arguments.out)
        if not arguments.serve:
            raise RequestError(
                "--out: was given without --serve, which alone tells of campaigns; see `paceline status`"
            )
    tally, latest = readings.Tally(), Latest()

    def page() -> str:
        views = campaign_file.read_views(arguments.out) if arguments.out is not None else ()
        return metrics_endpoint.page_text(latest.snapshot, views, arguments.out)

    with contextlib.ExitStack() as stack:
        record = stack.enter_context(readings.Recording(arguments.record)) if arguments.record else None
        if arguments.serve:
            address = stack.enter_context(metrics_endpoint.serving(arguments.serve, page))
            print(f"http://{address}/metrics", flush=True)
        show = stack.enter_context(_shown(tally, quiet=bool(arguments.serve)))
        with contextlib.suppress(KeyboardInterrupt):
            for snapshot in _readings(arguments.interval, arguments.count):
                latest.snapshot = snapshot
                tally.add(snapshot)
                if record is not None:
                    record.add(snapshot)
                show(snapshot)
    print("\n".join(tally.lines()))
    return OK


class Latest:
    """The newest reading, for the threads that answer scrapes."""

    snapshot: Snapshot | None = None


def _readings(interval_s: float, count: int | None) -> Iterator[Snapshot]:
    """One every interval, the first after one: shares of processors are since the reading before."""
    import itertools
    import time

    from paceline.host.gauges import Gauges

    with Gauges() as gauges:
        gauges.read()
        began = time.monotonic()
        for number in itertools.count(1) if count is None else range(1, count + 1):
            time.sleep(max(0.0, began + number * interval_s - time.monotonic()))
            yield gauges.read()


@contextlib.contextmanager
def _shown(tally: Tally, quiet: bool) -> Iterator[Callable[[Snapshot], None]]:
    """A table refreshed in place on a terminal; else lines, none where only scrapes are to be answered."""
    from rich.live import Live

    from paceline.campaign.live import monitor as readings

    terminal = console()
    if not terminal.is_terminal:
        yield lambda snapshot: None if quiet else print("\n".join(readings.snapshot_lines(snapshot, tally)), flush=True)
        return
    with Live(console=terminal, auto_refresh=False) as live:
        yield lambda snapshot: live.update(readings.screen(snapshot, tally), refresh=True)


def _require_folder(out: Path) -> None:
    if not out.is_dir():
        raise RequestError(f"--out: {str(out)!r} was given, which is no folder; accepted is a results folder")


def status(arguments: argparse.Namespace) -> int:
    import time

    from paceline.campaign.live import status as watch

    _require_folder(arguments.out)
    terminal = console()
    if arguments.watch and terminal.is_terminal:
        return _watch(arguments.out, terminal)
    said: list[str] = []
    while True:
        lines, running = watch.folder_lines(arguments.out)
        if lines != said:
            print("\n".join(lines), flush=True)
        said = lines
        if not (arguments.watch and running):
            return OK
        time.sleep(watch.REFRESH_S)


def _watch(out: Path, terminal: Console) -> int:
    """Refreshed in place until nothing runs; what was last seen stays on the screen."""
    import time

    from rich.live import Live

    from paceline.campaign.live import status as watch

    with Live(console=terminal, auto_refresh=False) as live:
        while True:
            shown, running = watch.screen(out)
            live.update(shown, refresh=True)
            if not running:
                return OK
            time.sleep(watch.REFRESH_S)
