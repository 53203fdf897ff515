"""Environment variables that an experiment gives its ranks: how they are written, and which are refused.

`env: {NCCL_ALGO: Ring}` and `env.NCCL_ALGO: Ring` mean the same, and a list makes an axis in either form. null leaves a
variable as the rank finds it. Variables are recorded with the run and are part of its identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice
from paceline.host.environment import is_secret

FIELD = "env"
PREFIX = "env."
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
LONGEST_VALUE = 1024
# Variables that Paceline, torchrun or the engine set for every rank -> what to use instead; None if there is nothing.
_OWN: dict[str, str | None] = {
    r"OMP_NUM_THREADS": "launcher.threads",
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES": "the environment that starts Paceline or the options of the launcher",
    r"(GROUP_|LOCAL_|ROLE_)?RANK|(GROUP_|LOCAL_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)": None,
    r"(PACELINE|TORCHELASTIC|PET|SLURM|OMPI|PMI|PMIX|KUBERNETES)_.*|NCCL_HOSTID": None,
    r"PYTHON(UNBUFFERED|WARNINGS|PATH|HOME|STARTUP)|PATH|HOME": None,
}


def flatten(fields: Any) -> Any:
    """Fields of an experiment with `env: {NAME: value}` written as `env.NAME: value`.

    >>> flatten({"steps": 3, "env": {"NCCL_ALGO": ["Ring", "Tree"]}})
    {'steps': 3, 'env.NCCL_ALGO': ['Ring', 'Tree']}
    """
    if not isinstance(fields, Mapping):
        return fields
    plain: dict[Any, Any] = {}
    for key, value in fields.items():
        if key == FIELD and value is not None and not isinstance(value, list):
            require(isinstance(value, Mapping), FIELD, value, "a mapping of variables to values")
            plain |= {f"{PREFIX}{name}": own for name, own in value.items()}
        elif key != FIELD or value is not None:
            plain[key] = value
    return plain


def flatten_experiment(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of an experiment file with all its variables as fields of their own."""
    plain = dict(raw)
    for key in ("base", "matrix"):
        if key in plain:
            plain[key] = [flatten(each) for each in plain[key]] if isinstance(plain[key], list) else flatten(plain[key])
    if isinstance(plain.get("exclude"), list):
        plain["exclude"] = [flatten(rule) for rule in plain["exclude"]]
    if isinstance(plain.get("design"), Mapping):
        block = dict(plain["design"])
        block |= {"factors": flatten(block["factors"])} if "factors" in block else {}
        if isinstance(block.get("combined"), list):
            block["combined"] = [flatten(point) for point in block["combined"]]
        plain["design"] = block
    if isinstance(plain.get("devices"), Mapping):
        devices = plain["devices"].items()
        plain["devices"] = {k: flatten_experiment(part) if isinstance(part, Mapping) else part for k, part in devices}
    return plain


def gather(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten` for one cell: later values win, and `env` may itself be a level of an axis.

    >>> gather({"env.NCCL_ALGO": "Ring", "steps": 3})
    {'steps': 3, 'env': {'NCCL_ALGO': 'Ring'}}
    """
    env: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for key, value in fields.items():
        if key == FIELD:
            require(isinstance(value, Mapping), FIELD, value, "a mapping of variables to values")
            env |= value
        elif key.startswith(PREFIX):
            env[key.removeprefix(PREFIX)] = value
        else:
            plain[key] = value
    return {**plain, FIELD: env} if env else plain


def checked(env: Mapping[str, Any], launcher: Choice) -> dict[str, str]:
    """The variables as text, sorted by name, without those that are null. RequestError for one that is refused."""
    variables = {name: _text(name, value) for name, value in sorted(env.items()) if value is not None}
    for name, value in variables.items():
        where = f"{PREFIX}{name}"
        for pattern, instead in _OWN.items():
            if re.fullmatch(pattern, name):
                use = f" Use {instead}." if instead else ""
                raise RequestError(
                    f"{where}: got a variable that Paceline or its launcher sets, expected another.{use}"
                )
        # The value is not repeated, because it may be the secret.
        accepted = "no secret, because variables are recorded; export it where Paceline or its nodes start"
        require(not is_secret(name, value), where, "a value that looks like a secret", accepted)
        if name in _of_launcher(launcher):
            raise RequestError(f"{where}: got it here and in the options of the launcher, expected it in one of them.")
    return variables


def _text(name: str, value: object) -> str:
    where = f"{PREFIX}{name}"
    require(_NAME.fullmatch(name) is not None, FIELD, name, "a name of letters, digits and _")
    require(isinstance(value, str | int | float), where, value, "text, a number, true, false or null")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    fits = len(text) <= LONGEST_VALUE and text.isprintable()
    require(fits, where, text[:40], f"printable text of one line, at most {LONGEST_VALUE} characters")
    return text


def _of_launcher(launcher: Choice) -> set[str]:
    """Names of the variables that the options of a launcher set."""
    env, nccl = launcher.options.get(FIELD), launcher.options.get("nccl")
    names = {str(name) for name in env} if isinstance(env, Mapping) else set()
    if isinstance(nccl, Mapping):
        names |= {f"NCCL_{str(name).upper().removeprefix('NCCL_')}" for name in nccl}
    return names
