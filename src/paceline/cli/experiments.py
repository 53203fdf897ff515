"""Verbs that read an experiment: run it, or show what would run."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.overview import OK
from paceline.cli.results import add_report_options, baseline_of, conclude, costing_of, exporters_of
from paceline.cli.verbs import (
    DEFAULT_OUT,
    Parser,
    add_allow_option,
    add_list_option,
    add_out_option,
    add_verb,
    console,
    print_hanging,
    print_plain,
    waiting,
)

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.analysis.cost.training import Costing
    from paceline.campaign.run.forecast import Expected, Forecast
    from paceline.campaign.run.stopping import Stopping
    from paceline.experiment.spec import RunSpec
    from paceline.results.records import RunRecord

# Shown while references or modes of checkpointing are rehearsed that may not fit: seconds for each, or minutes.
PLANNING = "Looking for what fits the devices"
# How the launcher local starts ranks -> its option `warm`.
RELAUNCH = {"warm": "true", "full": "false"}


def add_verbs(verbs: Any) -> None:
    verb = _experiment_verb(verbs, "run", run, "run every configuration of an experiment, then report")
    verb.add_argument("--resume", action="store_true", help="also repeat runs that did not end ok")
    verb.add_argument(
        "--keep-going",
        action="store_true",
        help="start every run, even after one failed for a reason that would repeat (no image, no nodes)",
    )
    verb.add_argument(
        "--until", metavar="PCT", help="repeat cells until every comparison is known to +-PCT, such as 2%%"
    )
    verb.add_argument(
        "--time-budget", metavar="TIME", help="repeat cells where it helps most, until TIME is over: 90s, 10m, 2h"
    )
    add_report_options(verb)
    verb = _experiment_verb(verbs, "plan", plan, "show what an experiment would run: cells, memory, time and cost")
    verb.add_argument("--commands", action="store_true", help="list every run with the command that starts it")
    verb.add_argument(
        "--manifests",
        action="store_true",
        help="print only the YAML that the launcher kubernetes would apply for unfinished runs",
    )
    verb.add_argument(
        "--gpu", metavar="NAME", help="predict time and cost on this GPU (default: the GPU of this machine)"
    )
    verb.add_argument("--price", metavar="P", help="USD per GPU-hour, or a name from `paceline list prices`")


def _experiment_verb(verbs: Any, name: str, call: Callable[[argparse.Namespace], int], text: str) -> Parser:
    verb = add_verb(verbs, name, call, text)
    verb.add_argument("experiment", metavar="PRESET|FILE", help="a name from `paceline list presets`, or a YAML file")
    add_out_option(verb, "results directory", DEFAULT_OUT, "--output-dir")
    verb.add_argument(
        "--launcher",
        metavar="NAME|FILE",
        help="where to run: a name from `paceline list launchers`, with options as NAME:OPTION=VALUE,..., or a YAML "
        "file with name and options",
    )
    add_list_option(verb, "--set", "KEY=VALUE", "set a field; a list of values makes an axis")
    verb.add_argument(
        "--benchmark", default="all", metavar="KIND", help="run only comm, training or memory cells (default: all)"
    )
    verb.add_argument(
        "--no-cache", action="store_true", help="compute references again, even if an earlier campaign has an equal one"
    )
    verb.add_argument(
        "--relaunch",
        choices=tuple(RELAUNCH),
        help="start ranks on this machine by forking a process that has imported torch (warm, the default of the "
        "launcher local for training), or each as a new interpreter (full)",
    )
    add_allow_option(verb, "a module or setting that an experiment file outside of this directory may name")
    for option, text in (("warmup", "warm-up iterations"), ("iters", "timed iterations")):
        verb.add_argument(f"--{option}", type=int, metavar="N", help=f"{text} of collectives and kernels")
    return verb


def _specs(arguments: argparse.Namespace) -> tuple[list[RunSpec], list[str]]:
    """All runs of the request, each checked by its plugins before anything starts; and what was chosen for the user."""
    from paceline.campaign.run.controller import load_own

    counts = {option: n for option in ("warmup", "iters") if (n := getattr(arguments, option)) is not None}
    settings, notes = [*arguments.set, *_relaunch_settings(arguments)], list[str]()
    with waiting(PLANNING):
        specs = load_own(
            arguments.experiment,
            settings,
            arguments.launcher,
            arguments.benchmark,
            counts,
            allow=arguments.allow_modules,
            notify=notes.append,
        )
    return specs, notes


def _relaunch_settings(arguments: argparse.Namespace) -> list[str]:
    """What `--relaunch` sets; RequestError with a launcher that has one way of starting ranks only."""
    from paceline.errors import require
    from paceline.experiment import expansion

    if arguments.relaunch is None:
        return []
    launcher = expansion.launcher_of(arguments.experiment, arguments.set, arguments.launcher)
    expected = f"the launcher local: {launcher.name} starts every rank as a new interpreter"
    require(launcher.name == "local", f"--relaunch {arguments.relaunch}", launcher.name, expected)
    # An option at its default would make another cell of the same runs.
    is_default = arguments.relaunch == "warm" and "warm" not in launcher.options
    return [] if is_default else [f"launcher.warm={RELAUNCH[arguments.relaunch]}"]


def run(arguments: argparse.Namespace) -> int:
    from paceline.experiment import expansion
    from paceline.experiment.plugins import is_shipped, load

    name = expansion.launcher_of(arguments.experiment, arguments.set, arguments.launcher).name
    # A module that only a file names is not imported before that file is checked.
    if is_shipped("launchers", name) or arguments.launcher:
        launcher = load("launchers", name)
        if hasattr(launcher, "attend"):
            return int(launcher.attend(arguments.out, lambda: run_experiment(arguments)))
    return run_experiment(arguments)


def run_experiment(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run import controller

    (specs, notes), costing, baseline = _specs(arguments), costing_of(arguments), baseline_of(arguments)
    exporters_of(arguments.format)
    stopping = _stopping(arguments, costing)
    controller.expect(specs, arguments.out)
    # Meanwhile: these imports and the forecast take seconds.
    from paceline.campaign.live import display, status_page
    from paceline.campaign.run import forecast
    from paceline.campaign.run.controller import campaign, interruptible
    from paceline.results.campaign_file import read_plan

    screen = console()
    for note in notes:
        print_hanging(screen, note, 2)
    forecasts = _forecasts(specs, None)
    forecast.store(forecasts, arguments.out)
    rate = _usd_per_hour(specs, costing)
    with waiting(PLANNING):
        ahead = _expected(specs, arguments, {one.spec.run_id: one for one in forecasts})
    if ahead:
        total = forecast.total_text(ahead.values(), rate)
        if stopping is not None and stopping.budget_s is not None:
            total = forecast.budget_text(ahead.values(), stopping.budget_s, rate)
        elif all(run.is_bound for run in ahead.values()):
            # The sum of all timeouts is dozens of times what a campaign takes.
            total = "nothing like them ran here before; the time left is known after the first runs"
        print_hanging(screen, f"{len(ahead)} run{'' if len(ahead) == 1 else 's'} to do: {total}", 2)
    observer = display.observer_for(screen, rate, {one.spec.run_id: one.seconds for one in forecasts})
    paged = status_page.Paged(observer, arguments.out)
    try:
        interruptible(
            lambda: campaign(
                specs,
                arguments.out,
                paged,
                retry=arguments.resume,
                keep_going=arguments.keep_going,
                notify=screen.print,
                stopping=stopping,
                partial=_answer_so_far,
                cache=not arguments.no_cache,
                usd_per_hour=rate,
            )
        )
    finally:
        observer.close()
        paged.close()
    directory = arguments.out / specs[0].experiment
    plan = read_plan(directory)
    requested = {run.run for run in plan.runs} if plan else None
    code = conclude(screen, directory, arguments.format, costing, baseline, requested, arguments.verbose)
    if spent := observer.spent():
        print_hanging(screen, spent, 2)
    paged.page.write()
    return code


def _stopping(arguments: argparse.Namespace, costing: Costing) -> Stopping | None:
    from paceline.campaign.run.stopping import Stopping, parse_budget, parse_until

    if arguments.until is None and arguments.time_budget is None:
        return None
    prices = costing.prices or ()
    return Stopping(
        until=None if arguments.until is None else parse_until(arguments.until),
        budget_s=None if arguments.time_budget is None else parse_budget(arguments.time_budget),
        usd_per_hour=prices[0].usd_per_gpu_hour if len(prices) == 1 else None,
    )


def _answer_so_far(records: Sequence[RunRecord]) -> str:
    from paceline.analysis.report import build
    from paceline.report.answer import answer

    return f"so far: {answer(build(records, title=''))[0]}"


def plan(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run import forecast
    from paceline.campaign.run.proofs import Proving

    (specs, notes), screen = _specs(arguments), console()
    with waiting(PLANNING):
        proving = Proving(specs)
    runs = [*proving.runs, *specs]
    if arguments.manifests:
        return _print_manifests(runs, arguments.out)
    predicted = {one.spec.run_id: one for one in _forecasts(runs, arguments.gpu)}
    price, ahead = _price(arguments.price, arguments.gpu), _expected(specs, arguments, predicted)
    if arguments.commands:
        _print_runs(screen, runs, arguments.out, predicted, price)
    else:
        _print_cells(screen, [*specs, *proving.runs], arguments, ahead, price, proving.refused)
    for line in (*notes, *proving.lines()):
        print_hanging(screen, line, 2)
    counts = (
        (len({spec.cell for spec in specs}), "cell"),
        (len(specs), "run"),
        (len(proving.references), "reference run"),
        *([(len(proofs), "proof run")] if (proofs := proving.runs[len(proving.references) :]) else []),
    )
    total = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    print_hanging(screen, f"{total}; results go to {arguments.out}", 2)
    if predicted:
        print_hanging(screen, _forecast_text(list(predicted.values()), price), 2)
    elif ahead:
        print_hanging(screen, f"in total {forecast.total_text(ahead.values(), price)}", 2)
    return OK


def _expected(
    specs: Sequence[RunSpec], arguments: argparse.Namespace, predicted: Mapping[str, Forecast]
) -> dict[str, Expected]:
    """What each unfinished run of a request, its references and proofs will take, without those that are reused."""
    from paceline.campaign.run import forecast
    from paceline.campaign.run.proofs import Proving
    from paceline.campaign.run.references import unsupported
    from paceline.results.campaign_file import EndedRun, read_end

    # What a prediction for another GPU is about cannot run here.
    proving = Proving(specs)
    wanted = [*proving.runs, *specs]
    wanted = [spec for spec in wanted if spec.work not in proving.refused]
    runs = [spec for spec in wanted if spec.run_id in predicted or not unsupported(spec)]
    runs, out = [spec for spec in runs if not _is_reused(spec, arguments)], arguments.out
    ended: dict[str, EndedRun] = {}
    for spec in runs:
        if (end := read_end(out / spec.experiment / spec.run_id)) is not None and end.damage is None:
            ended[spec.run_id] = end
    return forecast.expected(runs, predicted, ended)


def _is_reused(spec: RunSpec, arguments: argparse.Namespace) -> bool:
    """Whether an earlier campaign has an equal reference or proof."""
    from paceline.campaign.run import reference_cache

    return not arguments.no_cache and reference_cache.find(spec) is not None


def _usd_per_hour(specs: Sequence[RunSpec], costing: Costing) -> float | None:
    """The price of one device: the given one, else the lowest listed one of this machine's GPUs; None if unknown."""
    from paceline.host import machine, prices

    if costing.prices is not None:
        return costing.prices[0].usd_per_gpu_hour if len(costing.prices) == 1 else None
    if any(spec.topology.device != "cuda" or spec.launcher.name != "local" for spec in specs):
        return None
    kinds = {gpu.name for gpu in machine.probe().gpus}
    listed = [price.usd_per_gpu_hour for price in prices.table() if price.holds_for(next(iter(kinds), None))]
    return min(listed) if len(kinds) == 1 and listed else None


