"""Predict every training run in docs/measured and write the table of predicted beside measured steps.

    python benchmarks/own_runs.py [--check]

Unpacks docs/measured/*/runs.tar.gz and those of llama-8b, predicts each configuration from its specification alone,
and writes the generated part of docs/prediction.md, in about ten seconds. `--check` writes nothing. The fit has none of
these runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.campaign.run.measured_setups import read_below
from paceline.experiment.spec import RunSpec
from paceline.prediction import runs
from paceline.prediction.offsets import Anchor
from paceline.prediction.predict import Prediction, predict, setup_of
from paceline.prediction.setup import Setup
from paceline.results.records import RunRecord

ROOT = Path(__file__).parent.parent
MEASURED = ROOT / "docs" / "measured"
PAGE = ROOT / "docs" / "prediction.md"
START, END = "<!-- own runs: written by benchmarks/own_runs.py -->", "<!-- end of own runs -->"

# Steps of one H200 that READMEs of docs/measured state without certified runs: model, precision, micro batch and
# sequence, compiled, method, checkpointing, milliseconds, folder.
STATED = (
    ("llama-1b", "bf16", 8, 4096, True, "full", "none", 513.4, "h200-speed"),
    ("llama-1b", "fp8", 8, 4096, True, "full", "none", 404.5, "h200-speed"),
    ("llama-8b", "bf16", 2, 4096, True, "full", "full", 911, "h200-speed"),
    ("gpt2-124m", "bf16", 16, 1024, False, "full", "none", 16384 / 348.2, "measured/README.md"),
    ("gpt2-124m", "bf16", 16, 1024, True, "full", "none", 16384 / 488.0, "measured/README.md"),
    ("mistral-7b", "bf16", 8, 512, True, "qlora", "full", 286, "h200-finetune"),
    ("mistral-7b", "bf16", 8, 512, True, "qlora", "none", 224, "h200-finetune"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration: the mean of its launches."""

    spec: RunSpec
    anchor: Anchor
    launches: int

    @property
    def name(self) -> str:
        t, s = self.spec.training, self.anchor.setup
        words = [s.shape.name, str(self.spec.strategy), t.precision.compute, f"{s.micro_batch} x {s.sequence_length}"]
        if s.has_adapters:
            words[2] = f"QLoRA, {t.precision.compute}" if s.quantised else f"LoRA, {t.precision.compute}"
        words += ["compiled"] if s.software.compiled else []
        return ", ".join(words)

    def error(self, anchors: Sequence[Anchor] = ()) -> float:
        return self.predicted(anchors).step_s / self.anchor.step_s - 1

    def predicted(self, anchors: Sequence[Anchor] = ()) -> Prediction:
        return predict([self.anchor.setup], anchors)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = page(cases(records()))
    if parser.parse_args(arguments).check:
        sys.stdout.write(text)
        return 0
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(f"{before}{START}\n\n{text}\n{END}{after.partition(END)[2]}", encoding="utf-8")
    return 0


def records() -> list[RunRecord]:
    found = []
    for archive in sorted((*MEASURED.glob("*/runs.tar.gz"), *MEASURED.glob("*/runs-8b.tar.gz"))):
        with tempfile.TemporaryDirectory() as directory, tarfile.open(archive) as file:
            file.extractall(directory, filter="data")
            found += read_below(Path(directory))
    return found


def cases(found: Sequence[RunRecord]) -> list[Case]:
    """The configurations; runs that differ in their seed only are launches of one. Runs that write checkpoints are left
    out, because files that are written beside the steps slow them down."""
    groups: dict[str, list[RunRecord]] = {}
    for record in found:
        if runs.measured(record) is not None and record.spec.checkpoint_every is None:
            s = record.spec
            same = (s.workload, s.strategy, s.model, s.topology, s.training, s.tuning)
            groups.setdefault(repr(same), []).append(record)
    return [Case(group[0].spec, averaged(runs.anchors(group)), len(group)) for group in groups.values()]


def averaged(anchors: Sequence[Anchor]) -> Anchor:
    step_s = float(np.exp(np.mean([np.log(one.step_s) for one in anchors])))
    return dataclasses.replace(anchors[0], step_s=step_s)


def page(found: Sequence[Case]) -> str:
    lines = ["| run | launches | predicted step, ms | measured, ms | error, % |", "| --- | --- | --- | --- | --- |"]
    for case in found:
        one, step_s = case.predicted(), case.anchor.step_s
        interval = f"{1e3 * one.low_s:.0f} to {1e3 * one.high_s:.0f}"
        cells = [case.name, str(case.launches), f"{1e3 * one.step_s:.0f} ({interval})", f"{1e3 * step_s:.0f}"]
        lines.append(f"| {' | '.join([*cells, f'{100 * case.error():+.1f}'])} |")
    lines += [
        "",
        "| median error, % | runs | no anchor | runs of other models | all other runs | inside the interval |",
    ]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    kinds = {
        "pre-training, dense": [one for one in found if not one.spec.tuning and not one.anchor.setup.shape.experts],
        "mixtures of experts": [one for one in found if one.anchor.setup.shape.experts],
        "QLoRA": [one for one in found if one.spec.tuning],
        "all": list(found),
    }
    for kind, group in kinds.items():
        others = [[o.anchor for o in found if model(o) != model(one)] for one in group]
        rest = [[o.anchor for o in found if o is not one] for one in group]
        medians = [
            np.median([abs(one.error(anchors)) for one, anchors in zip(group, chosen, strict=True)])
            for chosen in ([()] * len(group), others, rest)
        ]
        inside = sum(p.low_s <= one.anchor.step_s <= p.high_s for one in group for p in [one.predicted()])
        cells = [kind, str(len(group)), *(f"{100 * value:.1f}" for value in medians), f"{inside} of {len(group)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *stated_table()]) + "\n"


def stated_table() -> list[str]:
    lines = ["| step stated in a README | predicted, ms | measured, ms | error, % | folder |", "| --- " * 5 + "|"]
    for model, precision, micro_batch, length, compiled, method, checkpointing, measured, folder in STATED:
        one = predict([stated(model, precision, micro_batch, length, compiled, method, checkpointing)])[0]
        words = [model, method, precision, f"{micro_batch} x {length}", "compiled" if compiled else "not compiled"]
        words += [f"checkpointing {checkpointing}"]
        cells = [", ".join(words), f"{1e3 * one.step_s:.0f} ({1e3 * one.low_s:.0f} to {1e3 * one.high_s:.0f})"]
        cells += [f"{measured:.0f}", f"{100 * (1e3 * one.step_s / measured - 1):+.1f}", folder]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def stated(
    model: str, precision: str, micro_batch: int, length: int, compiled: bool, method: str, checkpointing: str
) -> Setup:
    one = setup_of(
        model,
        "h200",
        1,
        sequence_length=length,
        global_batch=micro_batch,
        micro_batch=micro_batch,
        precision=precision,
        method=method,
        checkpointing=checkpointing,
        software="paceline",
    )
    return one.replaced(software=dataclasses.replace(one.software, compiled=compiled))


def model(one: Case) -> str:
    return one.anchor.setup.shape.name


if __name__ == "__main__":
    sys.exit(main())
