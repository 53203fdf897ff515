"""Redaction: removes texts that look like secrets from files before they leave this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.host.environment import SECRET_VALUE, recorded_environment

MARK = "[redacted]"
# Recognised by shape, or by name (`HF_TOKEN=...`, `password: ...`).
_NAME = (
    r"\b(?:[A-Z][A-Z0-9_]*_)?(?:API)?(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?:_[A-Z0-9_]+)?"
    r"|\b(?i:password|passwd|secret|api_key|access_token)"
)
_NAMED = rf"(?:{_NAME})[\"']?\s*[=:]\s*[\"']?[^\s\"',;]{{6,}}"
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")
_SECRET_FIELD = re.compile(_NAME)
SECRET = re.compile(f"{SECRET_VALUE.pattern}|{_NAMED}")


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
    if not suspicious:
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
    return (cleaned.encode(errors="surrogateescape"), count) if count else (content, 0)


def _suspicious(text: str) -> bool:
    """Whether the text may contain a secret. JSON escapes end in a letter or digit, which would hide where a word
    begins, so the text is also searched without them."""
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