def _print_cells(
    screen: Console,
    runs: Sequence[RunSpec],
    arguments: argparse.Namespace,
    ahead: Mapping[str, Expected],
    price: float | None,
    refused: Collection[str],
) -> None:
    """A table of the cells, then what a reader should know about some of them, each remark once.

    refused: works that can neither have a reference nor a proof.
    """
    from paceline import report
    from paceline.campaign.run.controller import leads_on
    from paceline.campaign.run.references import unsupported
    from paceline.cli import plans

    reasons = {spec.run_id: reason for spec in runs if (reason := unsupported(spec))}
    is_one_reason = len(set(reasons.values())) == 1
    reused: list[RunSpec] = []

    def state_of(spec: RunSpec) -> str:
        if (reason := reasons.get(spec.run_id)) is not None:
            return "unsupported" if is_one_reason else f"unsupported: {reason}"
        state = _state(out / spec.experiment / spec.run_id)
        if state != "finished" and spec.work in refused:
            return "not started"
        if state != "finished" and _is_reused(spec, arguments):
            reused.append(spec)
            return "reused"
        return f"{state}; more runs may follow" if leads_on(spec) else state

    out: Path = arguments.out
    found = plans.table(runs, state_of, _state_bytes, ahead, price)
    if found is not None:
        screen.print(report.drawn([found]))
    remarks = [remark for spec in runs for remark in _remarks(spec, out / spec.experiment / spec.run_id)]
    if is_one_reason:
        remarks.insert(0, f"unsupported: {next(iter(reasons.values()))}")
    if reused:
        remarks.insert(0, "reused: an earlier campaign computed an equal run; --no-cache computes it again")
    outlines = [_describe(spec) for spec in runs if not spec.is_trained or spec.script is not None]
    for remark in dict.fromkeys((*outlines, *remarks)):
        print_hanging(screen, remark, 2)
    for line in pictures([spec for spec in runs if spec.reduction is None]):
        print_hanging(screen, line, 4)


