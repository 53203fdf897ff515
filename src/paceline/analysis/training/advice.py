"""What would have fitted where a run was out of memory: its recorded predictions against the room that it had."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings import Alternative, MemoryAdvice
from paceline.results.memory_components import goal_bytes, room_bytes
from paceline.results.records import AlternativeSample, RunRecord, Status


def analyse(records: Sequence[RunRecord]) -> tuple[MemoryAdvice, ...]:
    """One for each run out of memory that left predictions."""
    return tuple(found for record in records if (found := of(record)) is not None)


def of(record: RunRecord) -> MemoryAdvice | None:
    """None unless the run was out of memory, told its room, and was advised."""
    room = room_bytes(record.components)
    if record.status is not Status.OOM or room is None or not record.alternatives:
        return None
    own = next((s for s in record.alternatives if not s.change), None)
    own_peak = own.bytes if own else None
    goal = goal_bytes(room, own_peak)
    return MemoryAdvice(
        run=record.spec.run_id,
        cell=record.spec.cell,
        axes=record.spec.axes(),
        room_bytes=room,
        own_peak_bytes=own_peak,
        own_note=own.note if own else None,
        goal_bytes=goal,
        alternatives=tuple(_alternative(s, goal) for s in record.alternatives if s.change),
    )


def _alternative(sample: AlternativeSample, goal: int) -> Alternative:
    return Alternative(
        change=sample.change,
        settings=sample.settings,
        keeps_work=sample.keeps_work,
        peak_bytes=sample.bytes,
        fits=None if sample.bytes is None else sample.bytes <= goal,
        origin=sample.origin,
        note=sample.note,
    )
