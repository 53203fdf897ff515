"""The user's own training command: a template over the matrix of an experiment, with the config files it reads.

A name in braces is a parameter: `command: [train.py, --fsdp, "{strategy}"]` takes its value from the base, the matrix
or `--set`, so a list of values is an axis. `{{name}}` is a literal `{name}`. A name of `files` is the path of a copy of
that file in which parameters are filled in, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import examples
from paceline.errors import RequestError, Scalar, did_you_mean, require
from paceline.host import redaction

# Fields of a run that a command may name as well.
RUN_FIELDS = ("device", "nodes", "processes", "repeat", "seed", "steps")
_BRACES = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
LARGEST_FILE_BYTES = 1 << 20
# The model of a script that does not name one in `model`: its shape is unknown, so there is no MFU.
UNKNOWN_MODEL = "unknown"
# Options of launchers that give the number of processes on a node.
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]gpus)(?:=(.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config file of the script: its name, and its text before parameters are filled in."""

    name: str
    text: str

    def __post_init__(self) -> None:
        # It is written into directories of ours, and a spec may be somebody else's.
        plain = isinstance(self.name, str) and self.name.isprintable() and Path(self.name).name == self.name
        require(plain and self.name not in ("", ".."), "files", self.name, "the name of a file without a directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One command of the user.

    command, files: templates. parameters: their values. work: the parameters that change the work on purpose, such as
    a batch size; runs that differ in one of them are not expected to be equal. code: a digest of the script itself,
    which is part of the run id but not of the cell, so that two versions of it can be compared.
    """

    command: tuple[str, ...]
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    files: Mapping[str, ConfigFile] = field(default_factory=dict)
    work: tuple[str, ...] = ()
    code: str | None = None

    def __post_init__(self) -> None:
        words = bool(self.command) and all(isinstance(word, str) for word in (*self.command, *self.work))
        require(words, "command", self.command, "a list of words, such as [train.py, --lr, 0.1]")
        for name, value in self.parameters.items():
            plain = value is None or isinstance(value, str | int | float | bool)
            require(plain, f"parameters.{name}", value, "text, a number, true, false or null")
        for name in self.work:
            accepted = f"parameters of the command ({', '.join(self.parameters) or 'none'})"
            require(name in self.parameters, "work", name, accepted)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Script:
        files = {name: ConfigFile(**each) for name, each in raw.get("files", {}).items()}
        lists = {name: tuple(raw.get(name, ())) for name in ("command", "work")}
        return cls(**{**raw, **lists, "files": files})

    @property
    def starts_ranks(self) -> bool:
        """Whether the command is a program that starts its ranks itself, such as torchrun or `python train.py`.

        A command that begins with a .py file or with `-m` is started once per process instead, as torchrun would.
        """
        return not (self.command[0] == "-m" or fill(self.command[0], self.parameters, strict=False).endswith(".py"))

    @property
    def title(self) -> str:
        """The script's name in tables.

        >>> Script(command=("torchrun", "--nproc-per-node", "2", "lab/train.py", "--lr", "1")).title
        'train.py'
        """
        words, at = self._words_and_script
        return words[at].removeprefix(examples.PREFIX).rpartition("/")[2]

    @property
    def arguments(self) -> str:
        """What follows the script, with the names of parameters in braces.

        >>> Script(command=("torchrun", "lab/train.py", "--lr", "{lr}"), parameters={"lr": 1}).arguments
        '--lr {lr}'
        """
        _, at = self._words_and_script
        return " ".join(self.command[at + 1 :])

    @property
    def _words_and_script(self) -> tuple[list[str], int]:
        """The words of the command, and which of them is the script, the module or, without either, the program."""
        words = [fill(word, self.parameters, strict=False) for word in self.command]
        module = words.index("-m") + 1 if "-m" in words[:-1] else 0
        return words, next((i for i, word in enumerate(words) if word.endswith(".py")), module)

    def rendered(self, run_fields: Mapping[str, Scalar], directory: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """The words of the command, and the config files to write into `directory`, by name."""
        values = {**run_fields, **self.parameters}
        paths = {name: str(Path(directory) / each.name) for name, each in self.files.items()}
        texts = {each.name: fill(each.text, values, strict=False) for each in self.files.values()}
        return tuple(fill(word, {**values, **paths}) for word in self.command), texts


def fill(text: str, values: Mapping[str, Scalar], *, strict: bool = True) -> str:
    """The text with every `{name}` replaced by its value. Not strict: names without a value stay as they are.

    >>> fill("--batch={batch}", {"batch": 8}), fill("{{batch}}", {})
    ('--batch=8', '{batch}')
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] is None:
            # Config files are full of braces of their own.
            return match[0][0] if strict else match[0]
        if match[1] not in values:
            if not strict:
                return match[0]
            known = ", ".join(values) or "none"
            raise RequestError(
                f"command: got {match[0]} without a value, expected a parameter ({known}). Add {match[1]} to base or "
                f"matrix, or write {{{{{match[1]}}}}} for the text itself.{did_you_mean(match[1], values)}"
            )
        return as_text(values[match[1]])

    return _BRACES.sub(replace, text)


