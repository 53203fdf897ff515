"""What must not leave this machine: texts shaped like a secret are taken out of files before they are handed on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.host.environment import SECRET_VALUE, recorded_environment

MARK = "[redacted]"
# By its shape, or by the name it is given (`HF_TOKEN=...`, `password: ...`).
_NAME = (
    r"\b(?:[A-Z][A-Z0-9_]*_)?(?:API)?(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?:_[A-Z0-9_]+)?"
    r"|\b(?i:password|passwd|secret|api_key|access_token)"
)
_NAMED = rf"(?:{_NAME})[\"']?\s*[=:]\s*[\"']?[^\s\"',;]{{6,}}"
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")
_SECRET_FIELD = re.compile(_NAME)
SECRET = re.compile(f"{SECRET_VALUE.pattern}|{_NAMED}")


def clean(name: str, content: bytes, where: str) -> tuple[bytes, int]:
    """The content of a file of a run folder without secrets, and how many were taken out.

    A spec is refused instead: changed, it would be another run. Of a machine's variables only those are kept that
    `environment.recorded_environment` lets pass today, whatever an older version recorded.
    """
    text = content.decode(errors="surrogateescape")
    suspicious = _suspicious(text)
    if name == "spec.json" and suspicious:
        raise RequestError(f"{where}: holds a text shaped like a secret; accepted is a run whose spec names none")
    if name.startswith("machine-"):
        return _clean_machine(text, content, where)
    if not suspicious:
        return content, 0
    if name.endswith(".jsonl"):
        cleaned, count = _clean_lines(text, where)
    elif name.endswith(".json"):
        value, count = _clean_value(_parse(text, where))
        cleaned = json.dumps(value, indent=1) + "\n"
    else:
        cleaned, count = SECRET.subn(MARK, text)
    return (cleaned.encode(errors="surrogateescape"), count) if count else (content, 0)


def _suspicious(text: str) -> bool:
    """Whether a secret may stand in it. In JSON a line break is a backslash and a letter, and many a quotation mark
    ends in a digit: they would hide where a word begins, so both readings are searched."""
    return bool(SECRET.search(text) or ("\\" in text and SECRET.search(_ESCAPE.sub("  ", text))))


def _clean_machine(text: str, content: bytes, where: str) -> tuple[bytes, int]:
    facts, count = clean_facts(_parse(text, where))
    return ((json.dumps(facts, indent=1) + "\n").encode(), count) if count else (content, 0)


def clean_facts(facts: Any) -> tuple[Any, int]:
    """What was recorded of a machine without secrets, and how many were taken out."""
    count = 0
    environment = facts.get("environment") if isinstance(facts, dict) else None
    if isinstance(environment, Mapping):
        allowed = recorded_environment({str(k): str(v) for k, v in environment.items()})
        count = len(environment) - len(allowed)
        facts = facts | {"environment": allowed}
    facts, secrets = _clean_value(facts)
    return facts, count + secrets


def clean_text(text: str) -> str:
    """A message of a run, such as its error, without secrets."""
    return SECRET.sub(MARK, text)


def _clean_lines(text: str, where: str) -> tuple[str, int]:
    """Lines in which nothing is found stay as they are; so does a last one that was cut short."""
    *whole, rest = text.split("\n")
    lines, total = [], 0
    for line in whole:
        value, count = _clean_value(_parse(line, where)) if _suspicious(line) else (None, 0)
        lines.append(json.dumps(value) if count else line)
        total += count
    rest, count = SECRET.subn(MARK, rest)
    return "\n".join([*lines, rest]), total + count


def _clean_value(value: Any) -> tuple[Any, int]:
    """The same JSON value with secrets taken out of its texts: decoded, because an escape may hide where one begins."""
    if isinstance(value, str):
        return SECRET.subn(MARK, value)
    if isinstance(value, dict):
        items = {key: _clean_field(key, inner) for key, inner in value.items()}
        return {key: cleaned for key, (cleaned, _) in items.items()}, sum(count for _, count in items.values())
    if isinstance(value, list):
        found = [_clean_value(inner) for inner in value]
        return [cleaned for cleaned, _ in found], sum(count for _, count in found)
    return value, 0


def _clean_field(key: str, value: Any) -> tuple[Any, int]:
    if isinstance(value, str) and value != MARK and _SECRET_FIELD.fullmatch(key):
        return MARK, 1
    return _clean_value(value)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: cannot be read ({error}), so it cannot be searched for secrets") from None
