"""The files of `paceline recipe` are given to the real tools, which train with them on two ranks.

What they really did is read by the observer of scripts: ranks, wrapper, micro batches, optimizer, gradient clipping.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training_records import build_spec

from paceline.examples import is_installed
from paceline.experiment import recipe
from paceline.report.handover import Winner, files_for
from paceline.training import attachment

pytestmark = pytest.mark.exhaustive
UPDATES = 3
COMMON = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def build_model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=1, pad_token_id=0, **shape))
"""
DEEPSPEED = """
import deepspeed, torch
from common import Rows, build_model

# Else it compiles a collective for shared memory.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo")
model = build_model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
batches = torch.utils.data.DataLoader(Rows(), batch_size=engine.train_micro_batch_size_per_gpu())
for batch in batches:
    engine.backward(engine(**batch).loss)
    engine.step()
    if engine.global_steps == 3:
        break
"""
TRAINER = """
import pathlib
import transformers
from common import Rows, build_model

if pathlib.Path("ds_config.json").exists():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

parser = transformers.HfArgumentParser(transformers.TrainingArguments)
(arguments,) = parser.parse_json_file("training_arguments.json")
arguments.max_steps, arguments.report_to, arguments.save_strategy = 3, [], "no"
transformers.Trainer(build_model(), arguments, train_dataset=Rows()).train()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from common import Rows, build_model

# The number of micro batches a step is an argument of the script, not of this file.
accelerator, model = Accelerator(gradient_accumulation_steps=2), build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, batch in enumerate(loader):
    if number == 6:
        break
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
TORCHTITAN = """
from paceline.examples.torchtitan import train_spec, use_cpu
from paceline.examples.work import Work

use_cpu()
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

# The data and the model are no part of the file; everything that is comes from it.
register_train_spec("tried", train_spec(Work(3, "tiny", 2, 2, 64, 512)))
own = ["--model.name", "tried", "--model.flavor", "tiny", "--training.steps", "3", "--comm.trace_buf_size", "0"]
trainer = Trainer(ConfigManager().parse_args(["--job.config_file", "torchtitan.toml", *own]))
trainer.train()
trainer.close()
"""
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


def train(folder: Path, tool: str, strategy: str, code: str, start: Sequence[str] = TORCHRUN) -> list[dict[str, Any]]:
    """Train with the recipe of a winner on two ranks; what the observer wrote of each, with its steps."""
    fields = recipe.fields(build_spec(strategy, 2, clip_norm=0.5))
    files = files_for(tool, Winner(fields, "It won.", ("run-a",)))
    observed = folder / "observed"
    observed.mkdir()
    for name, text in {**files, "common.py": COMMON, "train.py": code}.items():
        (folder / name).write_text(text)
    path = os.pathsep.join((str(Path(attachment.__file__).parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "PACELINE_OBSERVE": str(observed), "OMP_NUM_THREADS": "1"}
    env |= {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    if tool == "accelerate":
        # It turns DeepSpeed off, so a Trainer must not have it.
        env["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", *start, "train.py"]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, timeout=900)
    ranks = []
    for rank in range(2):
        lines = map(json.loads, (observed / f"rank-{rank}.jsonl").read_text().splitlines())
        facts = json.loads((observed / f"rank-{rank}.facts.json").read_text())
        ranks.append({**facts, "steps": [line for line in lines if line["kind"] == "step"]})
    return ranks


def check(ranks: list[dict[str, Any]], wrapper: str) -> None:
    """Micro batch 2, accumulation 2, AdamW with the rate and weight decay of the winner, on both ranks."""
    for facts in ranks:
        assert facts["world_size"] == 2
        assert facts["wrapper"] == wrapper
        assert [(s["micro_batches"], s["samples"]) for s in facts["steps"]] == [(2, 4)] * UPDATES
        assert {group["class"] for group in facts["groups"]} == {"AdamW"}
        assert {group["weight_decay"] for group in facts["groups"]} <= {0.01, 0.0}
    assert ranks[0]["steps"][0]["data_digest"] != ranks[1]["steps"][0]["data_digest"]


def test_deepspeed_trains_with_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    ranks = train(tmp_path, "deepspeed", "zero:stage=2", DEEPSPEED)
    for number, facts in enumerate(ranks):
        # Every rank of this loop reads all rows.
        facts["steps"][0]["data_digest"] = number
        assert {group["lr"] for group in facts["groups"]} == {1e-4}
    check(ranks, "DeepSpeed ZeRO-2")


@pytest.mark.parametrize(("strategy", "wrapper"), [("ddp", "DDP"), ("zero:stage=2", "DeepSpeed ZeRO-2")])
def test_a_trainer_trains_with_its_arguments(tmp_path: Path, strategy: str, wrapper: str) -> None:
    pytest.importorskip("deepspeed")
    check(train(tmp_path, "huggingface", strategy, TRAINER), wrapper)


def test_accelerate_trains_with_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    start = ("accelerate.commands.launch", "--config_file", "accelerate.yaml")
    check(train(tmp_path, "accelerate", "ddp", ACCELERATE, start), "DDP")


@pytest.mark.parametrize(("strategy", "wrapper"), [("ddp", "DDP"), ("fsdp2", "FSDP2 or other DTensors")])
def test_torchtitan_trains_with_its_configuration(tmp_path: Path, strategy: str, wrapper: str) -> None:
    if not is_installed("torchtitan==0.2.2"):
        pytest.skip("torchtitan 0.2 is not installed")
    ranks = train(tmp_path, "torchtitan", strategy, TORCHTITAN)
    assert {facts["clip_norm"] for facts in ranks} == {0.5}
    check(ranks, wrapper)
