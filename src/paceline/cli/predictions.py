"""Verbs that answer before anything runs: predict one layout, choose among all."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.results import token_count
from paceline.cli.verbs import OK, Parser, add_list_option, add_out_option, add_verb, console, print_hanging
from paceline.errors import RequestError, require

if TYPE_CHECKING:
    from paceline.prediction.choosing import Decision, Halved
    from paceline.prediction.layouts import Ranked
    from paceline.prediction.offsets import Anchor, Observation
    from paceline.prediction.predict import Prediction
    from paceline.prediction.setup import Setup

MOST_LAYOUTS = 12
MOST_PAIRS = 60


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "predict", predict, "predict step time, memory and cost, with a 90 % interval")
    _add_question(verb)
    verb.add_argument(
        "--layout", default="", metavar="TEXT", help="dp=32,tp=8,zero3 ..., or `all` (default: what fits)"
    )
    verb.add_argument(
        "--up-to", type=int, metavar="N", help="also at every doubling up to N GPUs, with equal work on each"
    )
    _add_serving(verb)
    verb.add_argument(
        "--score", type=Path, metavar="PATH", help="score stored predictions of a results directory, or a CSV"
    )
    verb.add_argument("--save", action="store_true", help="add the prediction to DIR/predictions.jsonl of --out")
    add_out_option(verb, "results directory of --save")
    verb.add_argument("--json", action="store_true", help="print JSON")
    _add_choose(verbs)


def _add_choose(verbs: Any) -> None:
    verb = add_verb(
        verbs, "choose", choose, "rank all layouts of a model by predicted time or cost, and measure the few close ones"
    )
    _add_question(verb, several=True)
    _add_serving(verb)
    verb.add_argument("--by", choices=("cost", "time"), default="cost", help="what to minimise (default: cost)")
    verb.add_argument("--deadline", metavar="TIME", help="the most time for --tokens: 90m, 36h, 3d")
    verb.add_argument("--budget", type=float, metavar="USD", help="the most USD for --tokens")
    verb.add_argument("--measure", action="store_true", help="run the proposed layouts until the choice is clear")
    verb.add_argument("--launcher", metavar="NAME|FILE", help="where --measure runs, as in `paceline run`")
    add_out_option(verb, "where experiment files and measured runs go")
    verb.add_argument("--json", action="store_true", help="print JSON")


def _add_serving(verb: Parser) -> None:
    verb.add_argument(
        "--serving", metavar="IN/OUT", help="serve instead of train: tokens of prompt and answer, 1000/200"
    )
    verb.add_argument("--ttft", type=float, metavar="S", help="with --serving: the most seconds to the first token")
    verb.add_argument("--tpot", type=float, metavar="S", help="with --serving: the most seconds per further token")


def _add_question(verb: Parser, *, several: bool = False) -> None:
    """What is trained, on what, and what was measured before. several: GPUs and their numbers may be lists."""
    verb.add_argument(
        "--model", metavar="NAME", help="a name from `paceline list models`, or a directory with config.json"
    )
    if several:
        verb.add_argument(
            "--gpu", required=True, metavar="NAME,...", help="h100, a100, a10, ...; several to compare them"
        )
        verb.add_argument("--gpus", required=True, metavar="N,...", help="number of GPUs; several to compare them")
    else:
        verb.add_argument("--gpu", metavar="NAME", help="h100, a100, a10, ...")
        verb.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    verb.add_argument("--seq", type=int, metavar="N", help="sequence length (default: 4096 or the model's context)")
    verb.add_argument("--global-batch", type=int, metavar="N", help="sequences per optimizer step")
    verb.add_argument("--micro-batch", type=int, metavar="N", help="sequences per micro batch (default: what fits)")
    verb.add_argument("--precision", default="bf16", metavar="TYPE", help="bf16, fp16 or fp8 (default: bf16)")
    verb.add_argument("--checkpointing", metavar="KIND", help="none, selective or full (default: what fits)")
    verb.add_argument("--method", default="full", metavar="NAME", help="full, lora or qlora (default: full)")
    verb.add_argument(
        "--software", default="generic", metavar="NAME", help="paceline, nemo, torchtitan, ... (default: generic)"
    )
    verb.add_argument(
        "--interconnect", default="", metavar="NAME", help="nvlink4, ib-ndr, roce, 25gbe, or several with +"
    )
    verb.add_argument("--tokens", metavar="N", help="tokens of the whole training, such as 2B: adds days and USD")
    verb.add_argument(
        "--price", metavar="P", help="USD per GPU-hour, a name from `paceline list prices`, or a .toml file"
    )
    add_list_option(
        verb, "--anchor", "PATH", "measured runs of this cluster: a results directory or a CSV; may be repeated"
    )


# --- predict ---


def predict(arguments: argparse.Namespace) -> int:
    from paceline.prediction import scaling, stored
    from paceline.prediction.predict import next_measurement, worth
    from paceline.prediction.predict import predict as predicted
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    if arguments.score is not None:
        return _score(arguments)
    if _without_speed(arguments):
        return OK
    if arguments.serving is not None:
        return _serving(arguments)
    anchors, observations = _measured(arguments.anchor)
    tokens, usd = _tokens(arguments), _usd(arguments)
    if arguments.layout == "all":
        return _all_layouts(arguments, anchors, observations)
    one = predicted([_setup(arguments)], anchors, observations)[0]
    if arguments.save:
        stored.append(arguments.out, [stored.to_dict(one, tokens, usd)], time.time())
    if arguments.json:
        print(json.dumps(stored.to_dict(one, tokens, usd), indent=2))
        return OK
    screen = console()
    if arguments.up_to is not None:
        grown = scaling.extrapolate(one.setup, arguments.up_to, anchors, observations)
        screen.print(Fitted(tables.scaled(grown)))
        print_hanging(screen, scaling.limit_text(grown), 2)
        return OK
    for table in (tables.summary(one, tokens, usd), tables.time_parts(one), tables.memory_parts(one)):
        screen.print(Fitted(table))
    if anchors or observations:
        screen.print(Fitted(tables.narrowing(worth(one.setup, anchors, observations))))
    screen.print(Fitted(tables.suggestions(next_measurement(one.setup, anchors, observations)[:4])))
    return OK


def _without_speed(arguments: argparse.Namespace) -> bool:
    """Whether the GPU has no known links: then rules of thumb about its memory are printed instead."""
    from paceline.analysis.training import rules_of_thumb
    from paceline.experiment.choices import Choice
    from paceline.prediction import hardware
    from paceline.report.tables import verdicts
    from paceline.report.terminal import Fitted

    for name in ("model", "gpu"):
        require(bool(getattr(arguments, name)), f"--{name}", getattr(arguments, name), "a name")
    try:
        hardware.accelerator(arguments.gpu)
    except RequestError as unknown:
        try:
            rules = rules_of_thumb.advise(Choice.parse(arguments.model), arguments.gpu, arguments.gpus, arguments.seq)
        except RequestError:
            raise unknown from None
        console().print(Fitted(verdicts.advice(rules)))
        return True
    return False


def _all_layouts(arguments: argparse.Namespace, anchors: Sequence[Anchor], observations: Sequence[Observation]) -> int:
    from paceline.prediction import stored
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    ranked = ranked_layouts(arguments, anchors, observations)
    tokens, usd = _tokens(arguments), _usd(arguments)
    if arguments.save:
        stored.append(arguments.out, [stored.to_dict(one, tokens, usd) for one in ranked.all], time.time())
    if arguments.json:
        print(json.dumps([stored.to_dict(one, tokens, usd) for one in ranked.all], indent=2))
        return OK
    heading = f"{ranked.fitting} of {ranked.enumerated} variants fit; the best of each layout"
    console().print(Fitted(tables.layouts(heading, worded(ranked), usd, tokens)))
    return OK


def worded(ranked: Ranked) -> list[tuple[str, Prediction]]:
    """Each layout with its verdict: best, may be equal, slower."""
    words = [("best", ranked.best), *(("may be equal", one) for one in ranked.close)]
    return [*words, *(("slower", one) for one in ranked.rest)][:MOST_LAYOUTS]


def ranked_layouts(
    arguments: argparse.Namespace, anchors: Sequence[Anchor], observations: Sequence[Observation]
) -> Ranked:
    from paceline.prediction import layouts

    base = _setup(arguments, whole=True)
    found = layouts.rank(list(layouts.enumerate_layouts(base, int(base.global_batch))), anchors, observations)
    if found is None:
        raise RequestError(
            f"--gpus: got {base.gpus} x {base.gpu.gpu}, expected enough memory for {base.shape.name}. No layout fits: "
            "use more GPUs, --method qlora, or a shorter --seq."
        )
    return found


def _setup(arguments: argparse.Namespace, *, whole: bool = False) -> Setup:
    """The setup of the command line; whole: one data-parallel rank per GPU, from which layouts are enumerated."""
    from paceline.prediction.predict import parse_layout, setup_of

    degrees = {} if whole else parse_layout(arguments.layout)
    batch = arguments.global_batch
    if whole and batch is not None and batch % arguments.gpus:
        # Layouts with tensor or pipeline parallelism have fewer ranks; the enumeration keeps those that divide it.
        batch = None
    one = setup_of(
        arguments.model,
        arguments.gpu,
        arguments.gpus,
        sequence_length=arguments.seq,
        global_batch=batch,
        micro_batch=None if whole else arguments.micro_batch,
        precision=arguments.precision,
        checkpointing=arguments.checkpointing,
        method=arguments.method,
        software=arguments.software,
        interconnect=arguments.interconnect,
        **degrees,
    )
    if whole and arguments.global_batch:
        one = one.replaced(micro_batch=1, micro_batches=arguments.global_batch / arguments.gpus)
    return one


def _tokens(arguments: argparse.Namespace) -> float | None:
    return None if arguments.tokens is None else float(token_count(arguments.tokens))


def _usd(arguments: argparse.Namespace) -> float | None:
    """The price of one GPU-hour: as given, else the cheapest on-demand price in the table; None if there is none."""
    from paceline.host import prices
    from paceline.prediction import hardware

    if arguments.gpu is None:
        return None
    name = hardware.accelerator(arguments.gpu).gpu
    offers = prices.chosen(arguments.price) if arguments.price else prices.table()
    known = [p.usd_per_gpu_hour for p in offers if p.holds_for(name) and p.kind != prices.SPOT]
    return min(known) if known else None


def _measured(paths: Sequence[str]) -> tuple[list[Anchor], list[Observation]]:
    """Anchors and observations of results directories and CSV tables."""
    from paceline.campaign.run.controller import read_launches
    from paceline.prediction import published, runs
    from paceline.prediction.offsets import Anchor

    anchors: list[Anchor] = []
    observations: list[Observation] = []
    for text in paths:
        path = Path(text)
        if path.suffix == ".csv" and path.is_file():
            anchors += [Anchor(row.setup, row.step_s, row.row_id or row.source) for row in published.read(path)]
            continue
        if not path.is_dir():
            raise RequestError(f"--anchor: got {text!r}, expected a results directory or a CSV file.")
        records = [record for one in _with_runs(path) for record in read_launches(one)[0]]
        anchors += runs.anchors(records)
        observations += runs.observations(records)
    if paths and not anchors and not observations:
        raise RequestError(
            f"--anchor: got {', '.join(paths)}, expected a successful training, fabric or compute run on a known GPU."
        )
    return anchors, observations


def _with_runs(path: Path) -> list[Path]:
    """The directories at or below this one that hold runs."""
    found = {status.parent.parent for status in path.rglob("status.json")}
    return sorted(found)


# --- serving ---


def _serving(arguments: argparse.Namespace) -> int:
    """Replicas against tensor parallelism on each kind and number of GPUs, under limits on TTFT and TPOT."""
    from paceline.experiment.choices import Choice
    from paceline.models import arithmetic
    from paceline.prediction import hardware, serving
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    prompt, _, answer = arguments.serving.partition("/")
    valid = prompt.isdigit() and answer.isdigit() and int(prompt) * int(answer) > 0
    require(valid, "--serving", arguments.serving, "tokens of prompt and answer, such as 1000/200")
    kinds = serving.WEIGHT_BYTES
    require(arguments.precision in kinds, "--precision", arguments.precision, ", ".join(kinds))
    found = []
    for gpu in _words(arguments.gpu):
        for gpus in _words(str(arguments.gpus)):
            require(gpus.isdigit() and int(gpus) > 0, "--gpus", gpus, "whole numbers from 1")
            base = serving.Served(
                shape=arithmetic.load(Choice.parse(arguments.model)),
                gpu=hardware.accelerator(gpu),
                precision=arguments.precision,
                input_tokens=int(prompt),
                output_tokens=int(answer),
            )
            found += serving.partitions(base, int(gpus), arguments.ttft, arguments.tpot)
    if not found:
        raise RequestError(
            f"--gpus: got {arguments.gpus} x {arguments.gpu}, expected enough for {arguments.model} within the limits. "
            "Use more GPUs, --precision fp8, or a longer --ttft and --tpot."
        )
    if arguments.json:
        print(json.dumps([serving.to_dict(one) for one in found], indent=2))
        return OK
    console().print(Fitted(tables.served(found)))
    return OK


# --- choose ---


def choose(arguments: argparse.Namespace) -> int:
    """Enumerate, drop what does not fit, rank, group what may be equal, and say which few runs would decide."""
    from paceline.prediction import stored
    from paceline.report.tables import choices
    from paceline.report.terminal import Fitted

    if arguments.serving is not None:
        return _serving(arguments)
    anchors, observations = _measured(arguments.anchor)
    decision = _decision(arguments, anchors, observations)
    files = _write_files(arguments, decision)
    stored.append(
        arguments.out, [stored.to_dict(one.prediction) for one in decision.options[:MOST_LAYOUTS]], time.time()
    )
    halved = None
    if arguments.measure and decision.best is not None:
        halved = _measure(arguments, decision)
        if halved.anchors:
            decision = _decision(arguments, [*anchors, *halved.anchors], observations)
    if arguments.json:
        print(json.dumps(choices.to_dict(decision, halved, files), indent=2))
        return OK
    screen = console()
    for table in choices.tables(decision):
        screen.print(Fitted(table))
    for line in choices.lines(decision, halved, files):
        print_hanging(screen, line, 2)
    return OK


def _decision(
    arguments: argparse.Namespace, anchors: Sequence[Anchor], observations: Sequence[Observation]
) -> Decision:
    from paceline.prediction import choosing, layouts

    limits = choosing.Limits(tokens=_tokens(arguments), deadline_s=_deadline(arguments), budget_usd=arguments.budget)
    if (limits.deadline_s or limits.budget_usd) and limits.tokens is None:
        raise RequestError("--deadline and --budget: got no --tokens, expected how many tokens to train, such as 2B.")
    options: list[choosing.Option] = []
    enumerated = fitting = 0
    for method in _words(arguments.method):
        for gpu in _words(arguments.gpu):
            for gpus in _words(arguments.gpus):
                require(gpus.isdigit() and int(gpus) > 0, "--gpus", gpus, "whole numbers from 1")
                one = argparse.Namespace(**{**vars(arguments), "gpu": gpu, "gpus": int(gpus), "method": method})
                base = _setup(one, whole=True)
                tried = list(layouts.enumerate_layouts(base, int(base.global_batch)))
                ranked = layouts.rank(tried, anchors, observations)
                enumerated += len(tried)
                if ranked is not None:
                    fitting += ranked.fitting
                    usd = _usd(one)
                    options += [choosing.Option(prediction=p, usd_per_gpu_hour=usd) for p in ranked.all]
    if not options:
        raise RequestError(
            f"--gpus: got {arguments.gpus} x {arguments.gpu}, expected enough memory for {arguments.model}. No layout "
            "fits: use more GPUs, --method qlora, or a shorter --seq."
        )
    return choosing.decide(options, limits, arguments.by, enumerated, fitting)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _deadline(arguments: argparse.Namespace) -> float | None:
    from paceline.campaign.run.stopping import parse_budget

    text = arguments.deadline
    if text is None:
        return None
    if text.endswith("d"):
        require(text[:-1].replace(".", "", 1).isdigit(), "--deadline", text, "a time such as 90m, 36h or 3d")
        return float(text[:-1]) * 86400
    return float(parse_budget(text))


def _write_files(arguments: argparse.Namespace, decision: Decision) -> list[Path]:
    """Experiment files of the proposed layouts, for those that Paceline can run itself."""
    import yaml

    from paceline.prediction import experiment_file

    proposed = decision.to_measure or decision.options[:1]
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


def _measure(arguments: argparse.Namespace, decision: Decision) -> Halved:
    """Run the proposed layouts that Paceline can run, by successive halving, through the launcher."""
    from paceline.prediction import choosing, experiment_file

    proposed = [one.prediction.setup for one in (decision.to_measure or decision.options[:1])]
    runnable = [one for one in proposed if experiment_file.runnable(one) is None]
    if not runnable:
        reason = experiment_file.runnable(proposed[0])
        raise RequestError(f"--measure: got {proposed[0].layout}, expected a layout that Paceline runs. {reason}.")
    return choosing.halve(runnable, lambda setups, steps: _run_setups(arguments, setups, steps))


def _run_setups(arguments: argparse.Namespace, setups: Sequence[Setup], steps: int) -> list[tuple[Setup, float, float]]:
    """Measured step times of those setups that ended ok."""
    import yaml

    from paceline.campaign.live import display
    from paceline.campaign.run.controller import campaign, interruptible, load_own, read_launches
    from paceline.prediction import experiment_file, runs, stored

    name = f"choose-{steps}"
    path = arguments.out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(experiment_file.document(arguments.model, setups, name, steps)), encoding="utf-8")
    specs = load_own(str(path), launcher=arguments.launcher)
    observer = display.observer_for(console())
    try:
        interruptible(lambda: campaign(specs, arguments.out, observer))
    finally:
        observer.close()
    wanted = {stored.key(one): one for one in setups}
    found = []
    for record in read_launches(arguments.out / name)[0]:
        one = runs.measured(record)
        if one is not None and stored.key(one.setup) in wanted:
            found.append((wanted[stored.key(one.setup)], one.step_s, max(one.sd, 0.01)))
    return found


# --- score ---


def _score(arguments: argparse.Namespace) -> int:
    """How right predictions were: of stored ones that were measured since, or of the rows of a table."""
    from paceline.prediction import scoring
    from paceline.report.tables import predicted
    from paceline.report.terminal import Fitted

    path = arguments.score
    anchors, observations = _measured(arguments.anchor)
    if path.suffix == ".csv" and path.is_file():
        found = scoring.score_table(path, anchors, observations)
    else:
        require(path.is_dir(), "--score", str(path), "a results directory or a CSV file")
        from paceline.campaign.run.controller import read_launches
        from paceline.prediction import stored

        records = [record for one in _with_runs(path) for record in read_launches(one)[0]]
        rows = [row for one in {path, *_with_runs(path)} for row in stored.read(one)]
        found = scoring.score_runs(rows, records)
    if arguments.json:
        print(json.dumps(scoring.to_dict(found), indent=2))
        return OK
    screen = console()
    if not found.pairs:
        print_hanging(screen, "No prediction has been measured yet.", 2)
        return OK
    if len(found.pairs) <= MOST_PAIRS:
        screen.print(Fitted(predicted.beside([(one.name, one) for one in found.pairs])))
    for line in scoring.lines(found):
        print_hanging(screen, line, 2)
    return OK