def pictures(runs: Sequence[RunSpec]) -> list[str]:
    """Which rank holds what, below the strategies that have this layout."""
    drawn: dict[tuple[str, ...], list[str]] = {}
    for spec in runs:
        names = drawn.setdefault(tuple(_picture(spec)), [])
        if str(spec.strategy_text) not in names:
            names.append(str(spec.strategy_text))
    return [line for ranks, names in drawn.items() if ranks for line in ("; ".join(names), *(f"  {r}" for r in ranks))]


def _picture(spec: RunSpec) -> list[str]:
    """Which rank holds what, for a strategy that declares a layout."""
    from paceline.campaign.run.references import unsupported
    from paceline.experiment.layout import declared_layout
    from paceline.models import arithmetic

    layout = declared_layout(spec) if spec.is_trained and spec.script is None else None
    if layout is None or unsupported(spec):
        return []
    shape = arithmetic.load(spec.model)
    return layout.picture(shape.layers, shape.experts or 0)


def _remarks(spec: RunSpec, run_dir: Path) -> list[str]:
    """A sequence beyond the context, and what would fit after an earlier out of memory."""
    from paceline.analysis.training import memory
    from paceline.errors import StoreError
    from paceline.models import arithmetic
    from paceline.report.tables.advice import lines
    from paceline.results import store

    remarks: list[str] = []
    # The reduced form of a proof exceeds what its whole exceeds.
    if spec.is_trained and spec.script is None and spec.reduction is None:
        shape, length = arithmetic.load(spec.model), spec.training.sequence_length
        remarks.append(arithmetic.beyond_context(shape, spec.model_text, length) or "")
    with contextlib.suppress(StoreError):
        # A run that ended out of memory before comes with the settings that would fit.
        fitting = memory.advice(store.read_run(run_dir))
        remarks += lines(fitting) if fitting else ()
    return [remark for remark in remarks if remark]


