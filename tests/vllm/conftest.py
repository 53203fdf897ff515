"""Tests of the real vLLM: `make vllm-test` installs it in an environment of its own and runs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from testbed import tiny_llama

PROGRAM = "PACELINE_TEST_VLLM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.vllm)
            if not os.environ.get(PROGRAM):
                item.add_marker(pytest.mark.skip(reason=f"{PROGRAM} names no vllm: make vllm-test"))


@pytest.fixture(scope="session")
def program() -> str:
    return str(Path(os.environ[PROGRAM]).absolute())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("model") / "tiny")
