"""Rows of published or imported training tables, as setups with a measured step time."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.models.adapters import adapter_parameters
from paceline.models.shape import FAMILIES, Shape
from paceline.prediction import hardware, memory
from paceline.prediction.setup import Setup, Software

# What a row must say to be predicted; `tokens_per_s_per_gpu` or `step_time_s` to be compared.
NEEDED = ("hidden", "layers", "heads", "vocab", "seq_len", "gpu", "n_gpus")
BATCH = ("micro_batch", "global_batch")
MEASURED = ("step_time_s", "tokens_per_s_per_gpu")
# The arithmetic of memory may be wrong by less than this factor.
CLEARLY = 1.5
# What software.toml says about rows of a program, not about the program.
_OF_ROWS = ("sources", "shard", "models")
# Where a table names no adapter rank: all linear layers at rank 16.
# Fine-tuning tables pack instructions of about this length; attention does not cross them.
DOCUMENT_LENGTH = 512
ADAPTER_RANK, ADAPTER_TARGETS = 16, "q+k+v+o+up+down"


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement. source: who published it; series: rows that differ in the number of GPUs only."""

    setup: Setup
    step_s: float
    source: str
    row_id: str
    series: str


@functools.cache
def _software() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "software.toml").read_text(encoding="utf-8"))


def software(name: str) -> tuple[Software, str]:
    """The program of this name (or of this published source), and how it shards where nothing is said."""
    table = _software()
    known = name if name in table else next((key for key, row in table.items() if name in row["sources"]), None)
    if known is None:
        raise RequestError(f"--software: got {name!r}, expected one of {', '.join(table)}.")
    row = {key: value for key, value in table[known].items() if key not in _OF_ROWS}
    return Software(name=known, **row), table[known].get("shard", "none")


# Seconds of the host for each tensor in the ZeRO of DeepSpeed 0.19.8, by stage: after the backward pass, and in each
# pass, where stage 3 gathers and releases each weight. From gpt2-124m on one H200 (docs/measured/h200): 148 tensors,
# and the phases of the step against those of DDP.
_ZERO_HOST = {1: (27e-6, 0.0), 2: (0.20e-3, 0.0), 3: (0.125e-3, 0.6e-3)}


def with_deepspeed(program: Software, stage: int) -> Software:
    """Paceline's own program where DeepSpeed trains it."""
    update, each_pass = _ZERO_HOST.get(stage, (0.0, 0.0))
    return dataclasses.replace(program, host_update_s=update, host_pass_s=each_pass)


def sharded(program: Software, shard: str) -> Software:
    """The program as it shards so: ZeRO-1 and ZeRO-2 of Paceline are DeepSpeed's."""
    by_deepspeed = program.name == "paceline" and shard in ("zero1", "zero2")
    return with_deepspeed(program, int(shard[-1])) if by_deepspeed else program


def read(path: Path) -> list[Row]:
    """Every row that can be predicted and has a measurement; the others are left out."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row(values) for values in csv.DictReader(file)]
    return [one for one in rows if one is not None]


def read_given(path: Path, where: str) -> list[Row]:
    """The rows of a user's table; a RequestError that names what is wrong if none can be used. where: the option."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names, lines = reader.fieldnames or (), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{where}: got {path}, expected a CSV file: {error}.") from None
    missing = [name for name in NEEDED if name not in names]
    missing += [" or ".join(either) for either in (BATCH, MEASURED) if not set(either) & set(names)]
    if missing:
        raise RequestError(
            f"{where}: got {path} without {', '.join(missing)}, expected the columns of "
            "benchmarks/data/training_throughput.csv."
        )
    found = []
    for number, values in enumerate(lines, 2):
        one = row(values, f"{where}: {path}, line {number}, gpu")
        if one is not None:
            found.append(dataclasses.replace(one, row_id=one.row_id or f"{path.name}, line {number}"))
    if not found:
        raise RequestError(
            f"{where}: got {path} with no usable row, expected in each {', '.join(NEEDED)}, the degrees, "
            f"{' or '.join(BATCH)}, and a positive {' or '.join(MEASURED)}."
        )
    return found


