"""Who may do what: tokens, and the Roles and RoleBindings that are stored in the cluster itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from testbed.kube_api import refusals
from testbed.kube_api.resources import BY_PLURAL, Object, Resource
from testbed.kube_api.state import State

ADMIN_TOKEN = "token-of-the-admin"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ("system:authenticated",)


class Access:
    """The RBAC authorizer: what no binding allows is forbidden. A starting server has read no bindings yet, and forbids
    everything to everybody but administrators."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._filled_at = float("-inf")
        self._users = {ADMIN_TOKEN: User("kubernetes-admin", ("system:masters", "system:authenticated"))}

    def token_for(self, namespace: str, account: str) -> str:
        """As `kubectl create token`."""
        token = f"token-of-{namespace}-{account}"
        self._users[token] = User(f"system:serviceaccount:{namespace}:{account}", ("system:serviceaccounts",))
        return token

    def forget_roles(self, seconds: float) -> None:
        """A server has just started: its caches are filled after so long."""
        self._filled_at = time.monotonic() + seconds

    def user(self, header: str | None) -> User:
        scheme, _, token = (header or "").partition(" ")
        if scheme != "Bearer" or token not in self._users:
            raise refusals.unauthorized()
        return self._users[token]

    def allows(self, user: User, verb: str, resource: Resource, sub: str, namespace: str, name: str | None) -> bool:
        if "system:masters" in user.groups:
            return True
        if time.monotonic() < self._filled_at:
            return False
        what = f"{resource.plural}/{sub}" if sub else resource.plural
        return any(_covers(rule, verb, resource.group, what, name) for rule in self._rules(user, namespace))

    def require(self, user: User, verb: str, resource: Resource, sub: str, namespace: str, name: str | None) -> None:
        # By default, everybody may ask for their own rights.
        is_default = resource.plural == "selfsubjectaccessreviews" and time.monotonic() >= self._filled_at
        if not is_default and not self.allows(user, verb, resource, sub, namespace, name):
            raise refusals.not_permitted(user.name, verb, resource, sub, namespace, name)

    def review(self, user: User, asked: Object) -> Object:
        """A SelfSubjectAccessReview with its answer."""
        about = asked.get("spec", {}).get("resourceAttributes") or {}
        resource = BY_PLURAL.get(about.get("resource", ""))
        known = resource is not None and resource.group == about.get("group", "")
        allowed = known and self.allows(
            user,
            about.get("verb", ""),
            resource,  # type: ignore[arg-type]
            about.get("subresource", ""),
            about.get("namespace", ""),
            about.get("name") or None,
        )
        return {**asked, "status": {"allowed": bool(allowed)}}

    def _rules(self, user: User, namespace: str) -> Iterator[Object]:
        places = [("clusterrolebindings", ""), *([("rolebindings", namespace)] if namespace else [])]
        for plural, where in places:
            for binding in self._state.list(BY_PLURAL[plural], where):
                if any(_is(user, subject, where) for subject in binding.get("subjects") or []):
                    yield from self._rules_of(binding["roleRef"], where)

    def _rules_of(self, reference: Object, namespace: str) -> list[Object]:
        plural = {"Role": "roles", "ClusterRole": "clusterroles"}[reference["kind"]]
        where = namespace if plural == "roles" else ""
        role = self._state.find(BY_PLURAL[plural], where, reference["name"])
        found: list[Object] = (role or {}).get("rules") or []
        return found


def _is(user: User, subject: Object, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return user.name == f"system:serviceaccount:{subject.get('namespace', namespace)}:{subject['name']}"
    return subject["name"] == user.name if subject["kind"] == "User" else subject["name"] in user.groups


def _covers(rule: Object, verb: str, group: str, what: str, name: str | None) -> bool:
    def has(key: str, wanted: str) -> bool:
        return bool({"*", wanted} & set(rule.get(key) or []))

    names = rule.get("resourceNames")
    return has("verbs", verb) and has("apiGroups", group) and has("resources", what) and (not names or name in names)