def _print_runs(
    screen: Console, runs: Sequence[RunSpec], out: Path, predicted: Mapping[str, Forecast], price: float | None
) -> None:
    """Every run with its remarks and the command that starts it."""
    from paceline.campaign.run.controller import leads_on
    from paceline.campaign.run.references import unsupported
    from paceline.experiment.plugins import load

    for number, spec in enumerate(runs, 1):
        run_dir = out / spec.experiment / spec.run_id
        reason = unsupported(spec)
        note = f"unsupported: {reason}" if reason else _state(run_dir)
        note += "; more runs may follow" if leads_on(spec) and not reason else ""
        print_hanging(screen, f"{number:>3} {spec.run_id}  [{note}]", 6)
        forecast = [_forecast_text([predicted[spec.run_id]], price)] if spec.run_id in predicted else []
        for remark in (_describe(spec), *_picture(spec), *_remarks(spec, run_dir), *forecast):
            print_hanging(screen, f"    {remark}", 6)
        # A command is one line on a terminal too, to be copied.
        print_plain(screen, f"    {load('launchers', spec.launcher.name).prepare(spec, run_dir)}")


def _forecasts(specs: Sequence[RunSpec], gpu: str | None) -> list[Forecast]:
    """The runs that can be predicted: those that train on a GPU that is given, or that this machine has."""
    from paceline.campaign.run import forecast
    from paceline.campaign.run.references import unsupported

    local = (spec.topology.device == "cuda" and spec.launcher.name == "local" for spec in specs)
    on_gpu = [spec for spec, here in zip(specs, local, strict=True) if spec.is_trained and (gpu or here)]
    on_gpu = [spec for spec in on_gpu if not unsupported(spec, anywhere=True)]
    found = forecast.gpu_here(gpu) if on_gpu else None
    return [] if found is None else forecast.forecast(on_gpu, found)