def row(values: Mapping[str, str], where: str = "gpu") -> Row | None:
    """The row as a setup, or None if it lacks its shape, layout or measurement. where: names the GPU in an error."""
    numbers = (name for name in NEEDED if name != "gpu")
    if (
        not values.get("gpu")
        or not all((_number(values, name) or 0) >= 1 for name in numbers)
        or not _has_layout(values)
    ):
        return None
    setup = _setup(values, where)
    if setup is None:
        return None
    per_gpu, step = _number(values, "tokens_per_s_per_gpu"), _number(values, "step_time_s")
    step = setup.tokens_per_step / setup.gpus / per_gpu if per_gpu else step
    if not step or not 0 < step < math.inf:
        return None
    same = ("model", "seq_len", "gpu", "precision", "micro_batch", "tp", "pp", "cp", "activation_checkpointing", "task")
    series = "|".join(values.get(name) or "" for name in (*same, "notes"))
    source = _source(values)
    return Row(setup, step, source, values.get("row_id") or "", f"{source}|{series}")


def _source(values: Mapping[str, str]) -> str:
    """Who published the row; with the folder where a collection has a program of its own there (dgxc/maxtext)."""
    key = values.get("source_key") or values.get("source") or "imported"
    folder = (values.get("source") or "").partition(":")[2].partition("/")[0]
    collected = any(f"{key}/{folder}" in row["sources"] for row in _software().values())
    return f"{key}/{folder}" if collected else key


def _has_layout(values: Mapping[str, str]) -> bool:
    known = values.get("tp") or values.get("dp") or values.get("micro_batch")
    return bool(known) and bool(values.get("micro_batch") or values.get("global_batch"))


def _number(values: Mapping[str, str], name: str) -> float | None:
    try:
        return float(values.get(name) or "")
    except ValueError:
        return None


def _integer(values: Mapping[str, str], name: str, default: int) -> int:
    return int(_number(values, name) or default)


