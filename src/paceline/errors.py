"""Everything Paceline raises on purpose.

    PacelineError
    ├── RequestError         the request was wrong: one sentence, exit code 2
    ├── StoreError           a run folder that cannot be read: reported and skipped
    │   └── DamagedRunError  ... because it is not what was sealed: the sentence names the file
    ├── UnsupportedError     this strategy or machine cannot do what the spec requests: a record, status "unsupported"
    │   └── MissingPackageError   ... because a package is absent; the sentence holds the exact pip install
    ├── ScriptError          the user's training script failed: a record, status "failed" or "oom"
    ├── CheckpointError      a checkpoint could not be written or read: a record, status "failed"
    ├── LaunchError          an engine refused or lost the job: a record, status "failed"; before the first job of a
    │   │                    campaign (`preflight`) a RequestError
    │   └── StrayJobError    ... and the job could not be ended either, so that none may follow it
    └── InvalidRunError      the run contradicts itself (a loss that is not a number): a record, status "invalid"

A run that fails is a record in the store, not an exception: only the worker turns one into the other.
"""

import re
from collections.abc import Iterable


class PacelineError(Exception):
    """Root of the tree; its text is always one sentence for the user."""


class RequestError(PacelineError):
    """The request was wrong: says where, the value it got and what it expected."""


DAMAGED = ": damaged: "


class StoreError(PacelineError):
    """A run folder is corrupt or half-written."""


class DamagedRunError(StoreError):
    """A finished run differs from what was sealed, or has impossible values; names the file (see `damaged`)."""


def damaged(run_dir: object, what: str) -> DamagedRunError:
    """The error of a damaged run, in the form by which lists of skipped runs are recognised (DAMAGED)."""
    return DamagedRunError(f"{run_dir}{DAMAGED}{what}")


class UnsupportedError(PacelineError):
    """The work was understood but cannot be done here."""


class MissingPackageError(UnsupportedError):
    """A package is absent; names the command that installs it."""

    def __init__(self, package: str, needed_by: str, install: str) -> None:
        super().__init__(
            f"{needed_by} needs the package {package}, which is not installed: run `pip install {install}`"
        )


class InvalidRunError(PacelineError):
    """The run finished but its numbers cannot be used."""


class ScriptError(PacelineError):
    """The user's script failed; quotes its last line of output."""


class CheckpointError(PacelineError):
    """A checkpoint could not be written or read; says where, and which checkpoint remains."""


class LaunchError(PacelineError):
    """An engine rejected the job, or no longer answers; names the command that shows why.

    recurs: the engine would refuse the next run for the same reason, such as a full quota or a missing permission.
    """

    def __init__(self, text: str, *, recurs: bool = False) -> None:
        super().__init__(text)
        self.recurs = recurs


class StrayJobError(LaunchError):
    """The engine was lost with the job in it: it may still be running."""


Scalar = str | int | float | bool | None


def require(condition: bool, where: str, given: object, accepted: str) -> None:
    """Raise a RequestError of the one form that user errors have, unless the condition is true.

    >>> require(3 < 2, "steps", 3, "a number below 2")
    Traceback (most recent call last):
    paceline.errors.RequestError: steps: got 3, expected a number below 2.
    >>> require(False, "method", "qlorra", "full, lora or qlora")
    Traceback (most recent call last):
    paceline.errors.RequestError: method: got 'qlorra', expected full, lora or qlora. Did you mean 'qlora'?
    >>> require(False, "compile", "fas", "false, true or a mode (slow, fast)")
    Traceback (most recent call last):
    paceline.errors.RequestError: compile: got 'fas', expected false, true or a mode (slow, fast). Did you mean 'fast'?
    """
    if not condition:
        names = [name.strip("()") for name in re.split(r", | or ", accepted) if " " not in name]
        hint = (
            did_you_mean(given, names, CLOSE) if isinstance(given, str) and " " not in given and len(names) > 1 else ""
        )
        raise RequestError(f"{where}: got {shown(given)}, expected {accepted}.{hint}")


LONGEST_SHOWN = 200


def shown(value: object) -> str:
    """The value as an error message repeats it: at most 200 characters, however large it is; None is "nothing".

    >>> shown("a"), shown("a" * 1000)[-21:]
    ("'a'", '... (1002 characters)')
    """
    try:
        text = "nothing" if value is None else repr(value)
    except (ValueError, RecursionError):
        # Python refuses to print numbers of more than 4300 digits.
        text = f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text)} characters)"


# How alike a value must be to a name of a list to suggest it: `ful` is `full` (0.86), `tpu` is not `cpu` (0.67).
CLOSE = 0.8
# What other tools call things that have another name here.
OTHER_NAMES = {"k8s": "kubernetes", "kube": "kubernetes", "gpu": "cuda", "fp8": "float8", "float32": "fp32"}
OTHER_NAMES |= {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "hf": "transformers", "tgi": "openai"}


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of an error message that suggests a known name: one that begins so, or the closest; empty if none is.

    >>> did_you_mean("quik", ["quick", "scaling"])
    " Did you mean 'quick'?"
    >>> did_you_mean("gpt2", ["gpt3-2.7b", "gpt2-124m", "gpt2-350m"])
    " Did you mean 'gpt2-124m'?"
    >>> did_you_mean("k8s", ["kubernetes", "slurm"])
    " Did you mean 'kubernetes'?"
    >>> did_you_mean("--format", ["--out", "--set"]) + did_you_mean("pdf", ["html", "json"])
    ''
    """
    import difflib

    # The dashes of an option are no likeness.
    names = {each.lstrip("-"): each for each in reversed(list(known))}
    word = OTHER_NAMES.get(name.lower(), name).lstrip("-")
    first = [each for each in reversed(names) if len(word) > 2 and each.startswith(word)]
    close = first or difflib.get_close_matches(word, names, n=1, cutoff=likeness)
    return f" Did you mean {names[close[0]]!r}?" if close else ""
