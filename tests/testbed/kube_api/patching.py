"""PATCH: JSON merge patch (RFC 7386), JSON patch (RFC 6902), and the strategic merge of lists that have a key."""

from __future__ import annotations

import copy
from typing import Any

from testbed.kube_api.refusals import Refusal, bad_request
from testbed.kube_api.resources import Object

# Lists of a strategic merge that are merged by a key of their entries.
_MERGED = {"containers": "name", "env": "name", "volumes": "name", "conditions": "type", "ownerReferences": "uid"}


def patched(obj: Object, patch: Any, content_type: str) -> Object:
    kind = content_type.partition(";")[0].strip()
    new = copy.deepcopy(obj)
    if kind == "application/json-patch+json":
        for step in patch:
            _apply(new, step)
        return new
    if kind in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
        return _merged(new, patch, strategic="strategic" in kind)  # type: ignore[no-any-return]
    raise Refusal(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {kind}")


def _merged(old: Any, patch: Any, *, strategic: bool, key: str = "") -> Any:
    if strategic and isinstance(old, list) and isinstance(patch, list) and key in _MERGED:
        return _merged_lists(old, patch, _MERGED[key])
    if not isinstance(old, dict) or not isinstance(patch, dict):
        return patch
    for word, value in patch.items():
        if value is None:
            old.pop(word, None)
        else:
            old[word] = _merged(old.get(word), value, strategic=strategic, key=word)
    return old


def _merged_lists(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    places = {entry[key]: number for number, entry in enumerate(old)}
    for entry in patch:
        if entry[key] in places:
            old[places[entry[key]]] = _merged(old[places[entry[key]]], entry, strategic=True)
        else:
            old.append(entry)
    return old


def _apply(obj: Any, step: Object) -> None:
    *way, last = [word.replace("~1", "/").replace("~0", "~") for word in step["path"].split("/")[1:]]
    for word in way:
        obj = obj[int(word) if isinstance(obj, list) else word]
    if isinstance(obj, list):
        place = len(obj) if last == "-" else int(last)
        if step["op"] == "add":
            obj.insert(place, step["value"])
        elif step["op"] == "replace":
            obj[place] = step["value"]
        else:
            obj.pop(place)
    elif step["op"] in ("add", "replace"):
        obj[last] = step["value"]
    elif step["op"] == "remove":
        if last not in obj:
            raise bad_request("the server rejected our request due to an error in our request")
        del obj[last]
    else:
        raise bad_request(f"json patch operation {step['op']} is not known to this double")
