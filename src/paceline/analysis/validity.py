"""Runs without a certificate are judged by what they show themselves: data that arrived wrong, or nothing at all."""

from __future__ import annotations

from paceline.records import RunRecord


def problems(record: RunRecord) -> list[str]:
    """Why an uncertified run must not be believed; none for one that can be."""
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
