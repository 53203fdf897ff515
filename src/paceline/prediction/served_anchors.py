"""Measured serving as anchors: stored runs of `paceline run inference`, and rows of published inference tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.models.shape import Shape
from paceline.prediction import hardware
from paceline.prediction.runs import gpu_of
from paceline.prediction.serving import WEIGHT_BYTES, Served
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import RequestSample, StageSample

# Names of published tables as shapes of Paceline.
MODELS = {
    "Llama-3.1-8B": "llama-8b",
    "Llama-3.3-70B": "llama-70b",
    "Llama-3.1-405B": "llama-70b:layers=126,hidden=16384,heads=128,kv_heads=8,head_dim=128,ffn=53248",
    "Llama 2": "llama-7b",
    "Qwen-7B-Chat": "llama-7b",
}
COLUMNS = ("model", "gpu", "n_gpus", "precision", "output_tokens_per_s")
# Prompt and answer of rows that do not state them: single streams, where they hardly matter.
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 256
NS = 1e9


@dataclass(frozen=True, kw_only=True)
class ServedAnchor:
    """A served setup with its measured output tokens/s over all replicas."""

    name: str
    served: Served
    tokens_per_s: float


def is_table(path: Path) -> bool:
    """Whether a CSV has the columns of a table of served models."""
    with path.open(encoding="utf-8", newline="") as file:
        return set(COLUMNS) <= set(next(csv.reader(file), []))


def read_table(path: Path) -> list[ServedAnchor]:
    """The rows of a CSV like `benchmarks/data/inference.csv` whose model, GPU and precision are known."""
    found: list[ServedAnchor] = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                found += _of_row(row, f"{path.name}, line {number}: {row['model']}")
            except (ValueError, RequestError):
                continue
    return found


def _of_row(row: dict[str, str], name: str) -> Iterator[ServedAnchor]:
    precision = row["precision"].casefold()
    # Llama 2 has three sizes under one name, of which the table of shapes has one.
    if precision not in WEIGHT_BYTES or (row["model"] == "Llama 2" and row.get("params_b") != "7.0"):
        return
    batch = row.get("batch") or ""
    gpus = int(row["n_gpus"])
    tp = int(row.get("tp") or gpus)
    served = Served(
        shape=arithmetic.load(Choice.parse(MODELS.get(row["model"], row["model"]))),
        gpu=hardware.accelerator(row["gpu"]),
        tp=tp,
        replicas=max(gpus // tp, 1),
        precision=precision,
        input_tokens=int(row.get("input_len") or _PROMPT_TOKENS),
        output_tokens=int(row.get("output_len") or _ANSWER_TOKENS),
        batch=int(batch) if batch.isdigit() else None,
    )
    if served.most_sequences() > 0:
        yield ServedAnchor(name=name, served=served, tokens_per_s=float(row["output_tokens_per_s"]))


def of_records(records: Iterable[RunRecord]) -> list[ServedAnchor]:
    """Loads that kept their replicas busy (a fixed concurrency, or everything at once), of runs on known GPUs.

    One anchor for each load of a cell: the mean of its launches.
    """
    loads: dict[tuple[str, int], list[ServedAnchor]] = {}
    for record in records:
        for stage, anchor in _of_record(record) if record.status is Status.OK else ():
            loads.setdefault((record.spec.cell, stage), []).append(anchor)
    return [replace(group[0], tokens_per_s=fmean(one.tokens_per_s for one in group)) for group in loads.values()]


def _of_record(record: RunRecord) -> Iterator[tuple[int, ServedAnchor]]:
    gpu = gpu_of(record)
    if gpu is None or not record.stages or not record.replicas or record.spec.model is None:
        return
    try:
        shape = record.shape or arithmetic.load(record.spec.model)
    except RequestError:
        return
    for stage in record.stages:
        requests = [one for one in record.requests if one.stage == stage.stage and one.error is None]
        if stage.rate_per_s is None and stage.concurrency is not None and requests:
            for anchor in _of_load(record, stage, requests, shape, gpu):
                yield stage.stage, anchor


def _of_load(
    record: RunRecord, stage: StageSample, requests: Sequence[RequestSample], shape: Shape, gpu: hardware.Accelerator
) -> Iterator[ServedAnchor]:
    used = [one for one in record.replicas if stage.replica in (None, one.replica)]
    first = used[0]
    precision = str(first.settings.get("dtype", "bf16"))
    ended = max((one.ended_ns for one in requests if one.ended_ns is not None), default=stage.started_ns)
    tokens = [one.tokens if one.tokens is not None else one.pieces for one in requests]
    prompts = [one.prompt_tokens for one in requests if one.prompt_tokens]
    seconds = (ended - stage.started_ns) / NS
    if precision not in WEIGHT_BYTES or not prompts or sum(tokens) < len(tokens) or seconds <= 0:
        return
    limit = first.settings.get("max_batch")
    at_once = -(-min(stage.concurrency or len(requests), len(requests)) // len(used))
    served = Served(
        shape=shape,
        gpu=gpu,
        tp=first.tensor_parallel,
        replicas=len(used),
        precision=precision,
        input_tokens=max(round(sum(prompts) / len(prompts)), 1),
        output_tokens=max(round(sum(tokens) / len(tokens)), 1),
        batch=min(at_once, limit) if isinstance(limit, int) else at_once,
    )
    if served.most_sequences() > 0:
        name = f"{record.spec.run_id}, {served.batch} at once"
        yield ServedAnchor(name=name, served=served, tokens_per_s=sum(tokens) / seconds)
