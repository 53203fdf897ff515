"""The same training in the real frameworks that are installed here: the observer sees the same work in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_records import observe_code, record_of

from paceline.analysis.findings import CERTIFIED
from paceline.analysis.training.certificate import certify_all

FRAMEWORKS = ("plain_loop", "accelerate", "huggingface")
# One interpreter imports the frameworks; each of them trains in a forked child.
TRAIN = """
import importlib, os, sys
import torch._dynamo
from accelerate import Accelerator
from transformers import LlamaForCausalLM, Trainer

from paceline.examples.work import work_of

for rank, name in enumerate(sys.argv[1:]):
    if (child := os.fork()) == 0:
        os.environ["RANK"] = str(rank)
        importlib.import_module(f"paceline.examples.{name}").train(work_of(4))
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.exhaustive
def test_frameworks_that_do_the_same_work_are_certified(tmp_path: Path, nursery: None) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    observe_code(TRAIN, *FRAMEWORKS, folder=tmp_path, HF_HUB_OFFLINE="1")
    records = [record_of(tmp_path, [rank], name, float(rank)) for rank, name in enumerate(FRAMEWORKS)]
    for record in records:
        assert [s.step for s in record.steps] == [0, 1, 2, 3]
        assert {(s.micro_batches, s.samples, s.tokens, s.label_tokens) for s in record.steps} == {(2, 8, 512, 512)}
    found = certify_all(records)
    assert [found[r.spec.run_id].level for r in records] == [CERTIFIED] * 3
    assert not any(found[r.spec.run_id].differs for r in records)
