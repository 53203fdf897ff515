"""What looks like a secret is refused by every launcher by one rule, wherever in its options it stands."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.launchers import ray
from paceline.launchers.kubernetes import options as _kube_options
from paceline.launchers.slurm import script as _slurm_options
from paceline.launchers.ssh import hosts

HIDDEN = "hf_abcdefghijklmnopqrstuvwxyz012345"
LAUNCHERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "slurm": (_slurm_options.Options, {}),
    "ssh": (hosts.Options, {"hosts": ["n1"]}),
    "ray": (ray.Options, {}),
    "kubernetes": (_kube_options.Options, {}),
}


def chosen(name: str, **more: Any) -> Any:
    kind, needed = LAUNCHERS[name]
    return parse_options(kind, Choice(name, {**needed, **more}))


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    "env",
    [{"HF_TOKEN": "abc"}, {"OTHER": HIDDEN}, {"AUTH": "Bearer abcdefgh1234"}, {"X": "-----BEGIN PRIVATE KEY-----"}],
)
def test_variables_are_refused_by_all_and_not_repeated(name: str, env: dict[str, str]) -> None:
    with pytest.raises(RequestError) as refusal:
        chosen(name, env=env)
    assert not any(value in str(refusal.value) for value in env.values())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_switch_or_a_number_is_taken_by_all(name: str) -> None:
    assert chosen(name, env={"TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "0"}).env


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("slurm", {"setup": [f"export HF_TOKEN={HIDDEN}"]}),
        ("slurm", {"setup": ["export WANDB_API_KEY=abcdef123"]}),
        ("slurm", {"srun_arguments": [f"--export=ALL,X={HIDDEN}"]}),
        ("slurm", {"comment": HIDDEN}),
        ("ssh", {"scratch": f"/tmp/{HIDDEN}"}),
        ("kubernetes", {"pod_patch": {"spec": {"containers": [{"name": "node", "args": [f"--token={HIDDEN}"]}]}}}),
        ("kubernetes", {"pod_patch": {"metadata": {"annotations": {"note": HIDDEN}}}}),
    ],
)
def test_no_text_of_an_option_holds_one(name: str, more: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as refusal:
        chosen(name, **more)
    assert str(refusal.value) == golden
    assert HIDDEN not in str(refusal.value)


def test_the_name_of_a_secret_is_none() -> None:
    assert chosen("kubernetes", secret_env={"HF_TOKEN": {"secret": "huggingface", "key": "access_token"}})
    assert chosen("kubernetes", image=f"registry.example/paceline@sha256:{'0a' * 32}")
    assert chosen("ssh", key="~/.ssh/id_ed25519", forward=["HF_TOKEN"])