def as_text(value: Scalar) -> str:
    """A value as a command line has it: true, false and null as JSON and YAML write them."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def names_in(texts: Sequence[str]) -> list[str]:
    """The names in braces, in order."""
    return list(dict.fromkeys(match[1] for text in texts for match in _BRACES.finditer(text) if match[1]))


def gather(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a cell in which those that are parameters of its command are in `parameters`.

    >>> gather({"workload": "script", "command": ["a.py", "{lr}"], "lr": 0.1})
    {'workload': 'script', 'command': ['a.py', '{lr}'], 'parameters': {'lr': 0.1}}
    """
    if not fields.get("command"):
        return dict(fields)
    command, files = _command(fields["command"]), _files(fields.get("files") or {})
    named = [*names_in(command), *names_in([each.text for each in files.values()])]
    own = {name for name in named if name in fields and name not in RUN_FIELDS}
    given = fields.get("parameters") or {}
    require(isinstance(given, Mapping), "parameters", given, "a mapping of names to values")
    values = {**given, **{name: fields[name] for name in named if name in own}}
    rest = {name: value for name, value in fields.items() if name not in own and name != "parameters"}
    return {**rest, "command": command, "parameters": values}


def build(fields: Mapping[str, Any], run_fields: Mapping[str, Scalar]) -> Script:
    """The script of a cell, checked: every name has a value, and config files stay valid where their type is known."""
    command, files = tuple(_command(fields["command"])), _files(fields.get("files") or {})
    parameters, work = dict(fields.get("parameters") or {}), tuple(fields.get("work") or ())
    for name in parameters:
        require(name not in RUN_FIELDS, "parameters", name, f"another name: {name} is a field of the run")
    script = Script(command=command, parameters=parameters, files=files, work=work)
    words, texts = script.rendered(run_fields, "files")
    require_no_secret(words, texts)
    for name, text in texts.items():
        _parse(name, text)
    named = {*names_in(command), *names_in([each.text for each in files.values()])}
    idle = [name for name in parameters if name not in named]
    require(not idle, "parameters", ", ".join(idle), "names that the command or a config file contains in braces")
    return Script(command=command, parameters=parameters, files=files, work=work, code=_code(words))


def require_no_secret(words: Sequence[str], texts: Mapping[str, str]) -> None:
    """RequestError if the command or a config file contains what looks like a secret: both are recorded and shown."""
    instead = (
        "no secret, because it is recorded and shown in reports; export it instead, as HF_TOKEN or WANDB_API_KEY: "
        "a script has the environment of Paceline"
    )
    line = " ".join(words)
    if found := redaction.SECRET.search(line):
        # The option may be named, its value not: it may be the secret.
        before = line[: found.end()].split()
        option = next((word for word in reversed(before) if word.startswith("-")), "")
        name = option.partition("=")[0]
        where = f" at {name}" if name and not redaction.SECRET.search(name) else ""
        require(False, "command", f"a word that looks like a secret{where}", instead)
    for name, text in texts.items():
        require(redaction.SECRET.search(text) is None, f"files: {name}", "text that looks like a secret", instead)


