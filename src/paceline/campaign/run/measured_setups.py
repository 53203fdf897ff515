"""What was measured before, read as anchors of a prediction; and predicted setups, run to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from paceline.campaign.run.controller import load_own
from paceline.errors import RequestError
from paceline.experiment.spec import RunSpec
from paceline.prediction import experiment_file, hardware, processors, published, runs, stored
from paceline.prediction.choosing import Timed
from paceline.prediction.hardware import Accelerator
from paceline.prediction.offsets import Anchor, Observation
from paceline.prediction.served_anchors import Endpoint, ServedAnchor, is_behind_url, is_table, of_records, read_table
from paceline.prediction.setup import Setup
from paceline.results.launches import read_launches
from paceline.results.records import RunRecord

# Steps of one run scatter at least this much, whatever its own spread says.
LEAST_SD = 0.01


@dataclass(frozen=True)
class Known:
    """What results directories and tables say about a cluster. cpu: one process of a machine without GPUs."""

    anchors: list[Anchor] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    cpu: Accelerator | None = None
    served: list[ServedAnchor] = field(default_factory=list)

    def accelerator(self, name: str) -> Accelerator:
        """The GPU of this name; `cpu` is what the anchors measured.

        RequestError for `cpu` without such a measurement.
        """
        if name.strip().casefold() != hardware.CPU:
            return hardware.accelerator(name)
        if self.cpu is None:
            raise RequestError(
                "--gpu: got cpu, expected --anchor with a `paceline run compute` of this machine, because a CPU has no "
                "datasheet that predicts training. Run it, and `paceline run fabric` for several processes, first."
            )
        return self.cpu


def read_known(paths: Sequence[str], endpoint: Endpoint | None = None) -> Known:
    """Anchors and observations of results directories and CSV tables. endpoint: what served runs against a URL."""
    found = Known()
    records: list[RunRecord] = []
    for text in paths:
        path = Path(text)
        if path.suffix == ".csv" and path.is_file() and is_table(path):
            found.served.extend(read_table(path))
            continue
        if path.suffix == ".csv" and path.is_file():
            rows = published.read_given(path, "--anchor")
            found.anchors.extend(Anchor(row.setup, row.step_s, row.row_id) for row in rows)
            continue
        if not path.is_dir():
            raise RequestError(f"--anchor: got {text!r}, expected a results directory or a CSV file.")
        records += read_below(path)
    cpu = processors.measured_cpu(records)
    found.anchors.extend(runs.anchors(records, cpu))
    found.observations.extend(runs.observations(records))
    found.served.extend(of_records(records, endpoint))
    if paths and not (found.anchors or found.observations or found.served or cpu):
        hidden = any(is_behind_url(one) for one in records)
        hint = " A client does not see what serves behind a URL: add --endpoint gpu=NAME." if hidden else ""
        raise RequestError(
            f"--anchor: got {', '.join(paths)}, expected a successful training, fabric, compute or inference run on a "
            f"known GPU.{hint}"
        )
    return Known(found.anchors, found.observations, cpu, found.served)


def directories_with_runs(path: Path) -> list[Path]:
    """The directories at or below this one that hold runs."""
    return sorted({status.parent.parent for status in path.rglob("status.json")})


def read_below(path: Path) -> list[RunRecord]:
    """Every launch at or below a directory."""
    return [record for one in directories_with_runs(path) for record in read_launches(one)[0]]


def run_setups(
    model: str,
    setups: Sequence[Setup],
    steps: int,
    out: Path,
    launcher: str | None,
    run: Callable[[Sequence[RunSpec]], object],
) -> list[Timed]:
    """Run each setup for this many steps and return those that ended ok, with their median step.

    run: the campaign of the controller, with the observer of the caller.
    Runs that were sealed before are not repeated, so that an interrupted choice continues where it stopped.
    """
    out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Setup]] = {}
    for one in setups:
        groups.setdefault(f"choose-{one.gpus}x{experiment_file.method_suffix(one)}-{steps}steps", []).append(one)
    found = []
    for name, group in groups.items():
        path = out / f"{name}.yaml"
        document = experiment_file.document(model, group, name, steps)
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        run(load_own(str(path), launcher=launcher))
        found += _timed(group, read_launches(out / name)[0])
    return found


def _timed(setups: Sequence[Setup], records: Sequence[RunRecord]) -> list[Timed]:
    """The runs that measured these setups; of several launches of one the newest."""
    wanted = {stored.key(one): one for one in setups}
    newest: dict[str, Timed] = {}
    for record in sorted(records, key=lambda record: record.started_at):
        one = runs.measured(record, setups[0].gpu if setups[0].gpu.name == hardware.CPU else None)
        setup = None if one is None else wanted.get(stored.key(one.setup))
        if one is not None and setup is not None:
            newest[stored.key(setup)] = Timed(setup=setup, step_s=one.step_s, sd=max(one.sd, LEAST_SD), run=one.run)
    return list(newest.values())
