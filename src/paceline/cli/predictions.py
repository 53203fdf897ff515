"""The verb that answers before anything runs: predict one layout, and score what was predicted."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.overview import OK
from paceline.cli.results import token_count
from paceline.cli.verbs import Parser, add_list_option, add_out_option, add_verb, console, print_hanging, waiting
from paceline.errors import RequestError, require

if TYPE_CHECKING:
    from paceline.campaign.run.measured_setups import Known
    from paceline.campaign.run.rehearsed import Rehearsed
    from paceline.prediction.layouts import Ranked
    from paceline.prediction.predict import Prediction
    from paceline.prediction.setup import Setup

MOST_LAYOUTS = 12
MOST_PAIRS = 60
# A rehearsal of a model with 32 layers takes about this long on one free core.
REHEARSAL_S = 20.0


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "predict", predict, "predict step time, memory and cost, with a 90 % interval")
    add_question(verb)
    verb.add_argument(
        "--layout", default="", metavar="TEXT", help="dp=32,tp=8,zero3 ..., or `all` (default: what fits)"
    )
    verb.add_argument(
        "--up-to", type=int, metavar="N", help="also at every doubling up to N GPUs, with equal work on each"
    )
    add_serving(verb)
    verb.add_argument(
        "--score", type=Path, metavar="PATH", help="score stored predictions of a results directory, or a CSV"
    )
    verb.add_argument("--save", action="store_true", help="add the prediction to DIR/predictions.jsonl of --out")
    add_out_option(verb, "results directory of --save")
    verb.add_argument("--json", action="store_true", help="print JSON")


def add_serving(verb: Parser) -> None:
    verb.add_argument(
        "--serving", metavar="IN/OUT", help="serve instead of train: tokens of prompt and answer, 1000/200"
    )
    verb.add_argument("--ttft", type=float, metavar="S", help="with --serving: the most seconds to the first token")
    verb.add_argument("--tpot", type=float, metavar="S", help="with --serving: the most seconds per further token")
    verb.add_argument(
        "--endpoint",
        metavar="TEXT",
        help="with --serving: what serves behind the URL of anchors: gpu=h200,tp=2,precision=fp8,model=llama-8b",
    )


def add_question(verb: Parser, *, several: bool = False) -> None:
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
    verb.add_argument(
        "--rehearse",
        type=float,
        default=REHEARSAL_S,
        metavar="S",
        help=f"seconds that a rehearsal of the memory may take, 0 for arithmetic only (default: {REHEARSAL_S:g})",
    )
    add_list_option(
        verb, "--anchor", "PATH", "measured runs of this cluster: a results directory or a CSV; may be repeated"
    )


# --- predict ---


def predict(arguments: argparse.Namespace) -> int:
    from paceline.campaign.run.measured_setups import read_known
    from paceline.prediction import memory as needs
    from paceline.prediction import scaling, stored
    from paceline.prediction.predict import next_measurement, worth
    from paceline.prediction.predict import predict as predicted
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    if arguments.score is not None:
        return _score(arguments)
    check_rehearsal(arguments)
    if _without_speed(arguments):
        return OK
    if arguments.serving is not None:
        return serving_options(arguments)
    most = arguments.up_to
    require(most is None or most > arguments.gpus, "--up-to", most, f"more than the {arguments.gpus} of --gpus")
    alone = most is None or not (arguments.json or arguments.save or arguments.layout == "all")
    require(alone, "--up-to", most, "no --json, --save or --layout all, which are of one number of GPUs")
    known = read_known(arguments.anchor)
    anchors, observations = known.anchors, known.observations
    tokens, usd = tokens_of(arguments), usd_of(arguments)
    if arguments.layout == "all":
        return _all_layouts(arguments, known)
    screen = console()
    if most is not None:
        grown = scaling.extrapolate(setup_from(arguments, known), most, anchors, observations)
        screen.print(Fitted(tables.scaled(grown)))
        print_hanging(screen, scaling.limit_text(grown), 2)
        return OK
    with waiting(rehearsing(arguments)):
        setup, memory, too_large = _rehearsed(arguments, known)
    one = predicted([setup], anchors, observations)[0]
    if arguments.save:
        stored.append(arguments.out, [stored.to_dict(one, tokens, usd)], time.time())
    if arguments.json:
        fits = {"fits": needs.fits(setup, peak_bytes=memory.peak_bytes)}
        print(json.dumps({**stored.to_dict(one, tokens, usd), **fits, **memory.to_dict()}, indent=2))
        return OK
    parts = tables.memory_parts(one, memory.components, memory.reason, too_large)
    for table in (tables.summary(one, tokens, usd, memory.peak_bytes), tables.time_parts(one), parts):
        screen.print(Fitted(table))
    if anchors or observations:
        screen.print(Fitted(tables.narrowing(worth(one.setup, anchors, observations))))
    if suggested := next_measurement(one.setup, anchors, observations)[:4]:
        screen.print(Fitted(tables.suggestions(suggested)))
    return OK


def rehearsing(arguments: argparse.Namespace) -> str:
    return f"Rehearsing the memory: at most {arguments.rehearse:g} s each (--rehearse 0 skips it)"


def _rehearsed(arguments: argparse.Namespace, known: Known) -> tuple[Setup, Rehearsed, list[Setup]]:
    """The setup, its rehearsal, and faster setups that did not fit when they were rehearsed: then what is left open in
    the command line is chosen again, as if the arithmetic were too low by the same factor."""
    from paceline.campaign.run.rehearsed import rehearse
    from paceline.prediction import memory

    factor, tried = 1.0, list[tuple[Any, Any]]()
    while True:
        one = setup_from(arguments, known, memory_factor=factor)
        if tried and one == tried[-1][0]:
            # Nothing smaller is left open.
            return *tried[-1], [setup for setup, _ in tried[:-1]]
        found = rehearse(arguments.model, one, arguments.rehearse)
        peak = found.peak_bytes
        if peak is None or memory.fits(one, peak_bytes=peak):
            return one, found, [setup for setup, _ in tried]
        tried.append((one, found))
        factor = max(factor, peak / memory.total(one))


def _without_speed(arguments: argparse.Namespace) -> bool:
    """Whether the GPU has no known links: then rules of thumb about its memory are printed instead."""
    from paceline.analysis.training import rules_of_thumb
    from paceline.experiment.choices import Choice
    from paceline.prediction import hardware
    from paceline.report.tables import verdicts
    from paceline.report.terminal import Fitted

    for name in ("model", "gpu"):
        require(
            bool(getattr(arguments, name)),
            f"--{name}",
            getattr(arguments, name),
            f"a name from `paceline list {name}s`",
        )
    if arguments.gpu.casefold() == hardware.CPU:
        return False
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


def _all_layouts(arguments: argparse.Namespace, known: Known) -> int:
    from paceline.prediction import stored
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    ranked = ranked_layouts(arguments, known)
    tokens, usd = tokens_of(arguments), usd_of(arguments)
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


def ranked_layouts(arguments: argparse.Namespace, known: Known) -> Ranked:
    from paceline.prediction import layouts

    base = setup_from(arguments, known, whole=True)
    tried = list(
        layouts.enumerate_layouts(base, int(base.global_batch), arguments.micro_batch, arguments.checkpointing)
    )
    found = layouts.rank(tried, known.anchors, known.observations)
    if found is None:
        raise RequestError(
            f"--gpus: got {base.gpus} x {base.gpu.gpu}, expected enough memory for {base.shape.name}. No layout fits: "
            "use more GPUs, --method qlora, or a shorter --seq."
        )
    return found


def setup_from(
    arguments: argparse.Namespace, known: Known, *, whole: bool = False, memory_factor: float = 1.0
) -> Setup:
    """The setup of the command line; whole: one data-parallel rank per GPU, from which layouts are enumerated.

    memory_factor: how much more memory than the arithmetic says a rehearsal needed.
    """
    from paceline.prediction.predict import parse_layout, setup_of

    degrees = {} if whole else parse_layout(arguments.layout)
    micro = arguments.micro_batch
    require(micro is None or micro >= 1, "--micro-batch", micro, "a whole number from 1")
    batch = arguments.global_batch
    if whole and batch is not None and batch % arguments.gpus:
        # Layouts with tensor or pipeline parallelism have fewer ranks; the enumeration keeps those that divide it.
        batch = None
    one = setup_of(
        arguments.model,
        known.accelerator(arguments.gpu),
        arguments.gpus,
        sequence_length=arguments.seq,
        global_batch=batch,
        micro_batch=None if whole else micro,
        precision=arguments.precision,
        checkpointing=arguments.checkpointing,
        method=arguments.method,
        software=arguments.software,
        interconnect=arguments.interconnect,
        memory_factor=memory_factor,
        **degrees,
    )
    if whole and arguments.global_batch:
        one = one.replaced(micro_batch=1, micro_batches=arguments.global_batch / arguments.gpus)
    return one


def check_rehearsal(arguments: argparse.Namespace) -> None:
    require(0 <= arguments.rehearse <= 86_400, "--rehearse", arguments.rehearse, "seconds from 0 to 86,400")


def tokens_of(arguments: argparse.Namespace) -> float | None:
    return None if arguments.tokens is None else float(token_count(arguments.tokens, "--tokens"))


def usd_of(arguments: argparse.Namespace) -> float | None:
    """The price of one GPU-hour: as given, else the cheapest on-demand price in the table; None if there is none.

    RequestError if the given price is that of another GPU.
    """
    from paceline.host import prices
    from paceline.prediction import hardware

    if arguments.gpu is None or arguments.gpu.casefold() == hardware.CPU:
        return None
    name = hardware.accelerator(arguments.gpu).gpu
    offers = prices.chosen(arguments.price) if arguments.price else prices.table()
    known = [p.usd_per_gpu_hour for p in offers if p.holds_for(name) and p.kind != prices.SPOT]
    expected = f"an on-demand price of {name}: USD per GPU-hour, or a name or file with one"
    require(bool(known) or not arguments.price, "--price", arguments.price, expected)
    return min(known) if known else None


# --- serving ---


def serving_options(arguments: argparse.Namespace) -> int:
    """Replicas against tensor parallelism on each kind and number of GPUs, under limits on TTFT and TPOT."""
    from paceline.campaign.run.measured_setups import read_known
    from paceline.experiment.choices import Choice
    from paceline.models import arithmetic
    from paceline.prediction import hardware, serving
    from paceline.prediction.served_anchors import parse_endpoint
    from paceline.report.tables import predictions as tables
    from paceline.report.terminal import Fitted

    prompt, _, answer = arguments.serving.partition("/")
    valid = prompt.isdigit() and answer.isdigit() and int(prompt) * int(answer) > 0
    require(valid, "--serving", arguments.serving, "tokens of prompt and answer, such as 1000/200")
    for option, limit in (("--ttft", arguments.ttft), ("--tpot", arguments.tpot)):
        require(limit is None or limit > 0, option, limit, "seconds above 0")
    kinds = serving.WEIGHT_BYTES
    require(arguments.precision in kinds, "--precision", arguments.precision, ", ".join(kinds))
    endpoint = None if arguments.endpoint is None else parse_endpoint(arguments.endpoint)
    anchors = read_known(arguments.anchor, endpoint).served
    expected = "served runs or rows; for runs against a URL add --endpoint gpu=NAME"
    require(bool(anchors) or not arguments.anchor, "--anchor", ", ".join(arguments.anchor), expected)
    measured = [(one.served, one.tokens_per_s) for one in anchors]
    found = []
    for gpu in words_of("--gpu", arguments.gpu):
        for gpus in words_of("--gpus", str(arguments.gpus)):
            require(gpus.isdigit() and int(gpus) > 0, "--gpus", gpus, "whole numbers from 1")
            base = serving.Served(
                shape=arithmetic.load(Choice.parse(arguments.model)),
                gpu=hardware.accelerator(gpu),
                precision=arguments.precision,
                input_tokens=int(prompt),
                output_tokens=int(answer),
            )
            found += serving.partitions(base, int(gpus), arguments.ttft, arguments.tpot, measured)
    if not found:
        limited = arguments.ttft is not None or arguments.tpot is not None
        needed, longer = (" within the limits", ", or a longer --ttft and --tpot") if limited else ("", "")
        raise RequestError(
            f"--gpus: got {arguments.gpus} x {arguments.gpu}, expected enough for {arguments.model}{needed}. "
            f"Use more GPUs, {'' if limited else 'or '}--precision fp8{longer}."
        )
    if arguments.json:
        print(json.dumps([serving.to_dict(one, len(anchors)) for one in found], indent=2))
        return OK
    screen = console()
    screen.print(Fitted(tables.served(found, len(anchors))))
    if anchors:
        best = replace(found[0].served, batch=found[0].batch)
        known = [(one.name, one.served, one.tokens_per_s) for one in anchors]
        screen.print(Fitted(tables.served_narrowing(serving.worth(best, known))))
    return OK


def words_of(option: str, text: str) -> list[str]:
    """The words of an option with several values, each once."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    require(bool(words), option, text, "at least one value")
    return words


# --- score ---


def _score(arguments: argparse.Namespace) -> int:
    """How right predictions were: of stored ones that were measured since, or of the rows of a table."""
    from paceline.campaign.run.measured_setups import directories_with_runs, read_below, read_known
    from paceline.prediction import scoring
    from paceline.report.tables import predicted
    from paceline.report.terminal import Fitted

    path = arguments.score
    known = read_known(arguments.anchor)
    if path.suffix == ".csv" and path.is_file():
        found = scoring.score_table(path, known.anchors, known.observations)
    else:
        require(path.is_dir(), "--score", str(path), "a results directory or a CSV file")
        from paceline.prediction import stored

        rows = [row for one in {path, *directories_with_runs(path)} for row in stored.read(one)]
        found = scoring.score_runs(rows, read_below(path), known.cpu)
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
