"""The command line: parse, call, print. Nothing is decided here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline import __version__
from paceline.errors import PacelineError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.findings import Report
    from paceline.spec import RunSpec

OK, SOME_FAILED, WRONG_REQUEST, INTERRUPTED = 0, 1, 2, 130
DEFAULT_OUT = "results"
DEFAULT_FORMATS = ("html", "markdown", "csv", "json", "plots")


class Parser(argparse.ArgumentParser):
    """Argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all ok and valid, 1 some run failed or is invalid, 2 the request was wrong, 130 interrupted."""
    try:
        arguments = parser().parse_args(argv)
        call: Callable[[argparse.Namespace], int] = arguments.call
        return call(arguments)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return WRONG_REQUEST
    except KeyboardInterrupt:
        print(
            "paceline: interrupted; what was measured is kept, and the same command goes on from here", file=sys.stderr
        )
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return OK


def parser() -> Parser:
    root = Parser(prog="paceline", description="Compare ways of training language models on work proved equal.")
    root.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = root.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    _experiment_verb(verbs, "run", run, "measure: run every cell of an experiment, then report").add_argument(
        "--resume", action="store_true", help="also repeat runs that did not end ok"
    )
    _experiment_verb(verbs, "plan", plan, "show what would run: cells, commands, state memory; nothing is started")
    verb = _verb(verbs, "report", report, "conclude from stored runs: tables, plots, files")
    verb.add_argument("directory", type=Path, help="a results folder or an experiment in it")
    verb.add_argument(
        "--format", action="append", metavar="NAME", help=f"exporter; default: {', '.join(DEFAULT_FORMATS)}"
    )
    verb = _verb(verbs, "compare", compare, "two result folders, cell by cell, with intervals and verdicts")
    verb.add_argument("a", type=Path, metavar="DIR_A")
    verb.add_argument("b", type=Path, metavar="DIR_B")
    _verb(verbs, "show", show, "one run: what was asked, observed and concluded").add_argument("run", type=Path)
    _verb(verbs, "list", list_kind, "what exists: strategies, models, presets, ...").add_argument(
        "kind", nargs="?", help="; ".join(LISTS)
    )
    verb = _verb(verbs, "doctor", doctor, "say whether this machine is fit to run and to measure, and how to mend it")
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), help="results folder to check")
    verb = _verb(verbs, "monitor", monitor, "live use of GPUs, processors and memory")
    verb.add_argument("--interval", type=float, default=1.0, metavar="SECONDS")
    verb.add_argument("--count", type=int, metavar="N", help="stop after N readings")
    verb = _verb(verbs, "status", status, "what is running, what ended, what is left in a results folder")
    verb.add_argument("--out", type=Path, default=Path(DEFAULT_OUT))
    verb.add_argument("--watch", action="store_true", help="refresh until nothing runs")
    return root


def _verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int], text: str) -> Parser:
    verb: Parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(call=call)
    return verb


def _experiment_verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int], text: str) -> Parser:
    verb = _verb(verbs, name, call, text)
    verb.add_argument("experiment", metavar="PRESET|FILE", help="`paceline list presets`, or a YAML file")
    verb.add_argument(
        "--out", "--output-dir", type=Path, default=Path(DEFAULT_OUT), help="results folder (default: %(default)s)"
    )
    verb.add_argument("--launcher", metavar="NAME", help="where to run; `paceline list launchers`")
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a field; a list makes an axis"
    )
    verb.add_argument("--benchmark", default="all", metavar="KIND", help="keep only comm, training or memory; or all")
    for option, text in (("warmup", "iterations before the timed ones"), ("iters", "timed iterations")):
        verb.add_argument(f"--{option}", type=int, metavar="N", help=f"{text} of collectives and kernels")
    return verb


def _console() -> Console:
    from rich.console import Console

    return Console()


def _specs(arguments: argparse.Namespace) -> list[RunSpec]:
    """All runs of the request, each understood by its plugins before anything starts."""
    from paceline import experiment
    from paceline.run import unsupported

    counts = {option: n for option in ("warmup", "iters") if (n := getattr(arguments, option)) is not None}
    specs = experiment.load(arguments.experiment, arguments.set, arguments.launcher, arguments.benchmark, counts)
    for spec in specs:
        unsupported(spec)
    return specs


def run(arguments: argparse.Namespace) -> int:
    from paceline import display
    from paceline.run import campaign, interruptible

    specs = _specs(arguments)
    console = _console()
    observer = display.observer_for(console)
    try:
        interruptible(lambda: campaign(specs, arguments.out, observer, retry=arguments.resume))
    finally:
        observer.close()
    return _conclude(console, arguments.out / specs[0].experiment, DEFAULT_FORMATS)


def report(arguments: argparse.Namespace) -> int:
    return _conclude(_console(), arguments.directory, arguments.format or DEFAULT_FORMATS)


def _conclude(console: Console, directory: Path, formats: Sequence[str]) -> int:
    """Build the report of a folder, write its files, print it; the exit code says whether all is well."""
    from paceline.analysis.report import build
    from paceline.plugins import load
    from paceline.run import read_experiment

    exporters = [load("exporters", name) for name in formats]
    records, skipped = read_experiment(directory)
    found = build(records, title=directory.resolve().name, skipped=skipped)
    written = [path for exporter in exporters for path in exporter.export(found, directory)]
    _print_report(console, found)
    files = [path for path in written if path.parent == directory]
    console.print(f"Report: {' '.join(str(path) for path in files)}", highlight=False, soft_wrap=True)
    bad = [r for r in found.runs if r.is_failure]
    measured = any(r.status == "ok" and not r.is_reference for r in found.runs)
    return OK if measured and not bad and not found.skipped else SOME_FAILED


def _print_report(console: Console, found: Report) -> None:
    from paceline import present

    parts = (
        present.ranked_table(found),
        present.scaling_table(found),
        present.machine_group(found),
        present.failures_table(found),
    )
    for part in parts:
        if part is not None:
            console.print(part)
    for line in (*present.recommendation_lines(found), *(f"skipped: {text}" for text in found.skipped)):
        console.print(line, highlight=False, markup=False)


def plan(arguments: argparse.Namespace) -> int:
    from paceline import models, store
    from paceline.plugins import load
    from paceline.run import leads_on, references_of, unsupported

    specs = _specs(arguments)
    console = _console()
    runs = [*references_of(specs).values(), *specs]
    for number, spec in enumerate(runs, 1):
        run_dir = arguments.out / spec.experiment / spec.run_id
        reason = unsupported(spec)
        note = f"unsupported: {reason}" if reason else "sealed" if store.is_sealed(run_dir) else "to run"
        note += "; more follow" if leads_on(spec) and not reason else ""
        console.print(f"{number:>3} {spec.run_id}  [{note}]", highlight=False, markup=False)
        console.print(f"    {_describe(spec, models)}", highlight=False, markup=False, soft_wrap=True)
        job = load("launchers", spec.launcher.name).prepare(spec, run_dir)
        console.print(f"    {job}", highlight=False, markup=False, soft_wrap=True)
    cells = len({spec.cell for spec in specs})
    console.print(
        f"{cells} cells, {len(specs)} runs and {len(runs) - len(specs)} references in {arguments.out}", highlight=False
    )
    return OK


def _describe(spec: RunSpec, models: Any) -> str:
    if not spec.is_trained:
        return f"{spec.workload}, {spec.topology.world_size} x {spec.topology.device}"
    t = spec.training
    count = models.parameters(models.load(spec.model))
    strategy = spec.strategy
    state = models.state_bytes(
        strategy.name if strategy else "single",
        strategy.options.get("stage", 1) if strategy and strategy.name == "zero" else None,
        count,
        spec.topology.world_size,
        t.precision.compute,
    )
    memory = f", state {state / 2**30:.2f} GiB per process" if state is not None else ""
    return (
        f"{count:,} parameters, {t.precision.compute}, {spec.topology.world_size} x {spec.topology.device}, "
        f"{spec.tokens_per_step:,} tokens per step ({t.micro_batch} x {t.accumulation} x {t.sequence_length} each), "
        f"{spec.steps} steps{memory}"
    )


def compare(arguments: argparse.Namespace) -> int:
    from paceline import present
    from paceline.analysis.compare import compare_experiments
    from paceline.run import read_experiment

    (a, skipped_a), (b, skipped_b) = read_experiment(arguments.a), read_experiment(arguments.b)
    found = compare_experiments(a, b)
    console = _console()
    console.print(present.comparison_table(found.comparisons, str(arguments.a), str(arguments.b)))
    lines = [f"only in {arguments.a}: {name}" for name in found.only_a]
    lines += [f"only in {arguments.b}: {name}" for name in found.only_b]
    for line in (*lines, *(f"skipped: {text}" for text in (*skipped_a, *skipped_b))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK


def show(arguments: argparse.Namespace) -> int:
    from paceline import store
    from paceline.analysis.certificate import certify_all
    from paceline.present.record import record_lines

    if not (arguments.run / "spec.json").is_file():
        raise RequestError(f"{str(arguments.run)!r} was given; accepted is a run folder (DIR/<experiment>/<run_id>)")
    if not store.is_sealed(arguments.run):
        positions = store.read_progress(arguments.run)
        where = "; ".join(f"rank {p.rank} at step {p.step} in {p.phase}" for p in positions) or "no rank started"
        print(f"{arguments.run}: not sealed (running or interrupted): {where}")
        return SOME_FAILED
    record = store.read_run(arguments.run)
    group = [run for run in store.read_runs(arguments.run.resolve().parent)[0] if run.spec.work == record.spec.work]
    for line in record_lines(record, certify_all(group).get(record.spec.run_id)):
        print(line)
    return OK


LISTS = ("workloads", "strategies", "launchers", "exporters", "models", "presets", "gpus", "metrics")


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
    from paceline import experiment, machine, models, plugins
    from paceline.analysis import ceilings, sweep
    from paceline.analysis.metrics import METRICS
    from paceline.spec import Choice

    if kind == "models":
        return {name: f"{models.parameters(models.load(Choice(name))):>15,} parameters" for name in models.names()}
    if kind == "presets":
        return experiment.presets()
    if kind == "gpus":
        return machine.gpu_summaries()
    if kind == "metrics":
        known = {metric.name: (metric.unit, metric.better) for metric in METRICS}
        known |= sweep.METRICS | {name: (unit, "higher") for name, unit in ceilings.METRICS.values()}
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


if __name__ == "__main__":
    sys.exit(main())
