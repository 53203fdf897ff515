"""The winning configuration as files that other tools accept, with the runs that it rests on.

JSON has no comments, so README.md beside it cites the runs; the other formats cite them in comments.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from paceline.analysis.findings import Report
from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice
from paceline.experiment.script import Script
from paceline.experiment.spec import OPTIMIZERS, PRECISIONS
from paceline.report.answer import answer, headline
from paceline.report.text.cells import ranked_cells

Files = dict[str, str]
_ACCELERATE = {"single": (), "ddp": (), "fsdp2": ("reshard_after_forward",), "zero": ("stage",)}
# Strategies that the files of a tool can say, each with the options that they can say.
SAYS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "accelerate": _ACCELERATE,
    "deepspeed": {"zero": ("stage",)},
    "huggingface": _ACCELERATE,
    "torchtitan": {"ddp": (), "fsdp2": ()},
}
# AdamW of Paceline's own loops, as in torch, DeepSpeed and transformers. torchtitan has another default.
BETAS = (0.9, 0.999)
# A placeholder for the directory of a shell script. Words that contain it are quoted.
_HERE = "\0here"


@dataclass(frozen=True, slots=True)
class Winner:
    """The chosen cell: its fields as an experiment has them, what was chosen and why, and the runs behind it."""

    fields: Mapping[str, Any]
    sentence: str
    runs: tuple[str, ...]

    @property
    def strategy(self) -> Choice:
        return Choice.parse(str(self.fields.get("strategy", "ddp")))

    @property
    def citation(self) -> list[str]:
        """One line each, whatever names contain: they become comments of files that other tools read."""
        lines = (self.sentence, f"Measured by Paceline in {', '.join(self.runs)}.")
        return [" ".join(line.split()) for line in lines]


def winner_of(report: Report) -> Winner:
    """The cell that the headline recommends, or the only one; RequestError if there is no winner."""
    found, cells = headline(report), ranked_cells(report)
    chosen, sentence = next(iter(cells)) if len(cells) == 1 else None, answer(report)[0]
    if chosen is not None:
        sentence = "It is the only configuration of these results, so it was compared with no other."
    if found is not None and len(found.choose) == 1:
        named = {name: cell for c in found.because for name, cell in ((c.label, c.cell), (c.other_label, c.other))}
        chosen = named.get(found.choose[0])
    if chosen is None:
        raise RequestError(f"recipe: got results without a winner, expected one. {sentence}")
    recipe = next(recipe for recipe in report.recipes if recipe.cell == chosen)
    runs = tuple(run.run for run in report.runs if run.cell == chosen and run.status == "ok")
    return Winner(yaml.safe_load(recipe.experiment)["base"], sentence, runs)


def files_for(tool: str, winner: Winner) -> Files:
    """The files for one tool, by name; RequestError if the tool has no such setting."""
    made = TOOLS[tool](winner)
    about = ["# A measured configuration", "", *winner.citation, "", "Files: " + ", ".join(made) + ".", ""]
    return {**made, "README.md": "\n".join(about)}


def _comment(winner: Winner) -> str:
    return "".join(f"# {line}\n" for line in winner.citation)


def _stage(winner: Winner) -> int | None:
    """The ZeRO stage; None for other strategies."""
    strategy = winner.strategy
    return int(strategy.options.get("stage", 1)) if strategy.name == "zero" else None


def _reshards(winner: Winner) -> bool:
    return bool(winner.strategy.options.get("reshard_after_forward", True))


def _require_own(tool: str, winner: Winner) -> None:
    if "command" in winner.fields:
        raise RequestError(
            f"recipe: got a script for --for {tool}, expected a strategy of Paceline: the settings of a script are its "
            "own. Use --for torchrun, which writes its command and config files."
        )
    fields, strategy = winner.fields, winner.strategy
    precision = fields["precision"]
    known = [name for name, base in PRECISIONS.items() if name == base and (tool, name) != ("torchtitan", "fp16")]
    known_options = SAYS[tool].get(strategy.name, ())
    optimizers = OPTIMIZERS if tool == "huggingface" else ("adamw",)
    for what, name, accepted in (
        ("precision", precision, known),
        ("strategy", strategy.name, SAYS[tool]),
        *(("option of the strategy", option, known_options) for option in strategy.options),
        ("optimizer", fields.get("optimizer", "adamw"), optimizers),
    ):
        names = f"{', '.join(accepted) or 'none'}, which {tool} configures in the same way. Use --for torchrun"
        require(name in accepted, f"recipe --for {tool}: {what}", name, names)
    if strategy.name == "fsdp2" and fields["device"] == "cpu" and tool in ("accelerate", "huggingface"):
        raise RequestError(
            f"recipe: got fsdp2 on CPUs for --for {tool}, where Accelerate trains under DDP without a message. Use "
            "--for torchrun."
        )


def torchrun(winner: Winner) -> Files:
    """A shell script that starts the command; for a script of the user with its config files."""
    fields = winner.fields
    start = _torchrun(fields)
    if "command" in fields:
        script = Script.from_dict({name: fields[name] for name in ("command", "parameters", "files") if name in fields})
        run = {name: fields.get(name) for name in ("device", "nodes", "processes", "seed", "steps")}
        words, files = script.rendered({**run, "repeat": 0}, _HERE)
        argv = list(words) if script.starts_ranks else [*start, *words]
        # The script is found from the current directory, its config files beside this file.
        found = ['here=$(cd "$(dirname "$0")" && pwd)'] if files else []
        command = shlex.join(argv).replace(_HERE, "'\"$here\"'")
        start_here = "# Start it in the directory in which the command was measured: sh PATH/run.sh"
        lines = ["#!/bin/sh", *_comment(winner).splitlines(), start_here, "set -e", *found, f"exec {command}"]
        return {**files, "run.sh": "\n".join(lines) + "\n"}
    # The training loop was Paceline's own; the user's script takes its place.
    usage = 'if [ $# -eq 0 ]; then echo "usage: sh run.sh train.py [ARGUMENTS]" >&2; exit 2; fi\n'
    return {"run.sh": f'#!/bin/sh\n{_comment(winner)}{usage}exec {shlex.join(start)} "$@"\n'}


def deepspeed(winner: Winner) -> Files:
    """A DeepSpeed configuration."""
    _require_own("deepspeed", winner)
    fields, precision, stage = winner.fields, winner.fields["precision"], _stage(winner)
    document = {
        "train_micro_batch_size_per_gpu": fields["micro_batch"],
        "gradient_accumulation_steps": fields["accumulation"],
        "gradient_clipping": fields["clip_norm"],
        # As measured: DeepSpeed overlaps at stage 3 only, and would replace torch's linear layer there.
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            **({"memory_efficient_linear": False} if stage == 3 else {}),
        },
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": fields["learning_rate"],
                "weight_decay": fields["weight_decay"],
                # That of torch, which was measured; DeepSpeed would compile its own for minutes.
                "torch_adam": True,
                "fused": True,
            },
        },
        # DeepSpeed counts torch's optimizer among those that it has not tried with ZeRO.
        "zero_allow_untested_optimizer": True,
    }
    return {"ds_config.json": json.dumps(document, indent=2) + "\n"}


def accelerate(winner: Winner) -> Files:
    """A configuration for `accelerate launch --config_file`."""
    _require_own("accelerate", winner)
    fields, stage, name = winner.fields, _stage(winner), winner.strategy.name
    cuda, ranks = fields["device"] == "cuda", fields["processes"] * fields["nodes"]
    # accelerate starts ranks on CPUs by MPI only, unless it takes them for those of GPUs.
    kind = "NO" if ranks == 1 else "MULTI_GPU"
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if stage is not None else "FSDP" if name == "fsdp2" else kind,
        "num_machines": fields["nodes"],
        "num_processes": ranks,
        "machine_rank": 0,
        "mixed_precision": {"fp32": "no"}.get(fields["precision"], fields["precision"]),
        "use_cpu": not cuda,
    }
    if stage is not None:
        document["deepspeed_config"] = {
            "zero_stage": stage,
            "gradient_accumulation_steps": fields["accumulation"],
            "gradient_clipping": fields["clip_norm"],
        }
    elif document["distributed_type"] == "FSDP":
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": _reshards(winner),
            "fsdp_activation_checkpointing": fields["checkpointing"] == "full",
        }
    if fields["compile"]:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    start = "# Start it with ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate.yaml ...\n"
    if stage is not None:
        start += (
            "# On CPUs accelerate ignores DeepSpeed and trains under DDP. Use --for deepspeed or huggingface there.\n"
        )
    return {"accelerate.yaml": _comment(winner) + ("" if cuda else start) + yaml.safe_dump(document, sort_keys=False)}


def huggingface(winner: Winner) -> Files:
    """Arguments of a Trainer: `HfArgumentParser(TrainingArguments).parse_json_file`, with a DeepSpeed file if used."""
    _require_own("huggingface", winner)
    fields, stage, shards = winner.fields, _stage(winner), winner.strategy.name == "fsdp2"
    optimizer = fields.get("optimizer", "adamw")
    document = {
        "output_dir": "out",
        "per_device_train_batch_size": fields["micro_batch"],
        "gradient_accumulation_steps": fields["accumulation"],
        "learning_rate": fields["learning_rate"],
        "weight_decay": fields["weight_decay"],
        "max_grad_norm": fields["clip_norm"],
        "bf16": fields["precision"] == "bf16",
        "fp16": fields["precision"] == "fp16",
        "gradient_checkpointing": fields["checkpointing"] != "none",
        "torch_compile": bool(fields["compile"]),
        "seed": fields["seed"],
        **({"deepspeed": "ds_config.json"} if stage is not None else {}),
        **({"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": _reshards(winner)}} if shards else {}),
        **({"ddp_find_unused_parameters": False} if winner.strategy.name == "ddp" else {}),
        **({"optim": optimizer} if optimizer != "adamw" else {}),
        **({"use_cpu": True} if fields["device"] == "cpu" else {}),
    }
    files = {"training_arguments.json": json.dumps(document, indent=2) + "\n"}
    return {**files, **(deepspeed(winner) if stage is not None else {})}


def torchtitan(winner: Winner) -> Files:
    """A config file for torchtitan 0.2, and for 0.3, which reads none any more, a shell script with its options."""
    _require_own("torchtitan", winner)
    fields, name = winner.fields, winner.strategy.name
    ranks = fields["processes"] * fields["nodes"]
    group = "--optimizer.param-groups.0"
    options = {
        "--training.local-batch-size": fields["micro_batch"],
        "--training.global-batch-size": fields["micro_batch"] * fields["accumulation"] * ranks,
        "--training.seq-len": fields["sequence_length"],
        "--training.max-norm": fields["clip_norm"],
        "--training.steps": fields["steps"],
        "--training.mixed-precision-param": {"fp32": "float32"}.get(fields["precision"], "bfloat16"),
        f"{group}.optimizer-name": "AdamW",
        f"{group}.optimizer-kwargs.lr": fields["learning_rate"],
        f"{group}.optimizer-kwargs.weight-decay": fields["weight_decay"],
        "--parallelism.data-parallel-replicate-degree": ranks if name == "ddp" else 1,
        "--parallelism.data-parallel-shard-degree": 1 if name == "ddp" else ranks,
    }
    words = [str(word) for option in options.items() for word in option]
    words += [f"{group}.optimizer-kwargs.betas", *map(str, BETAS)]
    compiled = "--compile.enable" if fields["compile"] else "--compile.no-enable"
    start = shlex.join([*_torchrun(fields), "-m", "torchtitan.train"])
    lines = [
        "#!/bin/sh",
        *_comment(winner).splitlines(),
        "# Start it with the model: ./run.sh --module llama3 --config llama3_8b",
        f"# Activation checkpointing was: {fields['checkpointing']}. torchtitan takes it from that configuration.",
        "set -e",
        f'exec {start} "$@" {shlex.join([*words, compiled])}',
    ]
    return {"run.sh": "\n".join(lines) + "\n", "torchtitan.toml": _torchtitan_toml(winner, ranks)}


def _torchtitan_toml(winner: Winner, ranks: int) -> str:
    fields, is_ddp = winner.fields, winner.strategy.name == "ddp"
    tables: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": fields["micro_batch"],
            "global_batch_size": fields["micro_batch"] * fields["accumulation"] * ranks,
            "seq_len": fields["sequence_length"],
            "max_norm": fields["clip_norm"],
            "steps": fields["steps"],
            "mixed_precision_param": {"fp32": "float32"}.get(fields["precision"], "bfloat16"),
        },
        "optimizer": {
            "name": "AdamW",
            "lr": fields["learning_rate"],
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "weight_decay": fields["weight_decay"],
        },
        "parallelism": {
            "data_parallel_replicate_degree": ranks if is_ddp else 1,
            "data_parallel_shard_degree": 1 if is_ddp else ranks,
        },
        "activation_checkpoint": {"mode": fields["checkpointing"]},
        "compile": {"enable": bool(fields["compile"])},
    }
    start = shlex.join([*_torchrun(fields), "-m", "torchtitan.train", "--job.config_file", "torchtitan.toml"])
    head = f"{_comment(winner)}# For torchtitan 0.2, with the model: {start} --model.name llama3 --model.flavor 8B\n"
    # A scalar of JSON is one of TOML.
    parts = (
        f"\n[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        for table, values in tables.items()
    )
    return head + "".join(parts)


def _torchrun(fields: Mapping[str, Any]) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(fields["processes"]), "--nnodes", str(fields["nodes"])]


TOOLS: dict[str, Callable[[Winner], Files]] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "huggingface": huggingface,
    "torchrun": torchrun,
    "torchtitan": torchtitan,
}


def tools() -> Sequence[str]:
    return sorted(TOOLS)
