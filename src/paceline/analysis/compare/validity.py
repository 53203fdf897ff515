"""Whether a run may be believed: by its certificate, or, of workloads without one, by what it shows itself."""

from __future__ import annotations

from paceline.analysis.findings import Certificate
from paceline.analysis.served import measurements
from paceline.experiment.spec import ACCEPTING
from paceline.results.records import RunRecord, Status


def status_of(record: RunRecord, certificate: Certificate | None) -> tuple[Status, str | None]:
    """The certificate of today decides between ok and invalid: its reference may have come after the run was sealed."""
    if record.status not in (Status.OK, Status.INVALID) or record.is_reference:
        return record.status, record.error
    if not record.spec.is_certified:
        wrong = problems(record)
        return (Status.INVALID, "; ".join(wrong)) if wrong else (record.status, record.error)
    if certificate is None or not certificate.valid:
        reasons = "; ".join(certificate.reasons) if certificate else "the run carries no certificate"
        return Status.INVALID, record.error or reasons
    return Status.OK, None


def problems(record: RunRecord) -> list[str]:
    """Why an uncertified run must not be believed: data that arrived wrong, or nothing; none for one that can be.

    A test of nodes that finds a wrong result has done what it is for."""
    if record.spec.workload.name in ACCEPTING and record.kernels:
        return []
    if record.spec.serving:
        return measurements.problems(record)
    wrong = [s for s in record.collectives if s.wrong]
    found = [
        f"{s.operation} of {s.size_bytes} bytes in {s.dtype}: {s.wrong} wrong elements on rank {s.rank}"
        for s in wrong[:3]
    ]
    found += [f"and {len(wrong) - 3} more rows"] if len(wrong) > 3 else []
    found += _kernel_problems(record)
    if not (record.collectives or record.kernels or record.memory):
        found.append("nothing was recorded")
    return found


def _kernel_problems(record: RunRecord) -> list[str]:
    """A kernel whose result is wrong, or that broke down, says nothing about what the device can do."""
    bad = [s for s in record.kernels if s.wrong or s.status == "failed"]
    found = [
        f"{' '.join(filter(None, (s.kernel, s.dtype, s.variant)))} ({s.label}) on rank {s.rank}: "
        + (f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}")
        for s in bad[:3]
    ]
    return [*found, f"and {len(bad) - 3} more rows"] if len(bad) > 3 else found
