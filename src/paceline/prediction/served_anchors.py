"""Measured serving as anchors: stored runs of `paceline run inference`, and rows of published inference tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from paceline.errors import RequestError, require
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
# A server of the client's own machine, whose GPUs the run describes.
LOCAL = ("localhost", "127.0.0.1", "::1")
NS = 1e9


@dataclass(frozen=True, kw_only=True)
class ServedAnchor:
    """A served setup with its measured output tokens/s over all replicas."""

    name: str
    served: Served
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What serves behind a URL, which no client can see. shape: the model, where the experiment names another one."""

    gpu: hardware.Accelerator
    tp: int = 1
    precision: str = "bf16"
    shape: Shape | None = None


def parse_endpoint(text: str) -> Endpoint:
    """The endpoint of `--endpoint`.

    >>> one = parse_endpoint("gpu=h200,tp=2,precision=fp8")
    >>> (one.gpu.name, one.tp, one.precision)
    ('h200', 2, 'fp8')
    """
    words = dict(word.strip().partition("=")[::2] for word in text.split(","))
    known = {"gpu", "tp", "precision", "model"}
    tp, precision = words.get("tp", "1"), words.get("precision", "bf16")
    valid = words.keys() <= known and "gpu" in words and tp.isdigit() and int(tp) > 0 and precision in WEIGHT_BYTES
    require(
        valid, "--endpoint", text, f"gpu=NAME with tp=N, precision={'|'.join(WEIGHT_BYTES)} and model=NAME as needed"
    )
    shape = arithmetic.load(Choice.parse(words["model"])) if "model" in words else None
    gpu = hardware.accelerator(words["gpu"], "--endpoint")
    return Endpoint(gpu=gpu, tp=int(tp), precision=precision, shape=shape)


def is_behind_url(record: RunRecord) -> bool:
    """Whether servers that others started were measured, on machines of which the run has no description."""
    return any(one.devices is None and one.host not in LOCAL for one in record.replicas)


def is_table(path: Path) -> bool:
    """Whether a CSV has the columns of a table of served models."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return set(COLUMNS) <= set(next(csv.reader(file), []))


def read_table(path: Path) -> list[ServedAnchor]:
    """The rows of a CSV like `benchmarks/data/inference.csv` whose model, GPU and precision are known."""
    found: list[ServedAnchor] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
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


def of_records(records: Iterable[RunRecord], endpoint: Endpoint | None = None) -> list[ServedAnchor]:
    """Loads that kept their replicas busy (a fixed concurrency, or everything at once), of runs on known GPUs.

    One anchor for each load of a cell: the mean of its launches. endpoint: what served the runs against a URL; without
    it they are left out.
    """
    loads: dict[tuple[str, int], list[ServedAnchor]] = {}
    for record in records:
        for stage, anchor in _of_record(record, endpoint) if record.status is Status.OK else ():
            loads.setdefault((record.spec.cell, stage), []).append(anchor)
    return [replace(group[0], tokens_per_s=fmean(one.tokens_per_s for one in group)) for group in loads.values()]


def _of_record(record: RunRecord, endpoint: Endpoint | None) -> Iterator[tuple[int, ServedAnchor]]:
    server = endpoint if is_behind_url(record) else _described(record)
    if server is None or not record.stages or not record.replicas:
        return
    try:
        shape = server.shape or record.shape or arithmetic.load(record.spec.model)
    except RequestError:
        return
    for stage in record.stages:
        requests = [one for one in record.requests if one.stage == stage.stage and one.error is None]
        if stage.rate_per_s is None and stage.concurrency is not None and requests:
            for anchor in _of_load(record, stage, requests, shape, server):
                yield stage.stage, anchor


def _described(record: RunRecord) -> Endpoint | None:
    """The server that the run itself started or found on its machine; None without a known GPU or replica."""
    gpu, first = gpu_of(record), next(iter(record.replicas), None)
    if gpu is None or first is None:
        return None
    return Endpoint(gpu=gpu, tp=first.tensor_parallel, precision=str(first.settings.get("dtype", "bf16")))


def _of_load(
    record: RunRecord, stage: StageSample, requests: Sequence[RequestSample], shape: Shape, server: Endpoint
) -> Iterator[ServedAnchor]:
    used = [one for one in record.replicas if stage.replica in (None, one.replica)]
    ended = max((one.ended_ns for one in requests if one.ended_ns is not None), default=stage.started_ns)
    tokens = [one.tokens if one.tokens is not None else one.pieces for one in requests]
    prompts = [one.prompt_tokens for one in requests if one.prompt_tokens]
    seconds = (ended - stage.started_ns) / NS
    if server.precision not in WEIGHT_BYTES or not prompts or sum(tokens) < len(tokens) or seconds <= 0:
        return
    limit = used[0].settings.get("max_batch")
    at_once = -(-min(stage.concurrency or len(requests), len(requests)) // len(used))
    served = Served(
        shape=shape,
        gpu=server.gpu,
        tp=server.tp,
        replicas=len(used),
        precision=server.precision,
        input_tokens=max(round(sum(prompts) / len(prompts)), 1),
        output_tokens=max(round(sum(tokens) / len(tokens)), 1),
        batch=min(at_once, limit) if isinstance(limit, int) else at_once,
    )
    if served.most_sequences() > 0:
        where = f" ({used[0].model} behind a URL, taken as {shape.name})" if is_behind_url(record) else ""
        name = f"{record.spec.run_id}{where}, {served.batch} at once"
        yield ServedAnchor(name=name, served=served, tokens_per_s=sum(tokens) / seconds)
