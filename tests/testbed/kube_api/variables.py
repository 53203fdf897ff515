"""The environment and the command of a container, by the rules that the API documents."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from testbed.kube_api.resources import CONFIG_MAPS, SECRETS, Object
from testbed.kube_api.scheduler import quantity
from testbed.kube_api.state import State

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ConfigError(Exception):
    """The container cannot be made: CreateContainerConfigError."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """`$(VAR)` by its value where it is known, left as it is where not; `$$` is one `$` and refers to nothing."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def environment(state: State, pod: Object, container: Object, node: str) -> dict[str, str]:
    """In the order of the list: a value may refer only to variables above it."""
    found: dict[str, str] = {}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            value = _source(state, pod, container, node, entry["valueFrom"])
        else:
            value = expand(entry.get("value") or "", found)
        if value is not None:
            found[entry["name"]] = value
    return found


def _source(state: State, pod: Object, container: Object, node: str, source: Object) -> str | None:
    if "fieldRef" in source:
        return _field(pod, node, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _resource(container, source["resourceFieldRef"])
    for word, resource, kind in (("secretKeyRef", SECRETS, "secret"), ("configMapKeyRef", CONFIG_MAPS, "configmap")):
        if word in source:
            wanted = source[word]
            holder = state.find(resource, pod["metadata"]["namespace"], wanted["name"])
            data = (holder or {}).get("data") or {}
            if wanted["key"] in data:
                raw = data[wanted["key"]]
                return base64.b64decode(raw).decode() if kind == "secret" else str(raw)
            if wanted.get("optional"):
                return None
            place = f"{pod['metadata']['namespace']}/{wanted['name']}"
            raise ConfigError(
                f'{kind} "{wanted["name"]}" not found'
                if holder is None
                else f"couldn't find key {wanted['key']} in {kind.capitalize()} {place}"
            )
    raise ConfigError(f"unknown source {sorted(source)}")


def _field(pod: Object, node: str, path: str) -> str:
    meta, status = pod["metadata"], pod["status"]
    if found := _SUBSCRIPT.fullmatch(path):
        return str((meta.get(found[1]) or {}).get(found[2], ""))
    known = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": node,
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": status.get("podIP", ""),
        "status.hostIP": status.get("hostIP", ""),
    }
    if path not in known:
        raise ConfigError(f"field label not supported: {path}")
    return str(known[path])


def _resource(container: Object, reference: Object) -> str:
    side, _, name = reference["resource"].partition(".")
    value = ((container.get("resources") or {}).get(side) or {}).get(name, "0")
    divisor = quantity(reference.get("divisor") or "1") or 1.0
    # Rounded up, as documented.
    return str(int(-(-quantity(value) // divisor)))
