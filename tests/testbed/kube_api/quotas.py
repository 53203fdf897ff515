"""The admission plugin ResourceQuota: what a namespace may still create.

Known are the numbers of pods and of any kind (`count/jobs.batch`), and what pods request and are limited to.
"""

from __future__ import annotations

from collections import Counter

from testbed.kube_api import refusals
from testbed.kube_api.jobs import is_finished
from testbed.kube_api.resources import BY_PLURAL, PODS, Object, Resource
from testbed.kube_api.scheduler import quantity
from testbed.kube_api.state import State

QUOTAS = BY_PLURAL["resourcequotas"]


def check(state: State, resource: Resource, namespace: str, obj: Object) -> None:
    """Raises Refusal in the words of the real server, which names the quota and all that exceeds it."""
    wanted = usage_of(resource, obj)
    for quota in state.list(QUOTAS, namespace) if wanted else []:
        hard = quota["spec"].get("hard") or {}
        used: Counter[str] = Counter()
        for other in state.list(resource, namespace):
            if resource != PODS or not is_finished(other):
                used.update(usage_of(resource, other))
        over = [name for name in sorted(hard) if used[name] + wanted[name] > quantity(hard[name]) and wanted[name]]
        if over:
            words = [", ".join(f"{name}={_text(values[name])}" for name in over) for values in (wanted, used)]
            limited = ", ".join(f"{name}={hard[name]}" for name in over)
            why = f"exceeded quota: {quota['metadata']['name']}, requested: {words[0]}, used: {words[1]}"
            raise refusals.forbidden(resource, obj["metadata"].get("name"), f"{why}, limited: {limited}")


def usage_of(resource: Resource, obj: Object) -> Counter[str]:
    """What one object counts for, by the names that quotas use."""
    usage: Counter[str] = Counter({f"count/{resource.qualified}": 1})
    if resource != PODS:
        return usage
    usage["pods"] = 1
    for container in obj["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, value in (resources.get("requests") or {}).items():
            usage[f"requests.{name}"] += quantity(value)  # type: ignore[assignment]
            usage[name] += quantity(value)  # type: ignore[assignment]
        for name, value in (resources.get("limits") or {}).items():
            usage[f"limits.{name}"] += quantity(value)  # type: ignore[assignment]
    return usage


def _text(number: float) -> str:
    return f"{number:g}"
