"""`paceline start`: three questions, then the command that answers them, which is printed and run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.cli import INTERRUPTED, OK, WRONG_REQUEST, experiments
from paceline.cli.verbs import DEFAULT_OUT, Parser, add_out_option, add_verb
from paceline.errors import RequestError, did_you_mean

HERE = "here"
# The time up to which the quick preset of a question is used.
QUICK_S = 900.0
DEFAULT_TIME = "10m"
_HAVE = "here, `slurm NODESxGPUS`, `ray NODESxGPUS`, `kubernetes NODESxGPUS IMAGE`, `ssh HOST,HOST GPUS`, or a URL"
_TIME = "a time such as 90s, 10m, 2h or 3d"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Question:
    """Something to find out, and the preset for it. quick is the preset for a short time. launches: how often each of
    `cells` is launched, to divide the time among them; 0 if they are repeated until the time is over, None if their
    number is not known beforehand."""

    text: str
    preset: str
    quick: str | None = None
    cells: int = 1
    launches: int | None = 0


TRAINING = {
    "fastest": Question("which training strategy is fastest", "strategies", "quick"),
    "scaling": Question("how training scales with the number of GPUs", "scaling"),
    "finetune": Question("how fast fine-tuning is", "finetune", "finetune-quick"),
    "settings": Question("which settings matter for fine-tuning", "diagnose", "diagnose-quick"),
    "memory": Question("where memory goes, and what fits", "memory", launches=None),
    "network": Question("how fast the network is", "fabric", launches=1),
    "nodes": Question("whether every node is healthy", "nodes", launches=1),
    "device": Question("the most that one device can do", "compute", launches=1),
}
SERVING = {
    "speed": Question("how fast the server answers, alone and under load", "inference", cells=4, launches=3),
    "curve": Question("how latency grows with the number of users", "inference-sweep", launches=3),
    "limit": Question("the highest request rate within latency limits", "inference-search", launches=1),
}


@dataclass(frozen=True)
class Equipment:
    """What there is to run on: the options that say so, and whether it has GPUs or is a server that already runs."""

    options: tuple[str, ...] = ()
    has_gpus: bool = True
    is_server: bool = False

    @property
    def questions(self) -> Mapping[str, Question]:
        return SERVING if self.is_server else TRAINING


def add_verbs(verbs: Any) -> None:
    verb = add_verb(verbs, "start", start, "answer three questions, get the command, and run it")
    verb.add_argument("--have", metavar="WHAT", help=f"what you have: {_HAVE.replace('`', '')}")
    verb.add_argument(
        "--want",
        metavar="ANSWER",
        help=f"what you want to know: {', '.join(TRAINING)}; of a server: {', '.join(SERVING)}",
    )
    verb.add_argument("--time", metavar="TIME", help=f"how long it may take: {_TIME}")
    add_out_option(verb)
    verb.add_argument("--dry-run", action="store_true", help="print the command without running it")


def start(arguments: argparse.Namespace) -> int:
    """Ask what was not given as an option, print the command and run it."""
    try:
        have = _answered("--have", arguments.have, equipment, _ask_have)
        want = _answered("--want", arguments.want, lambda text: wanted(text, have), lambda: _ask_want(have))
        text, seconds = _answered("--time", arguments.time, duration, _ask_time)
    except EOFError:
        print("\nNothing was started: the input ended. Give the answers as --have, --want and --time.")
        return WRONG_REQUEST
    except KeyboardInterrupt:
        print("\nNothing was started.")
        return INTERRUPTED
    argv = command(have, want, text, seconds, str(arguments.out))
    if want.launches is None:
        print(f"`{want.preset}` searches until it knows, whatever the time. Ctrl-C ends it and keeps finished runs.")
    print(f"\n$ paceline {shlex.join(argv)}\n", flush=True)
    return OK if arguments.dry_run else _run(argv)


def _run(argv: Sequence[str]) -> int:
    """Run an experiment as the command line does."""
    root = Parser(prog="paceline")
    experiments.add_verbs(root.add_subparsers(parser_class=Parser))
    return experiments.run(root.parse_args(argv))


def command(have: Equipment, want: Question, time: str, seconds: float, out: str = DEFAULT_OUT) -> list[str]:
    """The arguments of `paceline` that answer a question in the given time.

    The time is a budget for repeats, or the timeout of the launches. Searches for what fits have no limit.

    >>> command(Equipment(), TRAINING["fastest"], "5m", 300.0)
    ['run', 'quick', '--time-budget', '5m']
    >>> command(Equipment(), TRAINING["network"], "5m", 300.0)
    ['run', 'fabric', '--set', 'timeout_s=300']
    """
    is_short = seconds <= QUICK_S
    preset = want.quick if want.quick and (is_short or not have.has_gpus) else want.preset
    limit = ["--time-budget", time]
    if want.launches is None:
        limit = []
    elif want.launches:
        launches = 1 if is_short else want.launches
        limit = ["--set", "repeats=1"] if launches < want.launches else []
        limit += ["--set", f"timeout_s={seconds / (want.cells * launches):g}"]
    place = [] if out == DEFAULT_OUT else ["--out", out]
    return ["run", preset, *have.options, *limit, *place]


# --- the answers ---


def equipment(text: str) -> Equipment:
    """`here`, a cluster with its size, or the URL of a server; RequestError for anything else."""
    from paceline.host import machine

    words = text.split()
    name, rest = (words[0].lower(), words[1:]) if words else (HERE, [])
    if name == HERE and not rest:
        return Equipment(has_gpus=bool(machine.probe().gpus))
    if re.fullmatch(r"https?://[^\s/]+\S*", name) and not rest:
        return Equipment(("--set", f"engine.url={words[0]}"), is_server=True)
    size = re.fullmatch(r"(\d{1,6})x(\d{1,4})", rest[0]) if rest else None
    if size and name in ("slurm", "ray") and len(rest) == 1:
        return _cluster(name, size[1], size[2])
    if size and name == "kubernetes" and len(rest) == 2:
        return _cluster(f"kubernetes:image={rest[1]}", size[1], size[2])
    if name == "ssh" and len(rest) == 2 and re.fullmatch(r"\d{1,4}", rest[1]):
        hosts = [host for host in rest[0].split(",") if host]
        return _cluster(f"ssh:hosts={json.dumps(hosts, separators=(',', ':'))}", str(len(hosts)), rest[1])
    raise RequestError(f"--have: got {text!r}, expected {_HAVE}.{did_you_mean(name, _NAMES)}")


_NAMES = (HERE, "slurm", "ray", "kubernetes", "ssh")


def _cluster(launcher: str, nodes: str, gpus: str) -> Equipment:
    return Equipment(
        ("--launcher", launcher, "--set", "device=cuda", "--set", f"nodes={nodes}", "--set", f"processes={gpus}")
    )


def wanted(text: str, have: Equipment) -> Question:
    """A question by its name or its number in the list; RequestError for anything else."""
    names = list(have.questions)
    word = text.strip().lower() or names[0]
    if word.isascii() and word.isdigit() and 0 < int(word[:3]) <= len(names):
        word = names[int(word[:3]) - 1]
    if word not in names:
        raise RequestError(f"--want: got {text!r}, expected {', '.join(names)}.{did_you_mean(word, names)}")
    return have.questions[word]


def duration(text: str) -> tuple[str, float]:
    """A time as it was written, and in seconds; RequestError for anything else."""
    from paceline.campaign.run.stopping import parse_budget

    written = "".join(text.split()).lower() or DEFAULT_TIME
    try:
        return written, parse_budget(written)
    except RequestError:
        raise RequestError(f"--time: got {text!r}, expected {_TIME}.") from None


# --- the questions ---


def _answered(option: str, given: str | None, parse: Callable[[str], Answer], ask: Callable[[], str]) -> Answer:
    """The given answer; without one, ask until the answer is valid."""
    if given is not None:
        return parse(given)
    while True:
        try:
            return parse(ask())
        except RequestError as error:
            print(str(error).removeprefix(f"{option}: "))


def _ask_have() -> str:
    from paceline.host import machine

    probed = machine.probe()
    kinds = {gpu.name for gpu in probed.gpus}
    here = f"{len(probed.gpus)} x {' and '.join(sorted(map(str, kinds)))}" if probed.gpus else f"no GPU, {probed.cpu}"
    lines = (
        f"here                         this machine ({here})",
        "slurm NODESxGPUS             a Slurm cluster, such as `slurm 2x8`",
        "ray NODESxGPUS               a Ray cluster that is running",
        "kubernetes NODESxGPUS IMAGE  a Kubernetes cluster, and an image with Paceline",
        "ssh HOST,HOST GPUS           hosts you reach over ssh, and GPUs on each",
        "http://HOST:PORT             a model server that is running",
    )
    return _ask("1. What do you have?", lines, HERE)


def _ask_want(have: Equipment) -> str:
    lines = [f"{i}  {name:<9} {each.text}" for i, (name, each) in enumerate(have.questions.items(), 1)]
    return _ask("2. What do you want to know?", lines, next(iter(have.questions)))


def _ask_time() -> str:
    return _ask("3. How long may it take?", ("90s, 10m, 2h ...",), DEFAULT_TIME)


def _ask(question: str, lines: Sequence[str], default: str) -> str:
    # A line that does not fit goes on below its explanation, which begins behind two spaces.
    width = shutil.get_terminal_size().columns
    print(f"\n{question}")
    for line in (f"   {line}" for line in lines):
        hang = " " * (line.rfind("  ") + 2)
        print(textwrap.fill(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False))
    return input(f"[{default}] > ")