def _price(text: str | None, gpu: str | None = None) -> float | None:
    """USD per GPU-hour by `--price`, which must be a price of the GPU that is planned for, if one is named."""
    from paceline.cli.predictions import usd_of
    from paceline.host import prices

    if text is None or gpu is None:
        return None if text is None else prices.chosen(text)[0].usd_per_gpu_hour
    return usd_of(argparse.Namespace(gpu=gpu, price=text))


def _forecast_text(found: Sequence[Forecast], usd_per_gpu_hour: float | None) -> str:
    """`predicted: step 0.42 s (0.33 to 0.53), about 3 min, 0.12 USD`; of several runs the total."""
    from paceline.wording import format_duration

    step = ""
    if len(found) == 1:
        one = found[0].prediction
        step = f"step {one.step_s:.3g} s ({one.low_s:.3g} to {one.high_s:.3g}), "
    total, low, high = (sum(getattr(one, name) for one in found) for name in ("seconds", "low_s", "high_s"))
    usd = "" if usd_per_gpu_hour is None else f", {sum(one.usd(usd_per_gpu_hour) for one in found):.2f} USD"
    return (
        f"predicted{'' if len(found) == 1 else ' in total'}: {step}about {format_duration(total)} "
        f"({format_duration(low)} to {format_duration(high)}){usd}"
    )


def _state(run_dir: Path) -> str:
    from paceline.errors import DamagedRunError
    from paceline.results import store

    try:
        return "finished" if store.is_sealed(run_dir) and store.read_end(run_dir) else "to run"
    except DamagedRunError:
        return "damaged, to run again"


