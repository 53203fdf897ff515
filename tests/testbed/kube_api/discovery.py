"""What the API server says about itself: version, groups, resources."""

from __future__ import annotations

from testbed.kube_api.admission import VERSION
from testbed.kube_api.resources import KNOWN, Object

_ALL = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def document(path: str) -> Object | None:
    """The answer to a discovery path, or None for a path of a resource."""
    words = path.strip("/").split("/")
    if path in ("/healthz", "/livez", "/readyz"):
        return {"status": "ok"}
    if path == "/version":
        major, minor = VERSION.split(".")
        about = {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0", "platform": "linux/amd64"}
        return about | dict.fromkeys(("buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion"), "double")
    if words == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if words == ["apis"]:
        groups = sorted({r.group for r in KNOWN.values() if r.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in groups]}
    if words[0] == "apis" and len(words) == 2:
        return _group(words[1]) if any(r.group == words[1] for r in KNOWN.values()) else None
    if words == ["api", "v1"]:
        return _resources("", "v1")
    if words[0] == "apis" and len(words) == 3:
        return _resources(words[1], words[2])
    return None


def _group(name: str) -> Object:
    version = next(r.version for r in KNOWN.values() if r.group == name)
    about = {"groupVersion": f"{name}/{version}", "version": version}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": [about], "preferredVersion": about}


def _resources(group: str, version: str) -> Object | None:
    found = [r for r in KNOWN.values() if (r.group, r.version) == (group, version)]
    if not found:
        return None
    rows = [
        {"name": r.plural, "singularName": r.kind.lower(), "namespaced": r.namespaced, "kind": r.kind, "verbs": _ALL}
        for r in found
    ]
    about = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": about, "resources": rows}
