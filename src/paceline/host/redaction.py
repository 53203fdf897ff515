"""Redaction: removes texts that look like secrets from files before they leave this machine."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.host.environment import SECRET_VALUE, recorded_environment, secret_values

MARK = "[redacted]"
_PIECE = 1 << 23
# Every repetition that more must follow is bounded: a node can send a line on which the search takes quadratic time.
# Recognised by shape, or by name (`HF_TOKEN=...`, `password: ...`, `--api-key ...`, `X-Api-Key: ...`).
_WORDS = (
    r"password|passwd|passphrase|api[_-]?key|(?:access|secret|account|private|signing|encryption)[_-]?key"
    r"|(?:client|app|aws|shared)[_-]?secret|secret[_-]?access[_-]?key"
    r"|(?:auth|access|api|bearer|refresh|session|id|hub|private|security|bot)[_-]?token"
)
_NAME = (
    r"\b(?:[A-Z][A-Z0-9_]{,60}_)?(?:API)?(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?:_[A-Z0-9_]{1,60})?"
    rf"|(?<![\w-])(?i:(?:\w{{1,60}}[_-])?(?:{_WORDS}))(?![\w-])"
)
# A number, a variable and a word such as null are no secrets.
_NO_VALUE = r"(?!\d+\b|[$<*\[]|null\b|None\b)"
_NAMED = rf"(?:{_NAME})[\"']?\s*[=:]\s*[\"']?{_NO_VALUE}[^\s\"',;&]{{6,}}"
# These are words of many texts, so that their value must look like a key.
_WEAK = rf"(?<![\w-])(?i:token|secret)[\"']?\s*[=:]\s*[\"']?{_NO_VALUE}(?=[^\s\"',;&]{{,256}}\d)[^\s\"',;&]{{8,}}"
_HEADER = r"(?:proxy-)?authorization|x-(?:goog-)?api-key|ocp-apim-subscription-key|x-auth-token|(?:set-)?cookie"
_HEADERS = rf"\b(?i:{_HEADER})[\"']?\s*[:=]\s*[\"']?{_NO_VALUE}[^\r\n\"',]{{6,}}"
# Of a command, or of a list of its words as Python prints it.
_GIVEN = r"(?:=|[\"']?,?[ \t]+)[\"']?"
_PREFIX = r"(?<![\w-])--?(?:[A-Za-z0-9]+[_-])*"
_OPTION = rf"(?:{_PREFIX}(?i:{_WORDS})|(?<![\w-])--?(?:\w+-)*(?i:token|secret)){_GIVEN}(?!-){_NO_VALUE}[^\s\"',;]{{6,}}"
# `--image_key` and `--pad_token` are options of many scripts, so that their value must look like a key.
_WEAK_OPTION = (
    rf"{_PREFIX}(?i:key|token|secret){_GIVEN}(?=[\w+/=-]{{,256}}\d)(?=[\w+/=-]{{,256}}[A-Za-z])[\w+/=-]{{16,}}"
)
# In a log nothing else is that long and that mixed. Digests, addresses and mangled names are known.
_WORD = re.compile(r"(?<![\w+/=-])(?<!sha256:)(?<!sha256 )[A-Za-z0-9+/_=-]{20,}(?![\w+/=-])")
_KNOWN_WORD = re.compile(
    r"_?_Z\w+|(?:sha\d+|0x|md5)\W?[0-9a-f]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE
)
_HEX = re.compile(r"[0-9a-f]{32,}|[0-9A-F]{32,}")
_LEAST_BITS = 3.9
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")
_SECRET_FIELD = re.compile(_NAME)
SECRET = re.compile(f"{SECRET_VALUE.pattern}|{_HEADERS}|{_OPTION}|{_WEAK_OPTION}|{_NAMED}|{_WEAK}")


def clean(name: str, content: bytes, where: str) -> tuple[bytes, int]:
    """The content of a file of a run directory without secrets, and how many were removed.

    A spec with a secret is rejected instead: changing it would make it another run. Environment variables of a machine
    are filtered again by today's `environment.recorded_environment`, whatever an older version recorded.
    """
    text = content.decode(errors="surrogateescape")
    suspicious = _suspicious(text)
    if name == "spec.json" and suspicious:
        raise RequestError(f"{where}: contains text that looks like a secret, expected a spec without secrets.")
    if name.startswith("machine-"):
        facts, count = clean_facts(_parse(text, where))
        return ((json.dumps(facts, indent=1) + "\n").encode(), count) if count else (content, 0)
    is_log = not name.endswith((".json", ".jsonl"))
    if not suspicious:
        _require_no_random(text if is_log else "", where)
        return content, 0
    if name.endswith(".jsonl"):
        # Lines without secrets are unchanged, and an incomplete last line is redacted as plain text.
        *lines, rest = text.split("\n")
        cleaned, count = SECRET.subn(MARK, rest)
        for i, line in enumerate(lines):
            value, secrets = _clean_value(_parse(line, where)) if _suspicious(line) else (None, 0)
            lines[i] = json.dumps(value) if secrets else line
            count += secrets
        cleaned = "\n".join([*lines, cleaned])
    elif name.endswith(".json"):
        value, count = _clean_value(_parse(text, where))
        cleaned = json.dumps(value, indent=1) + "\n"
    else:
        cleaned, count = SECRET.subn(MARK, text)
        _require_no_random(cleaned, where)
    return (cleaned.encode(errors="surrogateescape"), count) if count else (content, 0)


def _require_no_random(text: str, where: str) -> None:
    """Refuse a log with a word that looks like a key of an unknown kind. The word is not repeated."""
    for number, line in enumerate(text.splitlines(), 1):
        if any(_is_random(word[0]) for word in _WORD.finditer(line)):
            raise RequestError(
                f"{where}: line {number} contains a word that looks random and may be a secret, expected a log without "
                "secrets. Pack without --logs."
            )


def _is_random(word: str) -> bool:
    """Whether a word has letters of both cases and digits in no order, or is a long hexadecimal number.

    >>> _is_random("wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"), _is_random("test_a_word_of_a_log_4")
    (True, False)
    """
    if _KNOWN_WORD.fullmatch(word):
        return False
    if _HEX.fullmatch(word):
        return len(set(word)) > 8
    parts = [part for part in re.split(r"[/_=-]", word) if part]
    longest = max(parts, key=len, default="")
    mixed = sum(bool(re.search(kind, longest)) for kind in ("[a-z]", "[A-Z]", "[0-9]")) == 3
    bits = -sum(n / len(longest) * math.log2(n / len(longest)) for n in Counter(longest).values()) if longest else 0.0
    return len(longest) >= 20 and mixed and bits >= _LEAST_BITS


# Every secret has one of these texts in it, in small letters. Searching for them is ten times faster than SECRET.
_STARTS = """
hf_ sk- sk_live sk_test rk_live rk_test gho_ ghp_ ghr_ ghs_ ghu_ github_pat_ glpat- gldt- glrt- glptt- glsoat- xox xapp-
akia asia abia acca aiza ya29. eyj nvapi- npm_ pypi- dckr_pat_ _v1_ r8_ gsk_ xai- pplx- sg. shp hvb. hvs. dapi tskey-
whsec_ atatt age-secret sq0 lin_api_ ntn_ :aa hooks.slack webhooks/ :// accountkey sharedaccesskey sig= x-amz- x-goog-
bearer basic authorization cookie -key auth-token password passwd passphrase apikey credential keys secrets
"""
_ENDS = (f"{word}{end}" for word in ("key", "token", "tokens", "secret") for end in "=:\"'\\ _-")
_FRAGMENTS = (*_STARTS.split(), "private key", *(end for end in _ENDS if end != 'tokens"'))


def _suspicious(text: str) -> bool:
    """Whether the text may contain a secret. JSON escapes end in a letter or digit, which would hide where a word
    begins, so the text is also searched without them."""
    lowered = text.lower()
    if not any(fragment in lowered for fragment in _FRAGMENTS):
        return False
    return bool(SECRET.search(text) or ("\\" in text and SECRET.search(_ESCAPE.sub("  ", text))))


def clean_facts(facts: Any) -> tuple[Any, int]:
    """The recorded facts of a machine without secrets, and how many were removed."""
    count = 0
    environment = facts.get("environment") if isinstance(facts, dict) else None
    if isinstance(environment, Mapping):
        allowed = recorded_environment({str(k): str(v) for k, v in environment.items()})
        count = len(environment) - len(allowed)
        facts = facts | {"environment": allowed}
    facts, secrets = _clean_value(facts)
    return facts, count + secrets


def clean_text(text: str) -> str:
    """A message of a run, such as its error, with secrets redacted."""
    return SECRET.sub(MARK, text)


def mask_log(path: Path, environ: Mapping[str, str]) -> int:
    """Overwrite secrets in a log by asterisks, and return how many there were: texts that look like one, and the values
    of variables with a secret-like name. No byte moves, because a process that ends late may still append."""
    values = [re.escape(value) for value in sorted(secret_values(environ), key=len, reverse=True)]
    known = re.compile("|".join(values)) if values else None
    places, begin = list[tuple[int, int]](), 0
    with path.open("rb") as log:
        while piece := log.read(_PIECE) + log.readline():
            # One character for each byte, so that places in the text are places in the file.
            text = piece.decode("latin-1")
            found = [*SECRET.finditer(text)] if _suspicious(text) else []
            places += [(begin + m.start(), len(m[0])) for m in (*found, *(known.finditer(text) if known else ()))]
            begin += len(piece)
    if places:
        with path.open("r+b") as log:
            for place, size in places:
                os.pwrite(log.fileno(), b"*" * size, place)
    return len(places)


def _clean_value(value: Any) -> tuple[Any, int]:
    """The decoded JSON value with secrets redacted, and their number."""
    if isinstance(value, str):
        return SECRET.subn(MARK, value)
    if isinstance(value, dict):
        cleaned, total = {}, 0
        for key, inner in value.items():
            is_secret = isinstance(inner, str) and inner != MARK and _SECRET_FIELD.fullmatch(key)
            cleaned[key], count = (MARK, 1) if is_secret else _clean_value(inner)
            total += count
        return cleaned, total
    if isinstance(value, list):
        items = [_clean_value(inner) for inner in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not valid JSON ({error}), so it cannot be searched for secrets.") from None
