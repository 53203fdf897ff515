"""What the API server does to an object before it is stored: schema, validation, defaults, Pod Security, quotas.

The schema is the official one (kubernetes-validate), and the table of `custom` for JobSet, Trainer and Kueue. A field
that does not exist is always refused, so that a manifest that means nothing fails its test; the real server only warns
unless asked for `fieldValidation=Strict`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from testbed.kube_api import custom, quotas, refusals
from testbed.kube_api.resources import JOB_SETS, JOBS, NAMESPACES, PODS, TRAIN_JOBS, Object, Resource
from testbed.kube_api.state import State

VERSION = "1.33"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# Trainer's names, by a rule of its CRD.
_RFC_1035 = re.compile(r"[a-z]([-a-z0-9]{,61}[a-z0-9])?")
_CUSTOM = (".x-k8s.io", "kubeflow.org")
# Names of these become parts of DNS names.
_STRICT_NAMES = {"services", "namespaces"}


def admit(state: State, resource: Resource, namespace: str, obj: Object) -> Object:
    """The object as it will be stored; raises Refusal."""
    _check_type(resource, obj)
    if resource in (JOBS, JOB_SETS, TRAIN_JOBS) and not obj.get("spec"):
        cause = ("spec", "FieldValueRequired", "Required value")
        raise refusals.invalid(resource, obj.get("metadata", {}).get("name", ""), [cause])
    _check_schema(resource, obj)
    _check_name(resource, obj)
    obj.pop("status", None)
    if resource == NAMESPACES:
        labels = obj["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = obj["metadata"]["name"]
        obj["status"] = {"phase": "Active"}
    if resource == JOBS:
        _check_job(obj)
    if resource == JOB_SETS:
        check_jobset_names(obj["metadata"]["name"], obj["spec"])
    if resource == PODS:
        wrong = security_violations(state, namespace, obj)
        if wrong:
            raise refusals.forbidden(PODS, obj["metadata"].get("name"), wrong)
        obj["status"] = {"phase": "Pending", "qosClass": "Burstable"}
    if resource.plural == "persistentvolumeclaims":
        obj["status"] = {"phase": "Bound"}
    # After everything else, as in the real one: what is refused uses no quota.
    quotas.check(state, resource, namespace, obj)
    return obj


def _check_type(resource: Resource, obj: Object) -> None:
    given = (obj.get("apiVersion", resource.api_version), obj.get("kind", resource.kind))
    if given != (resource.api_version, resource.kind):
        message = f"the API version in the data ({given[0]}) does not match the expected API version"
        raise refusals.bad_request(f"{message} ({resource.api_version})")


@functools.cache
def schemas() -> Any:
    """The package kubernetes_validate, which would read megabytes of schemas for each object."""
    import kubernetes_validate

    kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
    return kubernetes_validate


def _check_schema(resource: Resource, obj: Object) -> None:
    if resource.kind in custom.FIELDS:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}}
        for text in custom.problems(
            resource.kind, obj.get("spec"), lambda spec: _validate(resource, job | {"spec": spec})
        ):
            raise refusals.bad_request(_undecodable(resource, f"strict decoding error: {text}"))
        if resource.kind == "TrainJob" and not _RFC_1035.fullmatch(obj["metadata"].get("name") or "a"):
            text = "Invalid value: metadata.name must match RFC 1035 DNS label format"
            raise refusals.invalid(resource, obj["metadata"]["name"], [("metadata.name", "FieldValueInvalid", text)])
    elif not resource.group.endswith(_CUSTOM) and resource.plural != "events":
        _validate(resource, {"apiVersion": resource.api_version, "kind": resource.kind, **obj})


def _validate(resource: Resource, named: Object) -> None:
    kubernetes_validate = schemas()
    try:
        kubernetes_validate.validate(named, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(word) for word in error.path)
        if "Additional properties" in error.message:
            field = error.message.partition("'")[2].partition("'")[0]
            full = f"{where}.{field}" if where else field
            text = f'strict decoding error: unknown field "{full}"'
            raise refusals.bad_request(_undecodable(resource, text)) from None
        raise refusals.bad_request(_undecodable(resource, f"{where}: {error.message}")) from None


def _undecodable(resource: Resource, why: str) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {why}'


def _check_name(resource: Resource, obj: Object) -> None:
    meta = obj.setdefault("metadata", {})
    name = meta.get("name")
    if not name and not meta.get("generateName"):
        raise refusals.invalid(
            resource, "", [("metadata.name", "FieldValueRequired", "Required value: name or generateName is required")]
        )
    pattern = _LABEL if resource.plural in _STRICT_NAMES else _SUBDOMAIN
    longest = 63 if resource.plural in _STRICT_NAMES else 253
    if name and not resource.group.startswith("rbac") and (not pattern.fullmatch(name) or len(name) > longest):
        kind = "label" if pattern is _LABEL else "subdomain"
        text = (
            f'Invalid value: "{name}": a lowercase RFC 1123 {kind} must consist of lower case alphanumeric characters'
        )
        raise refusals.invalid(resource, name, [("metadata.name", "FieldValueInvalid", text)])


def _check_job(job: Object) -> None:
    spec, meta = job["spec"], job["metadata"]
    pod, causes = spec["template"]["spec"], []
    indexed = spec.get("completionMode") == "Indexed"
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        text = 'Required value: valid values: "OnFailure", "Never"'
        causes.append(("spec.template.spec.restartPolicy", "FieldValueRequired", text))
    if indexed and spec.get("completions") is None:
        text = "Required value: when completion mode is Indexed"
        causes.append(("spec.completions", "FieldValueRequired", text))
    if indexed and len(f"{meta['name']}-{spec.get('completions', 1) - 1}") > 63:
        text = f'Invalid value: "{meta["name"]}": must be no more than 63 characters with its index'
        causes.append(("metadata.name", "FieldValueInvalid", text))
    if spec.get("podFailurePolicy") and pod.get("restartPolicy") != "Never":
        text = 'Invalid value: "OnFailure": only "Never" is supported when podFailurePolicy is specified'
        causes.append(("spec.template.spec.restartPolicy", "FieldValueInvalid", text))
    causes += _index_limits(spec)
    if len(meta["name"]) > 63:
        text = f'Invalid value: "{meta["name"]}": must be no more than 63 characters'
        causes.append(("spec.template.labels", "FieldValueInvalid", text))
    if not indexed and spec.get("completions", spec.get("parallelism", 1)) != 1:
        raise refusals.internal("this double runs plain Jobs of one pod only; use completionMode Indexed")
    if causes:
        raise refusals.invalid(JOBS, meta["name"], causes)


def _index_limits(spec: Object) -> list[tuple[str, str, str]]:
    """What is wrong with a limit of failures for each index."""
    causes = []
    if "backoffLimitPerIndex" in spec:
        if spec.get("completionMode") != "Indexed":
            text = f"Invalid value: {spec['backoffLimitPerIndex']}: requires indexed completion mode"
            causes.append(("spec.backoffLimitPerIndex", "FieldValueInvalid", text))
        if spec["template"]["spec"].get("restartPolicy") != "Never":
            text = 'Invalid value: "OnFailure": only "Never" is supported when backoffLimitPerIndex is specified'
            causes.append(("spec.template.spec.restartPolicy", "FieldValueInvalid", text))
        return causes
    if "maxFailedIndexes" in spec:
        text = "Required value: when maxFailedIndexes is specified"
        causes.append(("spec.backoffLimitPerIndex", "FieldValueRequired", text))
    for number, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules", [])):
        if rule["action"] == "FailIndex":
            text = 'Invalid value: "FailIndex": requires the backoffLimitPerIndex to be set'
            causes.append((f"spec.podFailurePolicy.rules[{number}].action", "FieldValueInvalid", text))
    return causes


def check_jobset_names(name: str, spec: Object) -> None:
    """What JobSet's webhook says: the longest name of a pod that its controller would make must be a DNS label."""
    causes = []
    for group in spec["replicatedJobs"]:
        job = f"{name}-{group['name']}-{group.get('replicas', 1) - 1}"
        inner = group["template"]["spec"]
        pod = f"{job}-{inner.get('completions', 1) - 1}-abcde"
        if len(pod) > 63 or not _LABEL.fullmatch(pod):
            text = f'Invalid value: "{pod}": pod names generated for this JobSet are longer than 63 characters'
            causes.append(("metadata.name", "FieldValueInvalid", text))
    if causes:
        raise refusals.invalid(JOB_SETS, name, causes)


