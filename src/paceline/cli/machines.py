"""Verbs about this machine and what runs on it: list, doctor, monitor, status."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.overview import OK, SOME_FAILED
from paceline.cli.verbs import (
    add_list_option,
    add_out_option,
    add_verb,
    console,
    print_checks,
    print_hanging,
    require_directory,
)
from paceline.errors import RequestError, did_you_mean, require

if TYPE_CHECKING:
    from paceline.campaign.live.monitor import Tally
    from paceline.host.gauges import Snapshot

DEFAULT_ADDRESS = "127.0.0.1:9109"
LONGEST_INTERVAL_S = 86_400

PLUGINS = ("workloads", "strategies", "launchers", "engines", "exporters")
LISTS = (*PLUGINS, "models", "presets", "gpus", "prices", "metrics")


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "list", list_kind, "list strategies, models, presets, GPUs, prices, ...")
    verb.add_argument("kind", nargs="?", metavar="KIND", help=f"one of {', '.join(LISTS)}")
    verb = add_verb(verbs, "doctor", doctor, "check this machine and suggest fixes")
    add_out_option(verb, "results directory to check")
    verb = add_verb(verbs, "monitor", monitor, "show live GPU, CPU and memory usage")
    verb.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="time between readings (default: %(default)s)"
    )
    verb.add_argument("--count", type=int, metavar="N", help="stop after N readings")
    verb.add_argument("--record", type=Path, metavar="FILE", help="append every reading to FILE.jsonl or FILE.csv")
    verb.add_argument(
        "--serve",
        nargs="?",
        const=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"serve /metrics for Prometheus (default address: {DEFAULT_ADDRESS})",
    )
    verb.add_argument("--out", type=Path, metavar="DIR", help="with --serve: include the runs of a results directory")
    verb = add_verb(verbs, "status", status, "show running, finished and remaining runs of a results directory")
    verb.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="a results directory (default: --out)")
    add_out_option(verb)
    verb.add_argument("--watch", action="store_true", help="refresh until nothing runs")
    verb = add_verb(verbs, "stream", stream, "send a running campaign to TensorBoard, W&B, MLflow or OpenTelemetry")
    verb.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="a results directory (default: --out)")
    add_out_option(verb)
    add_list_option(verb, "--to", "NAME", "an exporter that can stream (tensorboard, wandb, mlflow, otlp); repeatable")
    verb.add_argument(
        "--interval", type=float, default=5.0, metavar="SECONDS", help="time between looks (default: %(default)s)"
    )


def list_kind(arguments: argparse.Namespace) -> int:
    kind = arguments.kind
    if kind is None:
        print("\n".join(LISTS))
        return OK
    if kind not in LISTS:
        raise RequestError(f"list: got {kind!r}, expected {', '.join(LISTS)}.{did_you_mean(kind, LISTS)}")
    rows = _listed(kind)
    width = max(len(name) for name in rows)
    screen = console()
    for name, text in rows.items():
        print_hanging(screen, f"{name:<{width}}  {text}", width + 2)
    return OK


def _listed(kind: str) -> dict[str, str]:
    """Names and what they are. Each kind imports what it needs: NumPy, for example, takes longer than the rest."""
    from paceline.experiment import plugins

    if kind == "models":
        from paceline.experiment.choices import Choice
        from paceline.models import arithmetic

        shapes = [arithmetic.load(Choice(name)) for name in arithmetic.names()]
        rows = {shape.name: f"{arithmetic.parameters(shape):>15,} parameters" for shape in shapes}
        active = {shape.name: arithmetic.active_parameters(shape) for shape in shapes if shape.experts}
        return rows | {name: f"{rows[name]}, {count:,} active" for name, count in active.items()}
    if kind == "presets":
        from paceline.experiment import reading

        return reading.presets()
    if kind == "gpus":
        from paceline.host import machine, recommended

        # The peaks of a GPU, then the settings that its vendor and others recommend.
        return {
            name: "; ".join(filter(None, (text, str(recommended.of(name) or ""))))
            for name, text in machine.gpu_summaries().items()
        }
    if kind == "prices":
        from paceline.host import prices

        return prices.summaries()
    if kind == "metrics":
        return _metrics()
    return plugins.names(kind) | {short: text for short, (_, text) in plugins.short_names(kind).items()}


def _metrics() -> dict[str, str]:
    from paceline.analysis.cost import served as served_cost
    from paceline.analysis.cost import training
    from paceline.analysis.machine import ceilings, sweep
    from paceline.analysis.served import accuracy, measurements
    from paceline.analysis.training.metrics import METRICS

    known = {metric.name: (metric.unit, metric.better) for metric in METRICS}
    known |= training.METRICS | sweep.METRICS | measurements.METRICS | accuracy.METRICS | served_cost.METRICS
    known |= {name: (unit, "higher") for name, unit in ceilings.METRICS.values()}
    return {name: f"{unit}, {better} is better" for name, (unit, better) in known.items()}


def doctor(arguments: argparse.Namespace) -> int:
    from paceline.host.doctor import checks

    results = checks(arguments.out)
    print_checks(results)
    return SOME_FAILED if any(check.ok is False for check in results) else OK


def monitor(arguments: argparse.Namespace) -> int:
    """Show readings until --count or Ctrl-C, then print a summary."""
    from paceline.campaign.live import metrics_endpoint
    from paceline.campaign.live import monitor as readings
    from paceline.campaign.live.nodes import Watches
    from paceline.host.gauges import Gauges
    from paceline.results import campaign_file

    interval, count = arguments.interval, arguments.count
    accepted = f"a positive number of seconds up to {LONGEST_INTERVAL_S} (a day)"
    require(0 < interval <= LONGEST_INTERVAL_S, "--interval", interval, accepted)
    require(count is None or count >= 1, "--count", count, "a whole number from 1")
    if arguments.out is not None:
        require_directory(arguments.out)
        if not arguments.serve:
            raise RequestError("--out: got no --serve, expected both. Without --serve, use `paceline status`.")
    tally = readings.Tally()
    # The newest reading, for the threads that answer scrapes.
    latest: list[Snapshot | None] = [None]
    watches = Watches()

    def page() -> str:
        views = campaign_file.read_views(arguments.out) if arguments.out is not None else ()
        return metrics_endpoint.page_text(latest[0], views, arguments.out, watches)

    with contextlib.ExitStack() as stack:
        record = stack.enter_context(readings.Recording(arguments.record)) if arguments.record else None
        if arguments.serve:
            address = stack.enter_context(metrics_endpoint.serving(arguments.serve, page))
            print(f"http://{address}/metrics", flush=True)
        show = stack.enter_context(_shown(tally, quiet=bool(arguments.serve)))
        gauges = stack.enter_context(Gauges())
        with contextlib.suppress(KeyboardInterrupt):
            # CPU shares are relative to the reading before, so the first one is not shown.
            gauges.read()
            began = time.monotonic()
            for number in itertools.count(1) if count is None else range(1, count + 1):
                time.sleep(max(0.0, began + number * interval - time.monotonic()))
                latest[0] = snapshot = gauges.read()
                tally.add(snapshot)
                if record is not None:
                    record.add(snapshot)
                show(snapshot)
    print("\n".join(tally.lines()))
    return OK


@contextlib.contextmanager
def _shown(tally: Tally, quiet: bool) -> Iterator[Callable[[Snapshot], None]]:
    """A function that shows a reading: a table refreshed in place on a terminal, else lines, none if quiet."""
    from rich.live import Live

    from paceline.campaign.live import monitor as readings

    terminal = console()
    if not terminal.is_terminal:
        yield lambda snapshot: None if quiet else print("\n".join(readings.snapshot_lines(snapshot, tally)), flush=True)
        return
    with Live(console=terminal, auto_refresh=False) as live:
        yield lambda snapshot: live.update(readings.screen(snapshot, tally), refresh=True)


def status(arguments: argparse.Namespace) -> int:
    from rich.live import Live

    from paceline.campaign.live import status as live_status

    if arguments.directory is not None:
        require_directory(arguments.directory, "status")
        arguments.out = arguments.directory
    require_directory(arguments.out)
    terminal = console()
    if arguments.watch and terminal.is_terminal:
        with Live(console=terminal, auto_refresh=False) as live:
            while True:
                shown, running = live_status.screen(arguments.out)
                live.update(shown, refresh=True)
                if not running:
                    return OK
                time.sleep(live_status.REFRESH_S)
    printed: list[str] = []
    while True:
        lines, running = live_status.folder_lines(arguments.out)
        if lines != printed:
            print("\n".join(lines), flush=True)
        printed = lines
        if not (arguments.watch and running):
            return OK
        time.sleep(live_status.REFRESH_S)


def stream(arguments: argparse.Namespace) -> int:
    """Send what is new until nothing runs any more, or until Ctrl-C."""
    from paceline.campaign.live.streaming import Streaming
    from paceline.experiment import plugins

    directory, interval = arguments.directory or arguments.out, arguments.interval
    require_directory(directory, "stream" if arguments.directory else "--out")
    require(0 < interval <= LONGEST_INTERVAL_S, "--interval", interval, "a positive number of seconds up to a day")
    exporters = {name: plugins.load("exporters", name) for name in arguments.to}
    silent = [name for name, exporter in exporters.items() if not hasattr(exporter, "stream")]
    if silent or not exporters:
        able = [name for name in plugins.names("exporters") if hasattr(plugins.load("exporters", name), "stream")]
        given = silent[0] if silent else None
        raise RequestError(f"--to: got {given!r}, expected one of {', '.join(able)}.")
    streams = {name: exporter.stream(directory) for name, exporter in exporters.items()}

    def notify(sentence: str) -> None:
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)

    streaming = Streaming(directory, streams, notify)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(streaming):
        if not streaming.look():
            raise RequestError(
                f"stream: got {str(directory)!r}, where nothing runs, expected a running campaign. Start "
                "`paceline run` first, or export finished runs with `paceline report --format`."
            )
        print(f"streaming to {', '.join(streams)}; Ctrl-C ends it", flush=True)
        while streaming.look():
            time.sleep(interval)
    return OK
