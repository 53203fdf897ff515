"""Real runs that are refused narrowly: more copies of the reference are trained, and decide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.instant import Watcher

from paceline.campaign.run import controller, references, supervision
from paceline.campaign.run.findings import report_of, run_lines
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord, Status

pytestmark = pytest.mark.slow

# In fp32 honest deviations are below 1e-5, so that these decide: one copy deviates by 0.001, all later ones by 0.002.
NORMS = {1: 1.001, **dict.fromkeys(range(2, 7), 1.002)}
# Within the limit of all copies, 0.004, and beyond it; the limit of the first copy is 0.002.
HONEST, WRONG = 1.003, 1.005


def spread(file: Path) -> None:
    """Let the gradient norms of re-seeded copies deviate."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line.get("variant"):
            line["grad_norm"] *= NORMS[line["variant"]]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory,
    make_spec: Callable[..., RunSpec],
    environment: Callable[..., dict[str, str]],
) -> tuple[dict[str, RunRecord], list[Status], list[str], Path]:
    out, messages = tmp_path_factory.mktemp("copies"), list[str]()
    run_attempts = supervision.run_attempts

    def changed(launcher: Any, launch: Any, spec: RunSpec, run_dir: Path, observer: Any) -> Any:
        ended = run_attempts(launcher, launch, spec, run_dir, observer)
        if spec.workload.name == "reference":
            spread(run_dir / "samples-0.jsonl")
        return ended

    specs = [
        make_spec(f"faulty.scaled_gradients:by={by}", 1, launcher="testbed.forked", steps=3) for by in (HONEST, WRONG)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setattr(supervision, "run_attempts", changed)
        patch.setattr(references, "FEW_STEPS", 1)  # so that the reference in fp32 has a copy
        statuses = controller.campaign(specs, out, Watcher(), notify=messages.append)
    records, skipped = store.read_runs(out)
    assert not skipped
    return {str(r.spec.strategy or r.spec.workload): r for r in records}, statuses, messages, out


def test_more_copies_decide_about_an_honest_run_and_a_mistake(done: Any) -> None:
    records, statuses, messages, _ = done
    errors = [record.error for record in records.values()]
    assert statuses == [Status.OK, Status.OK, Status.OK, Status.INVALID], errors
    honest, wrong = (records[f"faulty.scaled_gradients:by={by}"] for by in (HONEST, WRONG))
    assert (honest.status, honest.error) == (Status.OK, None)
    assert "gradient norm: expected within 0.004 of the reference" in wrong.error
    assert "of 6 re-seeded references" in wrong.error
    told = [message for message in messages if "re-seeded" in message]
    assert [text.partition(": ")[2] for text in told] == [
        "gradient norm 1.5 times the limit that 1 re-seeded reference gives. Computing 5 more to tell rounding from a "
        "mistake.",
        "valid with the limit of 6 re-seeded references.",
    ]


def test_copies_are_those_that_a_longer_reference_would_have(done: Any) -> None:
    records, *_ = done
    (supplement,) = [record for record in records.values() if record.is_supplement]
    (reference,) = [record for record in records.values() if record.is_reference and not record.is_supplement]
    assert {s.variant for s in reference.steps} == {0, 1}
    assert {s.variant for s in supplement.steps} == {2, 3, 4, 5, 6}
    assert {s.step for s in supplement.steps} == {s.step for s in reference.steps} == {0, 1, 2}
    digests = {(s.step, s.data_digest) for s in (*reference.steps, *supplement.steps)}
    assert len(digests) == 3, "the same batches, in another order"
    assert supplement.operations == ()


def test_reports_show_copies_as_a_reference(done: Any) -> None:
    records, _, _, out = done
    report = report_of(out)
    assert {r.run: r.status for r in report.runs} == {r.spec.run_id: str(r.status) for r in records.values()}
    (supplement,) = [record for record in records.values() if record.is_supplement]
    assert supplement.spec.cell not in {c.cell for c in report.certificates}
    assert supplement.spec.cell not in {m.cell for m in report.measurements}
    assert supplement.spec.run_id in run_lines(Path(supplement.path))[0]
    honest = records[f"faulty.scaled_gradients:by={HONEST}"]
    assert any("certified: 3 of 3 steps compared" in line for line in run_lines(Path(honest.path)))
