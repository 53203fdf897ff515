"""Verbs that read an experiment: run it, or show what would run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.money import add_cost_options, costing_of
from paceline.cli.results import add_baseline_option, add_format_option, baseline_of, conclude, exporters_of
from paceline.cli.verbs import DEFAULT_OUT, OK, Parser, add_verb, console, print_hanging

if TYPE_CHECKING:
    from paceline.experiment.spec import RunSpec


def add_verbs(verbs: Any) -> None:
    verb = _experiment_verb(verbs, "run", run, "measure: run every cell of an experiment, then report")
    verb.add_argument("--resume", action="store_true", help="also repeat runs that did not end ok")
    add_format_option(verb)
    add_cost_options(verb)
    add_baseline_option(verb)
    verb = _experiment_verb(
        verbs, "plan", plan, "show what would run: cells, commands, state memory; nothing is started"
    )
    verb.add_argument(
        "--manifests",
        action="store_true",
        help="print only the YAML that the launcher kubernetes would apply for runs that are not sealed, for a pipe",
    )


def _experiment_verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int], text: str) -> Parser:
    verb = add_verb(verbs, name, call, text)
    verb.add_argument("experiment", metavar="PRESET|FILE", help="`paceline list presets`, or a YAML file")
    verb.add_argument(
        "--out", "--output-dir", type=Path, default=Path(DEFAULT_OUT), help="results folder (default: %(default)s)"
    )
    verb.add_argument(
        "--launcher",
        metavar="NAME|FILE",
        help="where to run: a name of `paceline list launchers`, with options as NAME:OPTION=VALUE,..., or a YAML file "
        "with name and options",
    )
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set a field; a list makes an axis"
    )
    verb.add_argument("--benchmark", default="all", metavar="KIND", help="keep only comm, training or memory; or all")
    for option, text in (("warmup", "iterations before the timed ones"), ("iters", "timed iterations")):
        verb.add_argument(f"--{option}", type=int, metavar="N", help=f"{text} of collectives and kernels")
    return verb


def _specs(arguments: argparse.Namespace) -> list[RunSpec]:
    """All runs of the request, each understood by its plugins before anything starts."""
    from paceline.campaign.run.controller import unsupported
    from paceline.experiment import expansion

    counts = {option: n for option in ("warmup", "iters") if (n := getattr(arguments, option)) is not None}
    specs = expansion.load(arguments.experiment, arguments.set, arguments.launcher, arguments.benchmark, counts)
    for spec in specs:
        unsupported(spec)
    return specs


def run(arguments: argparse.Namespace) -> int:
    from paceline.campaign.live import display, status_page
    from paceline.campaign.run.controller import campaign, interruptible
    from paceline.results.campaign_file import read_plan

    specs, costing, baseline = _specs(arguments), costing_of(arguments), baseline_of(arguments)
    exporters_of(arguments.format)
    screen = console()
    observer = display.observer_for(screen)
    paged = status_page.Paged(observer, arguments.out)
    try:
        interruptible(lambda: campaign(specs, arguments.out, paged, retry=arguments.resume, tell=screen.print))
    finally:
        observer.close()
        paged.close()
    directory = arguments.out / specs[0].experiment
    made = read_plan(directory)
    asked = {run.run for run in made.runs} if made else None
    code = conclude(screen, directory, arguments.format, costing, baseline, asked)
    paged.page.write()
    return code


def plan(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run.controller import leads_on, references_of, unsupported
    from paceline.experiment.plugins import load
    from paceline.models import arithmetic as models
    from paceline.results import store

    specs = _specs(arguments)
    runs = [*references_of(specs).values(), *specs]
    if arguments.manifests:
        return _print_files(runs, arguments.out)
    screen = console()
    for number, spec in enumerate(runs, 1):
        run_dir = arguments.out / spec.experiment / spec.run_id
        reason = unsupported(spec)
        note = f"unsupported: {reason}" if reason else "sealed" if store.is_sealed(run_dir) else "to run"
        note += "; more follow" if leads_on(spec) and not reason else ""
        print_hanging(screen, f"{number:>3} {spec.run_id}  [{note}]", 6)
        print_hanging(screen, f"    {_describe(spec, models)}", 6)
        if remark := _remark(spec, models):
            print_hanging(screen, f"    {remark}", 6)
        for line in _advised(run_dir):
            print_hanging(screen, f"    {line}", 6)
        job = load("launchers", spec.launcher.name).prepare(spec, run_dir)
        # A command stays one line on a terminal too: it is there to be copied.
        screen.print(f"    {job}", highlight=False, markup=False, soft_wrap=True)
    cells = len({spec.cell for spec in specs})
    print_hanging(
        screen, f"{cells} cells, {len(specs)} runs and {len(runs) - len(specs)} references in {arguments.out}", 2
    )
    return OK


def _remark(spec: RunSpec, models: Any) -> str | None:
    if not spec.is_trained:
        return None
    found: str | None = models.beyond_context(models.load(spec.model), spec.model_text, spec.training.sequence_length)
    return found


def _print_files(runs: list[RunSpec], out: Path) -> int:
    """Byte for byte as the engine would get them: no console that wraps or marks up. Nothing is printed of a request
    that cannot be met as a whole."""
    from paceline.campaign.run.controller import unsupported
    from paceline.errors import require
    from paceline.experiment.plugins import load
    from paceline.results import store

    wanted = []
    for spec in runs:
        run_dir = out / spec.experiment / spec.run_id
        reason = unsupported(spec) or ("it is sealed" if store.is_sealed(run_dir) else None)
        if reason is not None:
            print(f"paceline: {spec.run_id} is left out: {reason}", file=sys.stderr)
            continue
        files = load("launchers", spec.launcher.name).prepare(spec, run_dir).files
        # Scripts and requests of other engines, one after the other, would be a file of no kind.
        is_yaml = bool(files) and all(name.endswith((".yaml", ".yml")) for name in files)
        require(is_yaml, "--manifests", spec.launcher.name, "a launcher that writes YAML manifests: kubernetes")
        wanted += files.values()
    print("".join(wanted), end="")
    return OK


def _advised(run_dir: Path) -> Iterator[str]:
    """What is known of a run that was made before and was out of memory."""
    from paceline.analysis.training import memory
    from paceline.errors import StoreError
    from paceline.report.tables.advice import lines
    from paceline.results import store

    with contextlib.suppress(StoreError):
        found = memory.advice(store.read_run(run_dir))
        yield from lines(found) if found else ()


def _describe(spec: RunSpec, models: Any) -> str:
    from paceline.experiment.plugins import load

    outline = getattr(load("workloads", spec.workload.name), "outline", None)
    if outline is not None:
        return str(outline(spec))
    if not spec.is_trained:
        return f"{spec.workload}, {spec.topology.world_size} x {spec.topology.device}"
    t = spec.training
    state = _state_bytes(spec, models)
    bound = "at most " if spec.tuning else ""
    memory = f", state {state / 2**30:.2f} GiB per process" if state is not None else ""
    return (
        f"{_parameters(spec, models)}, {t.precision.compute}, {spec.topology.world_size} x {spec.topology.device}, "
        f"{bound}{spec.tokens_per_step:,} tokens per step "
        f"({t.micro_batch} x {t.accumulation} x {t.sequence_length} each), "
        f"{spec.steps} steps{memory}{_restarts(spec)}"
    )


def _restarts(spec: RunSpec) -> str:
    """What happens when a rank or a node is lost."""
    every = spec.checkpoint_every
    written = f", a checkpoint every {every} steps" if every else ""
    if not spec.max_restarts:
        return written
    times = f"{spec.max_restarts} restart{'' if spec.max_restarts == 1 else 's'}"
    return f"{written}, at most {times} from {'the last checkpoint' if every else 'step 0: it writes no checkpoint'}"


def _parameters(spec: RunSpec, models: Any) -> str:
    shape = models.load(spec.model)
    whole = f"{models.parameters(shape):,} parameters"
    if spec.tuning is None or not spec.tuning.has_adapters:
        return whole
    from paceline.models import adapters

    return f"{whole}, {adapters.trained_parameters(shape, spec.tuning):,} of {spec.tuning.method} learn"


def _state_bytes(spec: RunSpec, models: Any) -> float | None:
    from paceline.experiment.choices import Choice
    from paceline.models import adapters

    shape, strategy = models.load(spec.model), spec.strategy or Choice("single")
    ranks, compute = spec.topology.world_size, spec.training.precision.compute
    if spec.tuning:
        return adapters.state_bytes(shape, spec.tuning, strategy, ranks, compute)
    found: float | None = models.state_bytes(strategy, models.parameters(shape), ranks, compute)
    return found