def processes_of(command: Sequence[Any], parameters: Mapping[str, Scalar], offered: int) -> int:
    """How many processes a command starts on a node, by the options of torchrun, accelerate and deepspeed.

    >>> processes_of(["torchrun", "--nproc-per-node", "2", "train.py"], {}, 8), processes_of(["train.py"], {}, 8)
    (2, 1)
    """
    found = _stated_processes(command, parameters)
    if found is None:
        return 1
    text = found[1]
    return int(text) if text.isdecimal() and int(text) else offered


def require_processes(command: Sequence[Any], parameters: Mapping[str, Scalar], processes: int) -> None:
    """RequestError if an option of the command says another number of processes."""
    found = _stated_processes(command, parameters)
    if found is not None and found[1].isdecimal():
        expected = (
            f"{int(found[1])}, the number that {found[0]} of the command says, or the placeholder {{processes}} there"
        )
        require(int(found[1]) == processes, "processes", processes, expected)


def _stated_processes(command: Sequence[Any], parameters: Mapping[str, Scalar]) -> tuple[str, str] | None:
    """The option of a launcher that says how many processes it starts, and its value; None if there is none."""
    words = [fill(as_text(word), parameters, strict=False) for word in command]
    own = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    for index, word in enumerate(words[:own]):
        if match := _PROCESSES.fullmatch(word):
            following = words[index + 1] if index + 1 < len(words) else ""
            return word.partition("=")[0], following if match[1] is None else match[1]
    return None


def _command(given: object) -> list[str]:
    accepted = "a list of words, such as [train.py, --lr, 0.1]"
    require(isinstance(given, list | tuple) and len(given) > 0, "command", given, accepted)
    assert isinstance(given, list | tuple)
    for word in given:
        require(isinstance(word, str | int | float), "command", word, accepted)
    return [as_text(word) for word in given]


def _files(given: object) -> dict[str, ConfigFile]:
    """Name in braces -> the file. Values are paths, or files that were read before."""
    require(isinstance(given, Mapping), "files", given, "a mapping of names to paths")
    assert isinstance(given, Mapping)
    return {str(name): _file(str(name), value) for name, value in given.items()}


def _file(name: str, value: object) -> ConfigFile:
    if isinstance(value, ConfigFile):
        return value
    if isinstance(value, Mapping) and {*value} == {"name", "text"}:
        return ConfigFile(name=str(value["name"]), text=str(value["text"]))
    require(isinstance(value, str), f"files.{name}", value, "the path of a config file")
    path = Path(str(value)).expanduser()
    try:
        # Not a device or a pipe, which would never end.
        fits = not path.exists() or (path.is_file() and path.stat().st_size <= LARGEST_FILE_BYTES)
        require(fits, f"files.{name}", str(path), "a file of at most 1 MiB")
        return ConfigFile(name=path.name, text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"files.{name}: got {str(path)!r}, expected a text file that can be read ({error})."
        ) from None


def _parse(name: str, text: str) -> None:
    """RequestError if a config file of a known type is not valid once its parameters are filled in."""
    import tomllib

    import yaml

    readers: dict[str, Any] = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load}
    reader = readers.get({".yml": ".yaml"}.get(Path(name).suffix, Path(name).suffix))
    try:
        if reader:
            reader(text)
    except (ValueError, yaml.YAMLError) as error:
        first = str(error).partition("\n")[0]
        raise RequestError(f"files: {name} is not valid after its parameters were filled in: {first}.") from None


def _code(words: Sequence[str]) -> str | None:
    """A digest of the files of the command that are Python code; None if none is here."""
    module = words[1] if words[0] == "-m" and len(words) > 1 else ""
    found = [path for word in words if word.endswith(".py") and (path := Path(word)).is_file()]
    found += examples.source_of(module)
    if not found:
        return None
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()[:16]
