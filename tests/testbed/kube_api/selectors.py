"""Label and field selectors of list and watch, and those inside objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from testbed.kube_api.refusals import bad_request
from testbed.kube_api.resources import Object

_SET = re.compile(r"^\s*(?P<key>[^\s!=,()]+)\s+(?P<how>in|notin)\s+\((?P<values>[^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*(?P<key>[^\s!=,()]+)\s*(?P<how>!=|==|=)\s*(?P<value>[^\s,()]*)\s*$")


def labels_match(text: str, obj: Object) -> bool:
    """`a=b,c!=d,e in (f,g),h,!i`: all of them."""
    labels = obj["metadata"].get("labels") or {}
    # Commas inside brackets do not separate.
    return all(_term(part, labels) for part in re.split(r",(?![^(]*\))", text) if part.strip())


def _term(term: str, labels: Mapping[str, str]) -> bool:
    if found := _SET.match(term):
        values = {value.strip() for value in found["values"].split(",")}
        return (labels.get(found["key"]) in values) == (found["how"] == "in")
    if found := _EQUAL.match(term):
        return (labels.get(found["key"]) == found["value"]) == (found["how"] != "!=")
    term = term.strip()
    return term[1:] not in labels if term.startswith("!") else term in labels


def fields_match(text: str, obj: Object) -> bool:
    for part in filter(None, text.split(",")):
        found = _EQUAL.match(part)
        if found is None:
            raise bad_request(f'invalid field selector: "{part}"')
        value = str(_at(obj, found["key"]) or "")
        if (value == found["value"]) == (found["how"] == "!="):
            return False
    return True


def _at(obj: Object, path: str) -> Any:
    value: Any = obj
    for word in path.split("."):
        value = value.get(word) if isinstance(value, dict) else None
    return value


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector object: matchLabels and matchExpressions. None selects nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    terms = selector.get("matchExpressions") or []
    return all(labels.get(k) == v for k, v in wanted.items()) and all(expression_holds(t, labels) for t in terms)


def expression_holds(term: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(term["key"]), term.get("values") or []
    return {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": term["key"] in labels,
        "DoesNotExist": term["key"] not in labels,
    }[term["operator"]]