def give_job_defaults(job: Object) -> None:
    """Called once the uid is known: the selector is made of it."""
    spec, meta = job["spec"], job["metadata"]
    limit = 2**31 - 1 if "backoffLimitPerIndex" in spec else 6
    usual = {"parallelism": 1, "backoffLimit": limit, "completionMode": "NonIndexed", "suspend": False}
    for key, value in usual.items():
        spec.setdefault(key, value)
    if spec["completionMode"] == "NonIndexed":
        spec.setdefault("completions", spec["parallelism"])
    spec.setdefault("podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed")
    spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": meta["uid"]}}
    labels = spec["template"].setdefault("metadata", {}).setdefault("labels", {})
    for prefix in ("batch.kubernetes.io/", ""):
        labels |= {f"{prefix}controller-uid": meta["uid"], f"{prefix}job-name": meta["name"]}
    job["status"] = {}


def security_violations(state: State, namespace: str, pod: Object) -> str | None:
    """What Pod Security "restricted" says against a pod, in a namespace that enforces it."""
    found = state.find(NAMESPACES, "", namespace) or {"metadata": {}}
    if (found["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce") != "restricted":
        return None
    spec = pod["spec"]
    wrong = [f"host namespaces ({key}=true)" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in filter(lambda v: "hostPath" in v, spec.get("volumes") or []):
        wrong += [f'restricted volume types (volume "{volume["name"]}" uses restricted volume type "hostPath")']
    for container in spec["containers"]:
        wrong += _container_violations(container, spec.get("securityContext") or {})
    return f'violates PodSecurity "restricted:latest": {", ".join(wrong)}' if wrong else None


def _container_violations(container: Object, pod_context: Object) -> list[str]:
    context: dict[str, Any] = container.get("securityContext") or {}
    name, wrong = f'container "{container["name"]}"', []
    either = {**pod_context, **context}
    if context.get("allowPrivilegeEscalation") is not False:
        wrong.append(
            f"allowPrivilegeEscalation != false ({name} must set securityContext.allowPrivilegeEscalation=false)"
        )
    if "ALL" not in (context.get("capabilities") or {}).get("drop", []):
        wrong.append(f'unrestricted capabilities ({name} must set securityContext.capabilities.drop=["ALL"])')
    if either.get("runAsNonRoot") is not True:
        wrong.append(f"runAsNonRoot != true (pod or {name} must set securityContext.runAsNonRoot=true)")
    if either.get("runAsUser") == 0:
        wrong.append(f"runAsUser=0 ({name} must not set runAsUser=0)")
    if (either.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        wrong.append(f'seccompProfile (pod or {name} must set securityContext.seccompProfile.type to "RuntimeDefault")')
    if context.get("privileged"):
        wrong.append(f"privileged ({name} must not set securityContext.privileged=true)")
    return wrong
