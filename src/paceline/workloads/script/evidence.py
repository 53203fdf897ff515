"""The facts of a script's rank as evidence, from which its equality with other runs is graded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from paceline.contract import Seat
from paceline.host.machine import debug_switches, neighbours
from paceline.results.records import Evidence


def evidence_of(facts: Mapping[str, Any], wall_s: float, seat: Seat, trace: str | None = None) -> Evidence:
    """Unknown values are absent, never guessed: an empty init_digest means that the weights could not be read.

    trace: the file in the run directory with the profiler's trace of this rank.
    """
    weights: Mapping[str, str] = facts.get("weights") or {}
    dtypes = dict(facts.get("dtypes") or {})
    sources = facts.get("sources") or {}
    # Autocast around a forward pass that could not be seen could not be seen either.
    plain = "unknown" if facts.get("is_blind") else dtypes.get("parameters", "unknown")
    dtypes["compute"] = facts.get("autocast") or plain
    losses = [name.partition(":")[2] for name in sources if name.startswith("loss:")]
    settings = {
        "wrapper": facts.get("wrapper", "none"),
        "compile": bool(facts.get("compiled")),
        "loss": losses[0] if len(losses) == 1 else "several" if losses else "none",
        "data": next((source for source in ("given", "unseen", "tokens") if sources.get(source)), "samples"),
        "frozen_parameters": facts.get("frozen_parameters", 0),
        "rates": facts.get("rates"),
        "clip_norm": facts.get("clip_norm"),
        "changed": facts.get("changed"),
        **({"sample": facts["sample"]} if facts.get("sample") else {}),
        **({"observer": facts["broken"]} if facts.get("broken") else {}),
        **({"trace": trace} if trace else {}),
    }
    return Evidence(
        init_digest=digest_of(weights),
        init_digests=weights,
        final_digests=facts.get("final_weights"),
        parameters=facts.get("parameters", 0),
        dtypes=dtypes,
        optimizer={"class": facts.get("optimizer", "unknown")},
        groups=facts.get("groups"),
        flags=facts.get("flags"),
        settings=settings,
        switches=debug_switches(os.environ),
        neighbours=neighbours(seat.local_rank) if seat.device == "cuda" else None,
        window_wall_s=wall_s,
        window_began_at_s=facts.get("began_at_s"),
    )


def digest_of(weights: Mapping[str, str]) -> str:
    """One digest of all weights; it depends neither on their names nor on their order."""
    return hashlib.sha256("\n".join(sorted(weights.values())).encode()).hexdigest()[:16] if weights else ""
