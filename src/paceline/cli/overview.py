"""The verbs by task, the help of `paceline` and the exit codes. Imports next to nothing: see `paceline.cli.main`."""

from __future__ import annotations

import os
import sys

OK, SOME_FAILED, WRONG_REQUEST, TOO_NOISY, INTERRUPTED = 0, 1, 2, 3, 130

DESCRIPTION = (
    "Benchmark distributed LLM training and inference. Paceline compares training strategies only after certifying "
    "that they did equal work, and load-tests model servers on a fixed schedule."
)
CLOSING = "New here? `paceline start` asks three questions. `paceline VERB --help` explains one verb."
# By task, in the order of `paceline --help`: each verb, the module that has it, and what it does.
VERBS = {
    "Run experiments": {
        "start": ("start", "answer three questions, get the command, and run it"),
        "run": ("experiments", "run every configuration of an experiment, then report"),
        "measure": ("scripts", "measure a training script, unchanged: paceline measure -- CMD ..."),
        "plan": ("experiments", "show what an experiment would run: cells, memory, time and cost"),
        "status": ("machines", "show running, finished and remaining runs of a results directory"),
        "logs": ("results", "print the output of all ranks of a run, on all nodes"),
        "stream": ("machines", "send a running campaign to TensorBoard, W&B, MLflow or OpenTelemetry"),
        "schedule": ("schedules", "run an experiment on a cron schedule, then report, compare and notify"),
    },
    "Predict before running": {
        "predict": ("predictions", "predict step time, memory and cost, with a 90 % interval"),
        "choose": ("choices", "rank all layouts of a model by predicted time or cost, and measure the few close ones"),
    },
    "Read and compare results": {
        "ui": ("results", "browse a results directory and watch campaigns in a web browser"),
        "report": ("results", "analyse stored runs and write tables, plots and files"),
        "show": ("results", "show one run: its settings, measurements and certificate"),
        "compare": ("results", "compare two results directories cell by cell"),
        "gate": ("scripts", "fail a build if results are slower than a baseline, with a comment for it"),
        "history": ("results", "show cells over time and where their level changed"),
        "recipe": ("scripts", "write the winning configuration as files for another tool"),
        "goodput": (
            "goodput",
            "find the best checkpoint interval at a failure rate, and what spot capacity would cost",
        ),
    },
    "Archive, reproduce, import": {
        "capsule": ("archives", "pack finished runs into one archive that can be read and replayed later"),
        "replay": ("archives", "run a capsule again and check whether it reproduces within the intervals"),
        "import": ("archives", "import a published results table as claims, never ranked"),
    },
    "Check and watch this machine": {
        "doctor": ("machines", "check this machine and suggest fixes"),
        "monitor": ("machines", "show live GPU, CPU and memory usage"),
    },
    "Prepare clusters and images": {
        "cluster": ("cluster", "prepare a Kubernetes namespace for runs, or check one"),
        "image": ("cluster", "build or verify the container image"),
    },
    "Test the load generator": {
        "selftest": ("serving", "measure the highest request rate at which this host's load generator stays accurate"),
        "mock-replica": ("serving", "run a mock OpenAI server with known latencies"),
    },
    "Look things up": {
        "list": ("machines", "list strategies, models, presets, GPUs, prices, ..."),
    },
}


def help_text() -> str:
    """The help of `paceline`: the verbs by task."""
    width = max(60, min(_columns(), 120))
    parts = ["Usage: paceline VERB [options]", _filled(DESCRIPTION, width)]
    indent = max(len(name) for verbs in VERBS.values() for name in verbs) + 4
    for title, verbs in VERBS.items():
        lines = [_filled(text, width, f"  {name:<{indent - 2}}", indent) for name, (_, text) in verbs.items()]
        parts.append("\n".join([f"{title}:", *lines]))
    options = {"-h, --help": "show this help", "--version": "show the version"}
    parts.append("\n".join(["Options:", *(f"  {name:<{indent - 2}}{text}" for name, text in options.items())]))
    return "\n\n".join([*parts, _filled(CLOSING, width)]) + "\n"


def _columns() -> int:
    """The width of the terminal less two, as argparse has it, or what COLUMNS says."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns - 2 if sys.__stdout__ else 78
    except (OSError, ValueError):
        return 78


def _filled(text: str, width: int, start: str = "", indent: int = 0) -> str:
    """The words in lines of at most this width; textwrap would import regular expressions."""
    lines = [start]
    for word in text.split(" "):
        gap = "" if not lines[-1] or lines[-1].endswith(" ") else " "
        if len(lines[-1]) + len(gap) + len(word) > width:
            lines.append(" " * indent)
            gap = ""
        lines[-1] += gap + word
    return "\n".join(lines)
