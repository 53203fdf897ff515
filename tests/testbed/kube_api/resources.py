"""What kinds of objects the double knows, and under which paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """One plural of the API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages name it: jobs.batch, pods."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_ROWS: dict[tuple[str, str], dict[str, str]] = {
    ("", "v1"): {
        "pods": "Pod",
        "services": "Service",
        "events": "Event",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "serviceaccounts": "ServiceAccount",
        "resourcequotas": "ResourceQuota",
        "limitranges": "LimitRange",
        "namespaces": "Namespace",
        "nodes": "Node",
    },
    ("batch", "v1"): {"jobs": "Job", "cronjobs": "CronJob"},
    ("networking.k8s.io", "v1"): {"networkpolicies": "NetworkPolicy"},
    ("scheduling.k8s.io", "v1"): {"priorityclasses": "PriorityClass"},
    ("rbac.authorization.k8s.io", "v1"): {
        "roles": "Role",
        "rolebindings": "RoleBinding",
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
    },
    ("authorization.k8s.io", "v1"): {"selfsubjectaccessreviews": "SelfSubjectAccessReview"},
    ("jobset.x-k8s.io", "v1alpha2"): {"jobsets": "JobSet"},
    ("trainer.kubeflow.org", "v1alpha1"): {
        "trainjobs": "TrainJob",
        "trainingruntimes": "TrainingRuntime",
        "clustertrainingruntimes": "ClusterTrainingRuntime",
    },
    ("kueue.x-k8s.io", "v1beta2"): {"localqueues": "LocalQueue"},
}
_WHOLE_CLUSTER = {
    "namespaces",
    "nodes",
    "priorityclasses",
    "clusterroles",
    "clusterrolebindings",
    "clustertrainingruntimes",
    "selfsubjectaccessreviews",
}
KNOWN = {
    (group, version, plural): Resource(group, version, plural, kind, plural not in _WHOLE_CLUSTER)
    for (group, version), row in _ROWS.items()
    for plural, kind in row.items()
}
# Every kind has a plural of its own here, which the real API does not promise.
BY_PLURAL = {resource.plural: resource for resource in KNOWN.values()}
BY_KIND = {resource.kind: resource for resource in KNOWN.values()}

PODS, SERVICES, EVENTS = BY_PLURAL["pods"], BY_PLURAL["services"], BY_PLURAL["events"]
JOBS, NODES, NAMESPACES = BY_PLURAL["jobs"], BY_PLURAL["nodes"], BY_PLURAL["namespaces"]
SECRETS, CONFIG_MAPS = BY_PLURAL["secrets"], BY_PLURAL["configmaps"]
CLAIMS, JOB_SETS = BY_PLURAL["persistentvolumeclaims"], BY_PLURAL["jobsets"]
TRAIN_JOBS, PRIORITIES = BY_PLURAL["trainjobs"], BY_PLURAL["priorityclasses"]
