"""Which environment variables are recorded: those that affect speed, and never one that may contain a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping

_RECORDED = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|TORCHDYNAMO|GLOO|DS|OMP|MKL|KMP)_.*|PYTORCH_(CUDA_)?ALLOC_CONF|CUBLAS_WORKSPACE_CONFIG"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)|NVIDIA_TF32_OVERRIDE|LD_PRELOAD"
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|eyJ)[\w-]{8,}|://[^/@\s]+:[^/@\s]+@"
    r"|\bBearer\s+[\w.~+/-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
# A shorter value of a secret variable ("1", "true", "default") may occur in other values by chance.
SHORTEST_SECRET = 8
_SWITCH = re.compile(r"true|false|yes|no|on|off|\d*", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# Long random words, or one piece of base64. Paths are judged by their words only.
_RANDOM_WORD = re.compile(r"(?=[A-Za-z]*\d)[A-Za-z0-9]{32,}")
_RANDOM_PIECE = re.compile(r"(?![/.~])(?=.*\d)(?=.*[a-z])(?=.*[A-Z])[\w+/=-]{32,}", re.ASCII)
_SEPARATOR = re.compile(r"[,:;\s]+")


def recorded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that affect speed, by an allow-list. Omits values that look like a secret or random text, repeat
    the value of a secret variable, or have a secret-like name."""
    secrets = {v.strip() for k, v in environ.items() if _SECRET_NAME.search(k) and len(v.strip()) >= SHORTEST_SECRET}
    return {
        name: value
        for name, value in sorted(environ.items())
        if _RECORDED.fullmatch(name)
        and not _SECRET_NAME.search(name)
        and not SECRET_VALUE.search(value)
        and not any(secret in value for secret in secrets)
        and not _looks_random(value)
    }


def is_secret(name: str, value: str) -> bool:
    """Whether a variable has a secret-like name or value, or looks random. Switches and numbers are never secrets
    (TOKENIZERS_PARALLELISM). Experiments are recorded, so they must not contain secrets."""
    named = _SECRET_NAME.search(name) is not None and not _SWITCH.fullmatch(value.strip())
    return named or SECRET_VALUE.search(value) is not None or _looks_random(value)


def _looks_random(value: str) -> bool:
    """Whether a value contains random text. GPU UUIDs, interface lists and paths do not count."""
    pieces = _SEPARATOR.split(_UUID.sub("", value))
    return any(_RANDOM_WORD.search(piece) or _RANDOM_PIECE.fullmatch(piece) for piece in pieces)
