"""Refusals with the Status bodies that the real API server writes."""

from __future__ import annotations

from testbed.kube_api.resources import Object, Resource


class Refusal(Exception):
    """An answer other than success; `body` is the Status object."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            **({"details": details} if details else {}),
            "code": code,
        }


def _details(resource: Resource, name: str | None) -> Object:
    found = {"name": name, "group": resource.group, "kind": resource.plural}
    return {key: value for key, value in found.items() if value}


def not_found(resource: Resource, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{resource.qualified} "{name}" not found', _details(resource, name))


def no_such_path() -> Refusal:
    return Refusal(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: Resource, name: str) -> Refusal:
    return Refusal(409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', _details(resource, name))


def conflict(resource: Resource, name: str) -> Refusal:
    message = (
        f'Operation cannot be fulfilled on {resource.qualified} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    return Refusal(409, "Conflict", message, _details(resource, name))


def invalid(resource: Resource, name: str, causes: list[tuple[str, str, str]]) -> Refusal:
    """causes: field, reason, text; several are written in brackets, as the real server does."""
    texts = [f"{field}: {text}" for field, _, text in causes]
    joined = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    details = {
        "name": name,
        "group": resource.group,
        "kind": resource.kind,
        "causes": [{"reason": reason, "message": text, "field": field} for field, reason, text in causes],
    }
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {joined}', {k: v for k, v in details.items() if v})


def bad_request(message: str) -> Refusal:
    return Refusal(400, "BadRequest", message)


def unauthorized() -> Refusal:
    return Refusal(401, "Unauthorized", "Unauthorized")


def forbidden(resource: Resource, name: str | None, why: str) -> Refusal:
    named = f'{resource.qualified} "{name}"' if name else resource.qualified
    return Refusal(403, "Forbidden", f"{named} is forbidden: {why}", _details(resource, name))


def not_permitted(user: str, verb: str, resource: Resource, sub: str, namespace: str, name: str | None) -> Refusal:
    what = f"{resource.plural}/{sub}" if sub else resource.plural
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    why = f'User "{user}" cannot {verb} resource "{what}" in API group "{resource.group}" {where}'
    return forbidden(resource, name, why)


def expired(asked: int, oldest: int) -> Refusal:
    return Refusal(410, "Expired", f"too old resource version: {asked} ({oldest})")


def internal(message: str) -> Refusal:
    return Refusal(500, "InternalError", f"Internal error occurred: {message}")
