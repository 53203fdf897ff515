"""The verb choose: rank all layouts of a model, measure the few close ones, and recommend one."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.overview import OK, SOME_FAILED
from paceline.cli.predictions import (
    MOST_LAYOUTS,
    add_question,
    add_serving,
    check_rehearsal,
    rehearsing,
    serving_options,
    setup_from,
    tokens_of,
    usd_of,
    words_of,
)
from paceline.cli.verbs import add_out_option, add_verb, console, print_hanging, waiting
from paceline.errors import RequestError, require

if TYPE_CHECKING:
    from paceline.campaign.run.measured_setups import Known
    from paceline.experiment.spec import RunSpec
    from paceline.prediction.choosing import Decision, Halved, Timed
    from paceline.prediction.offsets import Anchor
    from paceline.prediction.setup import Setup

# How often predictions that learned from the runs may add candidates.
MOST_PASSES = 2


def add_verbs(verbs: Any) -> None:
    verb = add_verb(
        verbs, "choose", choose, "rank all layouts of a model by predicted time or cost, and measure the few close ones"
    )
    add_question(verb, several=True)
    add_serving(verb)
    verb.add_argument("--by", choices=("cost", "time"), default="cost", help="what to minimise (default: cost)")
    verb.add_argument("--deadline", metavar="TIME", help="the most time for --tokens: 90m, 36h, 3d")
    verb.add_argument("--budget", type=float, metavar="USD", help="the most USD for --tokens")
    verb.add_argument("--measure", action="store_true", help="run the proposed layouts until the choice is clear")
    verb.add_argument("--launcher", metavar="NAME|FILE", help="where --measure runs, as in `paceline run`")
    add_out_option(verb, "where experiment files and measured runs go")
    verb.add_argument("--json", action="store_true", help="print JSON")


def choose(arguments: argparse.Namespace) -> int:
    """Enumerate, drop what does not fit, rank, group what may be equal, and say which few runs would decide."""
    from paceline.campaign.run.measured_setups import read_known
    from paceline.prediction import stored
    from paceline.report.tables import choices
    from paceline.report.terminal import Fitted

    if arguments.serving is not None:
        return serving_options(arguments)
    check_rehearsal(arguments)
    known = read_known(arguments.anchor)
    decision = predicted = _decision(arguments, known)
    candidates = _candidates(arguments, decision) if arguments.measure and decision.best is not None else []
    stored.append(
        arguments.out, [stored.to_dict(one.prediction) for one in decision.options[:MOST_LAYOUTS]], time.time()
    )
    halved = None
    if candidates:
        decision, halved = _measure(arguments, known, decision, candidates)
    with waiting(rehearsing(arguments)):
        decision, memory = _rehearsed(arguments, known, decision, halved)
    files = _write_files(arguments, decision, measured=halved is not None and halved.best is not None)
    code = OK if decision.best is not None else SOME_FAILED
    if arguments.json:
        print(json.dumps(choices.to_dict(decision, predicted, halved, files, memory), indent=2))
        return code
    screen = console()
    for table in choices.tables(decision):
        screen.print(Fitted(table))
    for line in (*choices.lines(decision, predicted, halved, files), *memory):
        print_hanging(screen, line, 2)
    return code


def _rehearsed(
    arguments: argparse.Namespace, known: Known, decision: Decision, halved: Halved | None
) -> tuple[Decision, list[str]]:
    """A decision whose best option fits when it is rehearsed, and what was rehearsed, in sentences.

    After a rehearsal that does not fit, options are chosen again as if the arithmetic were too low by the same factor.
    """
    from paceline.campaign.run.rehearsed import rehearse
    from paceline.prediction import choosing
    from paceline.prediction import memory as arithmetic
    from paceline.report.tables import choices

    lines, factor = list[str](), 1.0
    while (best := decision.best) is not None and best.prediction.measured_by is None:
        setup = best.prediction.setup
        memory = rehearse(arguments.model, setup, arguments.rehearse)
        lines.append(choices.memory_line(best, memory.peak_bytes, memory.reason))
        peak = memory.peak_bytes
        if peak is None or arithmetic.fits(setup, peak_bytes=peak):
            break
        factor = max(factor, peak / arithmetic.total(setup))
        decision = _decision(arguments, known, halved.anchors if halved else (), factor)
        if halved is not None:
            decision = choosing.with_measured(decision, halved)
    return decision, lines


def _decision(
    arguments: argparse.Namespace, known: Known, runs: Sequence[Anchor] = (), memory_factor: float = 1.0
) -> Decision:
    """The options of the command line by prediction. runs: measured meanwhile. memory_factor: how much more memory than
    the arithmetic says a rehearsal needed."""
    from paceline.prediction import choosing, layouts

    budget = arguments.budget
    require(budget is None or budget > 0, "--budget", budget, "USD above 0")
    limits = choosing.Limits(tokens=tokens_of(arguments), deadline_s=_deadline(arguments), budget_usd=arguments.budget)
    if (limits.deadline_s or limits.budget_usd) and limits.tokens is None:
        raise RequestError("--deadline and --budget: got no --tokens, expected how many tokens to train, such as 2B.")
    options: list[choosing.Option] = []
    enumerated = fitting = 0
    for method in words_of("--method", arguments.method):
        for gpu in words_of("--gpu", arguments.gpu):
            for gpus in words_of("--gpus", arguments.gpus):
                require(gpus.isdigit() and int(gpus) > 0, "--gpus", gpus, "whole numbers from 1")
                one = argparse.Namespace(**{**vars(arguments), "gpu": gpu, "gpus": int(gpus), "method": method})
                base = setup_from(one, known, whole=True)
                tried = list(
                    layouts.enumerate_layouts(
                        base, int(base.global_batch), arguments.micro_batch, arguments.checkpointing
                    )
                )
                ranked = layouts.rank(tried, [*known.anchors, *runs], known.observations, memory_factor)
                enumerated += len(tried)
                if ranked is not None:
                    fitting += ranked.fitting
                    usd = usd_of(one)
                    options += [choosing.Option(prediction=p, usd_per_gpu_hour=usd) for p in ranked.all]
    if not options:
        rehearsed = f" (a rehearsal needed {memory_factor:.3g} times as much as the arithmetic says)"
        raise RequestError(
            f"--gpus: got {arguments.gpus} x {arguments.gpu}, expected enough memory for {arguments.model}. No layout "
            f"fits, not even with offload to the host{rehearsed if memory_factor > 1 else ''}: use more GPUs, "
            "--method qlora, or a shorter --seq."
        )
    unpriced = limits.budget_usd is not None and any(one.usd_per_gpu_hour is None for one in options)
    require(not unpriced, "--budget", limits.budget_usd, f"--price as well: {arguments.gpu} has no known price")
    return choosing.decide(options, limits, arguments.by, enumerated, fitting)


def _deadline(arguments: argparse.Namespace) -> float | None:
    from paceline.campaign.run.stopping import parse_budget

    return None if arguments.deadline is None else parse_budget(arguments.deadline, "--deadline")


def _write_files(arguments: argparse.Namespace, decision: Decision, *, measured: bool) -> list[Path]:
    """Experiment files, where Paceline can run it: of the recommended layout if runs decided, else of the proposed."""
    import yaml

    from paceline.prediction import experiment_file

    proposed = decision.options[:1] if measured else decision.to_measure or decision.options[:1]
    written = []
    for option in proposed:
        one = option.prediction.setup
        if experiment_file.runnable(one) is None:
            name = f"choose-{one.gpus}x-{one.layout.replace('=', '').replace(',', '-')}"
            path = arguments.out / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            document = experiment_file.document(arguments.model, [one], name, 40)
            path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
            written.append(path)
    return written


def _candidates(arguments: argparse.Namespace, decision: Decision) -> list[Setup]:
    """The proposed layouts that Paceline can run; RequestError if there are none, or not on the machine of `--gpu`."""
    from paceline.campaign.run import forecast
    from paceline.prediction import experiment_file, hardware

    kinds = words_of("--gpu", arguments.gpu)
    require(len(kinds) == 1, "--measure", ",".join(kinds), "one kind of GPU: the launcher decides where runs go")
    proposed = [one.prediction.setup for one in (decision.to_measure or decision.options[:1])]
    gpu = proposed[0].gpu
    if arguments.launcher in (None, "local") and gpu.name != hardware.CPU:
        here = forecast.gpu_here(None)
        expected = f"a machine with {gpu.gpu}; this one has {here.gpu if here else 'none'}, and --launcher names others"
        require(here is not None and here.gpu == gpu.gpu, "--measure", gpu.name, expected)
    candidates = [one for one in proposed if experiment_file.runnable(one) is None]
    if not candidates:
        reason = experiment_file.runnable(proposed[0])
        raise RequestError(f"--measure: got {proposed[0].layout}, expected a layout that Paceline runs. {reason}.")
    return candidates


def _measure(
    arguments: argparse.Namespace, known: Known, decision: Decision, candidates: Sequence[Setup]
) -> tuple[Decision, Halved]:
    """Run the candidates by successive halving, and decide again with what they showed.

    Predictions learn from the runs. If they then expect a layout that was not run to be faster, it is run as well.
    """
    from paceline.prediction import choosing, experiment_file

    usd = decision.options[0].usd_per_gpu_hour

    def cost(timed: Timed) -> float:
        return choosing.cost_per_token(timed.setup, timed.step_s, usd, decision.by)

    halved, learned = choosing.Halved(), decision
    for _ in range(MOST_PASSES):
        halved = choosing.halve(candidates, lambda setups, steps: _run(arguments, setups, steps), cost, halved)
        learned = _decision(arguments, known, halved.anchors)
        fresh = [one for one in choosing.rivals(learned, halved) if experiment_file.runnable(one) is None]
        if halved.best is None or not fresh:
            break
        candidates = [halved.best, *fresh]
    return choosing.with_measured(learned, halved), halved


def _run(arguments: argparse.Namespace, setups: Sequence[Setup], steps: int) -> list[Timed]:
    """Measure setups through the launcher of the command line."""
    from paceline.campaign.live import display
    from paceline.campaign.run.controller import campaign, interruptible
    from paceline.campaign.run.measured_setups import run_setups

    def run(specs: Sequence[RunSpec]) -> None:
        # On stderr: stdout is for the answer, which may be JSON.
        observer = display.observer_for(console(stderr=True))
        try:
            interruptible(lambda: campaign(specs, arguments.out, observer))
        finally:
            observer.close()

    return run_setups(arguments.model, setups, steps, arguments.out, arguments.launcher, run)
