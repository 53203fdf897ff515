"""Which environment variables are recorded: those that affect speed, and never one that may contain a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping

_RECORDED = re.compile(
    r"(NCCL|TORCH|TORCHINDUCTOR|TORCHDYNAMO|GLOO|DS|OMP|MKL|KMP)_.*|PYTORCH_(CUDA_)?ALLOC_CONF|CUBLAS_WORKSPACE_CONFIG"
    r"|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER)|NVIDIA_TF32_OVERRIDE|LD_PRELOAD"
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# Beginnings of the keys of cloud, model, code and chat services, then what follows.
_KEYS = (
    r"hf_[\w-]{8,}|sk-[\w-]{8,}|[rs]k_(?:live|test)_\w{8,}|gh[oprsu]_\w{8,}|github_pat_\w{8,}|gl(?:pat|dt|rt|ptt|soat)-[\w-]{8,}"
    r"|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|AIza[\w-]{8,}|ya29\.[\w-]{8,}|eyJ[\w-]{8,}[\w.-]*"
    r"|nvapi-[\w-]{8,}|npm_\w{8,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{8,}|do[opr]_v1_\w{8,}|r8_\w{16,}|gsk_\w{16,}|xai-\w{16,}"
    r"|pplx-\w{16,}|SG\.[\w-]{8,}\.[\w-]{8,}|shp(?:at|ca|pa|ss)_\w{8,}|hv[bs]\.[\w-]{8,}|dapi[0-9a-f]{16,}|tskey-[\w-]{8,}"
    r"|whsec_\w{8,}|ATATT[\w=-]{8,}|AGE-SECRET-KEY-1\w{8,}|sq0[a-z]{3}-[\w-]{8,}|lin_api_\w{8,}|secret_\w{32,}|ntn_\w{16,}"
    r"|\d{8,10}:AA[\w-]{30,}|hooks\.slack\.com/services/[\w/]{8,}|discord(?:app)?\.com/api/webhooks/[\w/-]{8,}"
)
SECRET_VALUE = re.compile(
    # A token may be the whole user of an address, as in remotes of git.
    rf"\b(?:{_KEYS})|://[^/@\s:]*:[^/@\s]+@|://(?=[^/@\s:]{{,256}}\d)[^/@\s:]{{16,256}}@"
    # Keys of Azure, and the signatures that make a URL valid: SAS, AWS, Google.
    r"|\b(?i:AccountKey|SharedAccessKey|sig|X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature)=[\w%+/=.-]{8,}"
    r"|\b(?i:bearer|basic)\s+[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
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
    secrets = secret_values(environ)
    return {
        name: value
        for name, value in sorted(environ.items())
        if _RECORDED.fullmatch(name)
        and not _SECRET_NAME.search(name)
        and not SECRET_VALUE.search(value)
        and not any(secret in value for secret in secrets)
        and not _looks_random(value)
    }


def secret_values(environ: Mapping[str, str]) -> set[str]:
    """The values of variables with a secret-like name, but for short ones, which other texts contain by chance."""
    return {v.strip() for k, v in environ.items() if _SECRET_NAME.search(k) and len(v.strip()) >= SHORTEST_SECRET}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable has a secret-like name or value, or looks random. Switches and numbers are never secrets
    (TOKENIZERS_PARALLELISM). Experiments are recorded, so they must not contain secrets."""
    named = _SECRET_NAME.search(name) is not None and not _SWITCH.fullmatch(value.strip())
    return named or SECRET_VALUE.search(value) is not None or _looks_random(value)


def _looks_random(value: str) -> bool:
    """Whether a value contains random text. GPU UUIDs, interface lists and paths do not count."""
    pieces = _SEPARATOR.split(_UUID.sub("", value))
    return any(_RANDOM_WORD.search(piece) or _RANDOM_PIECE.fullmatch(piece) for piece in pieces)
