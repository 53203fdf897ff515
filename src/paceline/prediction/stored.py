"""Predictions as lines of a file, so that they can be compared with what is measured later.

`DIR/predictions.jsonl` has one line per prediction: inputs, result, version of the fit, and when it was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.prediction import memory
from paceline.prediction.predict import Prediction
from paceline.prediction.setup import Setup

FILE = "predictions.jsonl"
# What makes two setups the same work on the same machine.
_KEY = ("gpus", "sequence_length", "micro_batch", "micro_batches", "tp", "pp", "cp", "stages", "shard", "fp8")
_WORDS = ("checkpointing", "trained", "quantised")


def key(one: Setup) -> str:
    """Equal for a prediction and the run that measures it."""
    values = [str(getattr(one, name)) for name in (*_KEY, *_WORDS)]
    values += [f"ep {one.ep}"] if one.ep > 1 else []
    values += ["offload"] if one.offload else []
    values += ["compiled"] if one.software.compiled else []
    # On one GPU nothing is sharded, and only the work of the host tells DeepSpeed's stages apart.
    values += [f"host {one.software.host_update_s}"] if one.gpus == 1 and one.software.host_update_s else []
    shape = dataclasses.asdict(one.shape)
    dims = [str(shape[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")]
    return hashlib.sha256("|".join([one.gpu.gpu, *dims, *values]).encode()).hexdigest()[:16]


def to_dict(one: Prediction, tokens: float | None = None, usd_per_gpu_hour: float | None = None) -> dict[str, Any]:
    """A prediction as JSON: SI units, and the 90 % interval of whatever follows from the step time."""
    s, low, high = one.setup, one.low_s, one.high_s
    needed = memory.components(s)
    found: dict[str, Any] = {
        "key": key(s),
        "model": s.shape.name,
        "gpu": s.gpu.name,
        "gpus": s.gpus,
        "layout": s.layout,
        "software": s.software.name,
        "sequence_length": s.sequence_length,
        "micro_batch": s.micro_batch,
        "global_batch": s.global_batch,
        "precision": "fp8" if s.fp8 else "bf16",
        "checkpointing": s.checkpointing,
        "method": "qlora" if s.quantised else "lora" if s.has_adapters else "full",
        "step_time_s": interval(one.step_s, low, high),
        "tokens_per_s": interval(*(s.tokens_per_step / t for t in (one.step_s, high, low))),
        "tokens_per_s_per_gpu": interval(*(s.tokens_per_step / t / s.gpus for t in (one.step_s, high, low))),
        "mfu_ratio": None
        if one.mfu is None
        else interval(*(one.mfu * one.step_s / t for t in (one.step_s, high, low))),
        "joules_per_token": None
        if one.joules_per_token is None
        else interval(*(one.joules_per_token * t / one.step_s for t in (one.step_s, low, high))),
        "parts_s": dict(one.parts),
        "memory_bytes": {**needed, "total": sum(needed.values()), "usable": memory.usable_bytes(s)},
        "fits": memory.fits(s),
        "anchors": one.anchors,
        "model_version": one.model,
    }
    if tokens is not None:
        seconds = one.seconds_for(tokens)
        scaled = [seconds * t / one.step_s for t in (one.step_s, low, high)]
        found |= {"tokens": tokens, "days": interval(*(t / 86400 for t in scaled))}
        if (joules := one.joules_per_token) is not None:
            found["joules"] = interval(*(joules * tokens * t / one.step_s for t in (one.step_s, low, high)))
        if usd_per_gpu_hour is not None:
            found["usd"] = interval(*(t / 3600 * s.gpus * usd_per_gpu_hour for t in scaled))
    return found


def interval(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def append(out: Path, rows: Iterable[Mapping[str, Any]], made_at: float) -> Path:
    """Add predictions to the file of a results directory."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RequestError(
            f"--out: got {str(out)!r}, which is not a directory; expected a results directory."
        ) from None
    path = out / FILE
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, "made_at": made_at}, sort_keys=True) + "\n")
    return path


def read(directory: Path) -> list[dict[str, Any]]:
    """Every stored prediction of a directory, oldest first; none if there is no file."""
    path = directory / FILE
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not _is_prediction(row):
            raise RequestError(f"{path}, line {number}: got {line[:40]!r}, expected a prediction. Delete the line.")
        found.append(row)
    return found


def _is_prediction(row: Any) -> bool:
    """Whether a line has what reports and scores read."""
    step = row.get("step_time_s") if isinstance(row, dict) else None
    numbers = [step.get(name) for name in ("value", "low", "high")] if isinstance(step, dict) else [None]
    numbers += [row.get("made_at")] if isinstance(row, dict) else []
    valid = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
    return valid and isinstance(row.get("key"), str) and isinstance(row.get("model_version"), str)


def first_by_key(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The oldest prediction of each setup: the one made before looking."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        found.setdefault(str(row["key"]), row)
    return found
