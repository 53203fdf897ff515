"""The winner as files of other tools: each is read back by that tool."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_records import build_record, build_spec

from paceline.analysis.report import build
from paceline.errors import RequestError
from paceline.experiment import recipe
from paceline.experiment.script import Script
from paceline.report.handover import Winner, files_for, winner_of
from paceline.training.strategies import _optimizers

pytestmark = pytest.mark.slow


def winner(strategy: str = "zero:stage=2", **more: Any) -> Winner:
    fields = recipe.fields(build_spec(strategy, 2, precision="bf16", clip_norm=0.5, **more))
    return Winner(fields, "ZeRO-2 is 1.2 times as fast as DDP.", ("run-a", "run-b"))


def test_every_recipe_cites_its_runs() -> None:
    for tool in ("accelerate", "torchrun", "torchtitan"):
        chosen = winner("fsdp2" if tool == "torchtitan" else "zero:stage=2")
        files = files_for(tool, chosen)
        assert all("run-a, run-b" in text for text in files.values())
    assert "run-a, run-b" in files_for("deepspeed", winner())["README.md"]


def test_deepspeed_reads_its_configuration() -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    document = json.loads(files_for("deepspeed", winner())["ds_config.json"])
    read = config.DeepSpeedConfig(document)
    assert read.zero_optimization_stage == 2
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (2, 2)
    assert read.gradient_clipping == 0.5


def test_accelerate_reads_its_configuration(tmp_path: Path) -> None:
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "accelerate.yaml"
    path.write_text(files_for("accelerate", winner())["accelerate.yaml"])
    read = arguments.load_config_from_file(str(path))
    assert read.num_processes == 2
    assert read.mixed_precision == "bf16"
    assert str(read.distributed_type).endswith("DEEPSPEED")
    assert read.deepspeed_config["zero_stage"] == 2


def test_a_trainer_reads_its_arguments(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "training_arguments.json"
    path.write_text(files_for("huggingface", winner("ddp"))["training_arguments.json"])
    (read,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(str(path))
    assert (read.per_device_train_batch_size, read.gradient_accumulation_steps) == (2, 2)
    assert (read.max_grad_norm, read.bf16) == (0.5, True)


def test_torchtitan_gets_its_options_and_refuses_what_it_lacks() -> None:
    words = shlex.split(files_for("torchtitan", winner("fsdp2"))["run.sh"].splitlines()[-1])
    assert words[:8] == ["exec", "torchrun", "--nproc-per-node", "2", "--nnodes", "1", "-m", "torchtitan.train"]
    assert words[8] == "$@"
    assert words[-4:-1] == ["--optimizer.param-groups.0.optimizer-kwargs.betas", *map(str, _optimizers.BETAS)]
    options = dict(zip(words[9:-4:2], words[10:-4:2], strict=True))
    assert options["--parallelism.data-parallel-shard-degree"] == "2"
    assert options["--training.global-batch-size"] == "8"
    assert options["--training.max-norm"] == "0.5"
    assert words[-1] == "--compile.no-enable"
    document = tomllib.loads(files_for("torchtitan", winner("fsdp2"))["torchtitan.toml"])
    assert document["training"]["global_batch_size"] == 8
    assert document["parallelism"] == {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": 2}
    assert (document["optimizer"]["beta1"], document["optimizer"]["beta2"]) == _optimizers.BETAS
    assert document["activation_checkpoint"]["mode"] == "none"
    assert document["compile"] == {"enable": False}


@pytest.mark.parametrize(
    ("tool", "fields", "what"),
    [
        ("accelerate", {"strategy": "mesh:tp=2"}, "strategy: got mesh, expected single, ddp, fsdp2, zero"),
        ("accelerate", {"strategy": "fsdp2", "device": "cpu"}, "got fsdp2 on CPUs"),
        ("deepspeed", {"strategy": "fsdp2"}, "strategy: got fsdp2, expected zero"),
        ("deepspeed", {"strategy": "zero:stage=3,offload=cpu"}, "option of the strategy: got offload, expected stage"),
        ("deepspeed", {"optimizer": "adamw_8bit"}, "optimizer: got adamw_8bit, expected adamw"),
        ("huggingface", {"strategy": "compressed:method=powersgd"}, "strategy: got compressed"),
        ("torchtitan", {"strategy": "zero:stage=2"}, "strategy: got zero, expected ddp, fsdp2"),
        ("torchtitan", {"strategy": "ddp", "precision": "fp16"}, "precision: got fp16, expected fp32, bf16"),
    ],
)
def test_what_a_tool_cannot_say_is_refused(tool: str, fields: dict[str, Any], what: str) -> None:
    chosen = winner()
    chosen = Winner({**chosen.fields, "device": "cuda", **fields}, chosen.sentence, chosen.runs)
    with pytest.raises(RequestError) as refusal:
        files_for(tool, chosen)
    assert what in str(refusal.value).replace("'", "")


def test_fsdp2_is_written_as_it_was_measured(tmp_path: Path) -> None:
    """Every block is a unit; without a policy the whole model would be one."""
    arguments = pytest.importorskip("accelerate.commands.config.config_args")
    transformers = pytest.importorskip("transformers")
    fields = {**winner("fsdp2:reshard_after_forward=false").fields, "device": "cuda", "compile": True}
    for tool in ("accelerate", "huggingface"):
        for name, text in files_for(tool, Winner(fields, "It won.", ("run-a",))).items():
            (tmp_path / name).write_text(text)
    read = arguments.load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert str(read.distributed_type).endswith("FSDP")
    assert (read.fsdp_config["fsdp_version"], read.fsdp_config["fsdp_reshard_after_forward"]) == (2, False)
    assert read.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert read.dynamo_config["dynamo_backend"] == "INDUCTOR"
    path = str(tmp_path / "training_arguments.json")
    document = {**json.loads(Path(path).read_text()), "bf16": False, "use_cpu": True}
    Path(path).write_text(json.dumps(document))
    (given,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(path)
    plugin = given.fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["reshard_after_forward"]) == (2, False)
    assert "transformer" in str(plugin["auto_wrap_policy"]).lower()


def test_torchrun_starts_the_winning_script(tmp_path: Path, forking_python: None) -> None:
    """The written script is really run: two ranks, each with the winning value of the config file."""
    (tmp_path / "train.py").write_text(
        "import json, os, sys; from pathlib import Path\n"
        "seen = [os.environ['WORLD_SIZE'], json.load(open(sys.argv[2]))['stage']]\n"
        "Path('rank-' + os.environ['RANK']).write_text(json.dumps(seen))\n"
    )
    files = files_for("torchrun", Winner(SCRIPT, "It won.", ("run-a",)))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    # torchrun comes with torch: in CI its directory is not on PATH. This one is forked.
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    subprocess.run(["sh", "run.sh"], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, timeout=300)
    assert [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)] == [["2", 3], ["2", 3]]


def test_accelerate_starts_the_ranks_of_its_configuration(tmp_path: Path, forking_python: None) -> None:
    """Two ranks on CPUs, as the winner had, without MPI."""
    pytest.importorskip("accelerate")
    (tmp_path / "accelerate.yaml").write_text(files_for("accelerate", winner("ddp"))["accelerate.yaml"])
    (tmp_path / "train.py").write_text(
        "import os; from pathlib import Path\n"
        "names = 'WORLD_SIZE', 'ACCELERATE_USE_CPU', 'ACCELERATE_MIXED_PRECISION'\n"
        "Path('rank-' + os.environ['RANK']).write_text(' '.join(os.environ[name] for name in names))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "train.py"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=300)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2 true bf16"] * 2


SCRIPT = yaml.safe_load(
    "{workload: script, device: cpu, nodes: 1, processes: 2, command: [train.py, --config, '{config}'],"
    " parameters: {stage: 3}, files: {config: {name: ds.json, text: '{\"stage\": {stage}}'}}}"
)


def test_a_script_is_written_with_its_config_files(tmp_path: Path) -> None:
    files = files_for("torchrun", Winner(SCRIPT, "It won.", ("run-a",)))
    assert json.loads(files["ds.json"]) == {"stage": 3}
    # Another file of that name is where the script is: the template.
    recipe_dir, own = tmp_path / "a recipe", tmp_path / "own"
    for directory in (recipe_dir, own):
        directory.mkdir()
    for name, text in files.items():
        (recipe_dir / name).write_text(text)
    (own / "torchrun").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (own / "torchrun").chmod(0o755)
    env = {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    command = ["sh", "../a recipe/run.sh"]
    words = subprocess.run(command, cwd=own, env=env, check=True, capture_output=True, text=True).stdout.splitlines()
    assert words == [
        "--nproc-per-node",
        "2",
        "--nnodes",
        "1",
        "train.py",
        "--config",
        f"{recipe_dir.resolve()}/ds.json",
    ]
    with pytest.raises(RequestError, match="expected a strategy of Paceline"):
        files_for("deepspeed", Winner(SCRIPT, "", ()))


def test_results_without_a_winner_are_refused() -> None:
    with pytest.raises(RequestError, match="without a winner"):
        winner_of(build([build_record(build_spec("ddp")), build_record(build_spec("fsdp2"))], title=""))


def test_the_only_configuration_has_won_against_none() -> None:
    spec = replace(build_spec(None, 2, workload="script"), script=Script(command=("train.py",), code="v1"))
    alone = winner_of(build([build_record(spec, 1.0, {"parameters": 10})], title=""))
    assert "compared with no other" in alone.sentence
    assert "No recommendation" not in files_for("torchrun", alone)["README.md"]


def test_names_cannot_add_lines_to_a_file() -> None:
    """A name of a capsule with a line feed stays inside the comment."""
    chosen = Winner(winner("ddp").fields, "a\nexec evil\n is faster.", ("run-a",))
    for tool in ("torchrun", "accelerate", "torchtitan"):
        for text in files_for(tool, chosen).values():
            assert not any(line.startswith("exec evil") for line in text.splitlines())


def test_torchrun_starts_a_script_with_the_ranks_of_our_own_loop(tmp_path: Path) -> None:
    text = files_for("torchrun", Winner(recipe.fields(build_spec("ddp", 2)), "It won.", ("run-a",)))["run.sh"]
    (tmp_path / "run.sh").write_text(text)
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "run.sh", *words], cwd=tmp_path, env=env, capture_output=True, text=True)

    assert start("train.py", "two words").stdout == "--nproc-per-node 2 --nnodes 1 train.py two words\n"
    assert start().returncode == 2
