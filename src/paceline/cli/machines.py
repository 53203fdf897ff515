"""Verbs about the machine and what runs on it: doctor, monitor, status, and what exists."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.cli.verbs import DEFAULT_OUT, OK, SOME_FAILED, add_verb
from paceline.errors import RequestError

LISTS = ("workloads", "strategies", "launchers", "exporters", "models", "presets", "gpus", "prices", "metrics")


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
    verb = add_verb(verbs, "status", status, "what is running, what ended, what is left in a results folder")
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT))
    verb.add_argument("--watch", action="store_true", help="refresh until nothing runs")


def list_kind(arguments: argparse.Namespace) -> int:
    if arguments.kind is None:
        print("\n".join(LISTS))
        return OK
    if arguments.kind not in LISTS:
        raise RequestError(f"list: {arguments.kind!r} was given; accepted is {', '.join(LISTS)}")
    rows = _listing(arguments.kind)
    width = max(len(name) for name in rows)
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")
    return OK


def _listing(kind: str) -> dict[str, str]:
    from paceline import experiment, machine, models, plugins, prices
    from paceline.analysis import ceilings, cost, sweep
    from paceline.analysis.metrics import METRICS
    from paceline.spec import Choice

    if kind == "models":
        return {name: f"{models.parameters(models.load(Choice(name))):>15,} parameters" for name in models.names()}
    if kind == "presets":
        return experiment.presets()
    if kind == "gpus":
        return machine.gpu_summaries()
    if kind == "prices":
        return prices.summaries()
    if kind == "metrics":
        known = {metric.name: (metric.unit, metric.better) for metric in METRICS}
        known |= cost.METRICS | sweep.METRICS | {name: (unit, "higher") for name, unit in ceilings.METRICS.values()}
        return {name: f"{unit}, {better} is better" for name, (unit, better) in known.items()}
    return plugins.names(kind)


def doctor(arguments: argparse.Namespace) -> int:
    from paceline.doctor import checks

    found = checks(arguments.out)
    marks = {True: "ok  ", None: "note", False: "BAD "}
    for item in found:
        print(f"{marks[item.ok]} {item.name}: {item.text}" + (f"\n       fix: {item.fix}" if item.fix else ""))
    return SOME_FAILED if any(item.ok is False for item in found) else OK


def monitor(arguments: argparse.Namespace) -> int:
    import time

    from paceline import telemetry
    from paceline.watch import snapshot_lines

    if arguments.interval <= 0:
        raise RequestError(f"--interval: {arguments.interval} was given; accepted is a positive number of seconds")
    seen = 0
    with telemetry.Sampler(arguments.interval) as sampler:
        while arguments.count is None or seen < arguments.count:
            time.sleep(arguments.interval)
            for snapshot in sampler.snapshots[-1:]:
                print("\n".join(snapshot_lines(snapshot)), flush=True)
            seen += 1
    return OK


def status(arguments: argparse.Namespace) -> int:
    import time

    from paceline.watch import folder_lines

    if not arguments.out.is_dir():
        raise RequestError(f"--out: {str(arguments.out)!r} was given, which is no folder; accepted is a results folder")
    while True:
        lines, running = folder_lines(arguments.out)
        print("\n".join(lines), flush=True)
        if not (arguments.watch and running):
            return OK
        time.sleep(2)
