"""Every option of a launcher or an engine changes the run id, or its module declares what it decides instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.spec import WAITING, RunSpec

DOCS = Path(__file__).parents[3] / "docs"
# What may change a measured number. A new option of a launcher fails a test until it is here or in the table.
MEASURED = {
    "kubernetes": """kind namespace context image image_pull_policy python gpus gpu_resource cpu_request cpu_limit
        memory_request memory_limit shm threads node_selector tolerations affinity spread host_network queue labels env
        secret_env nccl results_claim pod_patch user group""",
    "slurm": """partition qos constraint nodelist exclude reservation gpus gres exclusive mem cpus_per_task shared
        output scratch python container_image container_mounts env setup srun_arguments threads""",
    "ssh": "hosts jump ssh_config python shared scratch env forward threads",
    "ray": "address placement gpus cpus threads resources env scratch",
    "local": "threads warm shared_gpu network_mbit",
    "here": "threads",
}
LAUNCHERS = sorted(MEASURED)
# Of engines only times to wait make no other run.
REPLICA = "max_batch max_length batching tensor_parallel nodes prefill_tokens prefill_chunk"
MEASURED_OF_ENGINES = {
    "deepspeed": REPLICA,
    "openai": "url urls model key_env certificates",
    "transformers": f"{REPLICA} compile graph",
    "vllm": """executable tensor_parallel nodes max_model_len max_num_seqs gpu_memory_utilization kv_cache_bytes
        prefix_caching eager ignore_eos arguments""",
}
ENGINES = sorted(MEASURED_OF_ENGINES)
UNMEASURED = {name: (plugins.declared("launchers", name) or {})["UNMEASURED"] for name in plugins.names("launchers")}


def options_of(launcher: str) -> set[str]:
    return {field.name for field in fields(plugins.load("launchers", launcher).Options)}


def pairs(wanted: Callable[[str], set[str]]) -> Iterator[tuple[str, str]]:
    return ((launcher, option) for launcher in LAUNCHERS for option in sorted(wanted(launcher)))


def without_effect(launcher: str) -> set[str]:
    return (options_of(launcher) & set(WAITING)) | set(UNMEASURED[launcher])


def test_every_launcher_has_a_table() -> None:
    assert set(UNMEASURED) == set(MEASURED) == set(plugins.names("launchers"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_option_is_decided_on_once(launcher: str) -> None:
    kept = set(MEASURED[launcher].split())
    assert kept | without_effect(launcher) == options_of(launcher)
    assert not kept & without_effect(launcher)
    assert all(UNMEASURED[launcher].values()), "each says what it decides"


def test_every_engine_is_decided_on() -> None:
    assert set(ENGINES) == set(plugins.names("engines"))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_of_an_engine_is_decided_on_once(engine: str) -> None:
    kept = set(MEASURED_OF_ENGINES[engine].split())
    known = {field.name for field in fields(plugins.load("engines", engine).Options)}
    assert kept | (known & set(WAITING)) == known
    assert not kept & set(WAITING)


def served(spec: RunSpec, engine: str, **options: object) -> tuple[str, str]:
    found = replace(spec, engine=Choice(engine, options))
    return found.run_id, found.cell


@pytest.mark.parametrize(
    ("engine", "option"), [(name, option) for name in ENGINES for option in MEASURED_OF_ENGINES[name].split()]
)
def test_an_option_of_an_engine_makes_another_run(make_spec: Callable[..., RunSpec], engine: str, option: str) -> None:
    run, cell = served(make_spec(), engine, **{option: "one"})
    other_run, other_cell = served(make_spec(), engine, **{option: 2})
    assert run != other_run
    assert cell != other_cell
    assert served(make_spec(), engine, **{option: 2, "ready_s": 1}) == (other_run, other_cell)


def launched(spec: RunSpec, launcher: str, **options: object) -> tuple[str, str]:
    found = replace(spec, launcher=Choice(launcher, options))
    return found.run_id, found.cell


@pytest.mark.parametrize(("launcher", "option"), list(pairs(without_effect)))
def test_an_option_without_effect_makes_no_other_run(
    make_spec: Callable[..., RunSpec], launcher: str, option: str
) -> None:
    spec = make_spec()
    assert (
        launched(spec, launcher, **{option: "one"})
        == launched(spec, launcher, **{option: 2})
        == launched(spec, launcher)
    )


@pytest.mark.parametrize(("launcher", "option"), list(pairs(lambda name: set(MEASURED[name].split()))))
def test_an_option_that_may_change_a_number_makes_another(
    make_spec: Callable[..., RunSpec], launcher: str, option: str
) -> None:
    run, cell = launched(make_spec(), launcher, **{option: "one"})
    other_run, other_cell = launched(make_spec(), launcher, **{option: 2})
    assert run != other_run
    assert cell != other_cell


def test_the_options_of_one_launcher_say_nothing_of_another(make_spec: Callable[..., RunSpec]) -> None:
    """Another launcher may use these names for anything; only waiting times are the same for all."""
    given = {"account": "a", "port": 1, "qos": "q", "patience_s": 3}

    def kept(launcher: str) -> object:
        return replace(make_spec(), launcher=Choice(launcher, given), declared={}).configuration()["launcher"][
            "options"
        ]

    assert kept("my_package.engine") == {"account": "a", "port": 1, "qos": "q"}
    assert kept("ray") == {"account": "a", "qos": "q"}
    assert kept("slurm") == {"qos": "q"}


def test_the_page_names_the_same_options() -> None:
    text = (DOCS / "experiments.md").read_text().partition("### Options that do not change the run")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text.partition("### Models")[0], re.MULTILINE)
    assert {name: re.findall(r"`(\w+)`", cell) for name, cell in rows} == {k: list(v) for k, v in UNMEASURED.items()}
    assert all(f"`{name}`" in text for name in WAITING)