def _print_manifests(runs: list[RunSpec], out: Path) -> int:
    """Print the manifests byte for byte as the engine gets them, or nothing if one run has none."""
    from paceline.campaign.run.references import unsupported
    from paceline.errors import require
    from paceline.experiment.plugins import load

    manifests: list[str] = []
    for spec in runs:
        run_dir = out / spec.experiment / spec.run_id
        reason = unsupported(spec) or ("it is finished" if _state(run_dir) == "finished" else None)
        if reason is not None:
            print(f"paceline: left out {spec.run_id}: {reason}", file=sys.stderr)
            continue
        files = load("launchers", spec.launcher.name).prepare(spec, run_dir).files
        # Scripts and requests of other engines cannot be concatenated.
        is_yaml = bool(files) and all(name.endswith((".yaml", ".yml")) for name in files)
        require(is_yaml, "--manifests", spec.launcher.name, "a launcher that writes YAML manifests: kubernetes")
        manifests += files.values()
    print("".join(manifests), end="")
    return OK


def _state_bytes(spec: RunSpec) -> float | None:
    """Weights, gradients and optimizer state of one process, by arithmetic; None if unknown or nothing is trained."""
    from paceline.experiment.choices import Choice
    from paceline.experiment.layout import declared_layout
    from paceline.experiment.plugins import load
    from paceline.models import adapters, arithmetic, parallel

    if not spec.is_trained or spec.script is not None:
        return None
    shape, tuning, ranks = arithmetic.load(spec.model), spec.tuning, spec.topology.world_size
    compute, strategy = spec.training.precision.base, spec.strategy or Choice("single")
    if tuning:
        return adapters.state_bytes(shape, tuning, strategy, ranks, compute)
    plugin = load("strategies", strategy.name)
    if (layout := declared_layout(spec)) is not None and plugin.check(spec) is None:
        offloads = hasattr(plugin, "offloads") and plugin.offloads(strategy.options)
        return None if offloads else parallel.state_bytes(shape, layout, compute)
    return arithmetic.state_bytes(strategy, arithmetic.parameters(shape), ranks, compute)


def _describe(spec: RunSpec) -> str:
    """One line about the work of a run: parameters, precision, processes, tokens, steps, memory, restarts."""
    from paceline.experiment.plugins import load
    from paceline.models import adapters, arithmetic

    outline = getattr(load("workloads", spec.workload.name), "outline", None)
    if outline is not None:
        return str(outline(spec))
    ranks = spec.topology.world_size
    if not spec.is_trained:
        return f"{spec.workload}, {ranks} x {spec.topology.device}"
    shape, tuning, training = arithmetic.load(spec.model), spec.tuning, spec.training
    compute, count = training.precision.compute, arithmetic.parameters(shape)
    state = _state_bytes(spec)
    trained = ""
    if tuning is not None and tuning.has_adapters:
        trained = f", {adapters.trained_parameters(shape, tuning):,} of them trained by {tuning.method}"
    if shape.experts:
        trained = f" ({arithmetic.active_parameters(shape):,} active)" + trained
    bound = "at most " if tuning else ""
    memory = f", state {state / 2**30:.2f} GiB per process" if state is not None else ""
    every, most = spec.checkpoint_every, spec.max_restarts
    how = " written in the background" if spec.checkpoint_async else ""
    restarts = f", a checkpoint every {every} steps{how}" if every else ""
    if most:
        origin = "the last checkpoint" if every else "step 0 (no checkpoints)"
        restarts += f", at most {most} restart{'' if most == 1 else 's'} from {origin}"
    return (
        f"{count:,} parameters{trained}, {compute}, {ranks} x {spec.topology.device}, "
        f"{bound}{spec.tokens_per_step:,} tokens per step "
        f"({training.micro_batch} x {training.accumulation} x {training.sequence_length} each), "
        f"{spec.steps} steps{memory}{restarts}"
    )