def _shape(values: Mapping[str, str]) -> Shape:
    gated = (values.get("gated_mlp") or "0") in ("1", "1.0", "True", "true")
    family = "llama" if gated else "gpt"
    heads, hidden = _integer(values, "heads", 1), _integer(values, "hidden", 1)
    head_dim = _integer(values, "head_dim", max(hidden // heads, 1))
    return Shape(
        name=values.get("model") or "imported",
        family=family,
        layers=_integer(values, "layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=_integer(values, "kv_heads", heads),
        head_dim=head_dim + head_dim % 2,
        ffn=_integer(values, "ffn", 4 * hidden),
        vocab=_integer(values, "vocab", 50257),
        context=_integer(values, "seq_len", 2048),
        **{**FAMILIES[family], "positions": "rope" if gated else "learned"},
    )


def _setup(values: Mapping[str, str], where: str) -> Setup | None:
    shape, gpu = _shape(values), hardware.accelerator(values["gpu"], where)
    source = values.get("software") or values.get("framework") or _source(values)
    try:
        program, shard = software(source)
    except RequestError:
        program, shard = software("generic")
    program = _traits(program, values)
    tp, pp = _integer(values, "tp", 1), _integer(values, "pp", 1)
    cp, gpus = _integer(values, "cp", 1), _integer(values, "n_gpus", 1)
    if gpus % (tp * pp * cp):
        return None
    dp = gpus // (tp * pp * cp)
    stages = _stages(values, shape.layers // pp)
    micro, whole = _integer(values, "micro_batch", 0), _number(values, "global_batch")
    micro_batches = _number(values, "grad_accum") or 0.0
    if program.name == "torchtitan" and pp > 1:
        # What torchtitan prints is the batch of a rank; its pipeline cuts it into one micro batch per stage.
        micro_batches = float(min(pp * stages, micro))
        micro = max(micro // int(micro_batches), 1)
    elif not micro:
        micro = max(int((whole or dp) // dp // (micro_batches or 1)), 1)
        micro_batches = micro_batches or 1.0
    elif whole:
        micro_batches = max(whole / (micro * dp), 1.0)
    link, node = hardware.network(values.get("interconnect") or "")
    adapters = (values.get("task") or "").casefold() in ("lora", "qlora")
    packed = (adapters or values.get("task") == "SFT") and program.family != "peft"
    recompute = _checkpointing(values.get("activation_checkpointing") or "")
    found = Setup(
        shape=shape,
        gpu=gpu,
        software=program,
        gpus=gpus,
        sequence_length=_integer(values, "seq_len", 2048),
        micro_batch=micro,
        micro_batches=micro_batches or 1.0,
        tp=tp,
        pp=pp,
        cp=cp,
        stages=stages,
        shard=_shard(values, shard),
        fp8="fp8" in (values.get("precision") or ""),
        fp8_rowwise="rowwise" in (values.get("precision") or ""),
        document_length=DOCUMENT_LENGTH if packed else None,
        quantised=(values.get("task") or "").casefold() == "qlora",
        checkpointing=recompute or "none",
        trained=adapter_parameters(shape, ADAPTER_RANK, ADAPTER_TARGETS) if adapters else None,
        gpus_per_node=_integer(values, "gpus_per_node", gpu.gpus_per_node),
        link_bytes_per_s=link,
        node_bytes_per_s=node,
    )
    return found if recompute else _recomputing(found)


def _traits(program: Software, values: Mapping[str, str]) -> Software:
    """The program with what the row itself says about it."""
    notes, precision = (values.get("notes") or "").casefold(), values.get("precision") or ""
    pieces = {name.strip() for name in (values.get("parallelism") or "").split(";")}
    changes: dict[str, Any] = {}
    if "compile" in notes:
        changes["compiled"] = True
    if "async" in notes and "tp" in notes:
        changes["async_tp"] = True
    if "sp=1" in pieces or "seq-parallel" in (values.get("activation_checkpointing") or ""):
        changes["sequence_parallel"] = True
    if "(TE)" in precision:
        changes["engine"] = True
    if "amp" in precision:
        changes["reduce_bytes"] = 4.0
    if "amp" in precision and program.name == "llm-foundry":
        # Its later rows: gradients copied in 16 bits and reduced in fp32, and torch 2.1 by its sweep.sh.
        changes.update(stops_early=True, weight_bytes=6.0)
    return dataclasses.replace(program, **changes)


def _stages(values: Mapping[str, str], layers: int) -> int:
    """Virtual stages; published tables count either stages or layers per stage, never more than the layers."""
    interleaved = 2 if "interleaved" in (values.get("notes") or "").casefold() else 1
    return max(min(_integer(values, "vp", interleaved), layers), 1)


def _shard(values: Mapping[str, str], default: str) -> str:
    stage, fsdp = _number(values, "zero_stage"), (values.get("fsdp") or "").casefold()
    layout = (values.get("parallelism") or "").casefold()
    if "hsdp" in fsdp or "hsdp" in layout:
        return "hybrid"
    if fsdp in ("1", "1.0") and _integer(values, "cp", 1) == 1:
        return "none"
    if fsdp or "fsdp" in layout:
        return "zero3"
    if stage is not None:
        return "none" if stage == 0 else f"zero{int(stage)}"
    return default


def _checkpointing(text: str) -> str | None:
    """What a row says about recomputation; None if it says nothing."""
    if text.startswith("selective(attn)"):
        return "attention"
    return next((name for name in ("none", "full", "selective") if text.startswith(name)), None)


def _recomputing(one: Setup) -> Setup:
    """Where a row says nothing: as the program's configuration of this model has it, where software.toml knows it.

    Else it recomputes only if it could not have run otherwise, by a wide margin.
    """
    documented = _software()[one.software.name].get("models", {}).get(one.shape.name)
    if documented and not one.has_adapters:
        return one.replaced(checkpointing=documented)
    usable = memory.usable_bytes(one)
    impossible = usable is not None and memory.total(one) > CLEARLY * usable
    return one.replaced(checkpointing=one.software.recomputes) if impossible and not one.has_adapters else one
