"""How often the verdicts are wrong: simulated campaigns through the analysis that reports use.

    python benchmarks/error_rates.py [--campaigns N] [--only-certificates] [--write]

Every campaign has known speeds. Steps have AR(1) noise, launches differ by a known spread, and a disturbance may be
added: outliers, drift, bursts of a neighbour, another day. The launch order is the one that `paceline run` would use.
A row counts three things: campaigns with any false verdict between equal cells, how often the 95 % interval of a ratio
covers the truth, and how often a cell that is 3 % faster is called faster. Another table says how often a certificate
refuses an honest run, by the number of re-seeded references. --write puts the tables into docs/method.md. Nothing here
passes or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.compare import cells, fingerprint
from paceline.analysis.compare.precision import trained_widths
from paceline.analysis.findings import BETTER, WORSE
from paceline.analysis.findings.training import NARROW
from paceline.analysis.statistics.changepoints import splits
from paceline.analysis.statistics.intervals import ratio_between
from paceline.analysis.statistics.verdict import BETWEEN_DAYS, FEWEST_LAUNCHES, verdict_of
from paceline.analysis.training import metrics
from paceline.analysis.training.certificate.trajectory import SPREAD_FACTOR
from paceline.analysis.training.window import STEP_COLUMNS, Window, open_window
from paceline.campaign.run.copies import MORE
from paceline.campaign.run.references import VARIANTS
from paceline.campaign.run.stopping import MOST_LAUNCHES
from paceline.experiment import expansion
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, WarmUp
from paceline.results.records import Outcome, RunRecord, Status, StepSample

Array = NDArray[np.float64]
STEPS, STEP_SPREAD, CORRELATION = 40, 0.01, 0.5
EFFECT = 0.03
ORDERS = 20
STRATEGIES = ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", "zero:stage=3")
SPREADS, LAUNCHES, CELLS = (0.005, 0.01), (1, 2, 3, 5), (2, 5)
# `--until 2%`: the number of launches follows from the data.
UNTIL, UNTIL_LAUNCHES = 0.02, 0
PLAIN, OUTLIERS, DRIFT, BURSTS, DAYS = "none", "outliers", "drift", "bursts", "another day"
DISTURBANCES = (PLAIN, OUTLIERS, DRIFT, BURSTS, DAYS)
WORDS = {
    PLAIN: "AR(1) noise of 1 % in steps (correlation 0.5) and the stated spread of launches, both normal",
    OUTLIERS: "2 % of the steps take 50 % longer on average, and 5 % of the launches are 10 % slower",
    DRIFT: "the machine slows down by 2 % from the first launch to the last",
    BURSTS: "once in a campaign, a neighbour makes everything 10 % slower for as long as half a launch",
    DAYS: f"`compare` of two campaigns on two days; days differ by a normal spread of {BETWEEN_DAYS * 100:.0f} %",
}
MARKS = "<!-- error rates: benchmarks/error_rates.py -->", "<!-- end of error rates -->"
CERTIFICATE_MARKS = "<!-- refused runs: benchmarks/error_rates.py -->", "<!-- end of refused runs -->"
# Rounding of a certified quantity grows by this factor at each step; mistakes are so many times as large as rounding.
CERTIFIED_STEPS, ROUNDING_GROWTH, MISTAKES = 10, 1.3, (3.0, 5.0)
CERTIFICATES = 200_000


@dataclass(frozen=True)
class Row:
    disturbance: str
    spread: float
    launches: int
    cells: int


@dataclass(frozen=True)
class Rates:
    """Shares of campaigns (wrong) or of comparisons (covered, found)."""

    wrong: float
    covered: float | None
    found: float


def spec_of(strategy: str, repeat: int = 0) -> RunSpec:
    return RunSpec(
        experiment="simulated",
        strategy=Choice.parse(strategy),
        workload=Choice("pretrain"),
        model=Choice("tiny"),
        topology=Topology(device="cpu", processes_per_node=1),
        training=Training(
            sequence_length=64, micro_batch=1, accumulation=1, precision=Precision(compute="fp32", reduce="fp32")
        ),
        steps=STEPS,
        warmup=WarmUp(minimum=1, maximum=1, window=2),
        repeat=repeat,
    )


def window_of(spec: RunSpec, started_at: float) -> Window:
    """A launch whose every step takes one second."""
    steps = tuple(
        StepSample(
            rank=0,
            step=step,
            duration_s=1.0,
            data_wait_s=0.0,
            h2d_s=None,
            h2d_bytes=None,
            forward_s=None,
            backward_s=None,
            optimizer_s=None,
            tokens=spec.training.sequence_length,
            samples=1,
            micro_batches=1,
            updates=1,
            loss=1.0,
            grad_norm=1.0,
            data_digest=0,
        )
        for step in range(spec.steps)
    )
    outcome = Outcome(
        rank=0, status=Status.OK, error=None, host="node", pid=1, started_at=0.0, ended_at=1.0, evidence=None
    )
    return open_window(
        RunRecord(
            spec=spec,
            status=Status.OK,
            error=None,
            started_at=started_at,
            ended_at=started_at + 1.0,
            path=f"/simulated/{spec.run_id}",
            outcomes=(outcome,),
            machines=({"host": "node", "cpu": "simulated", "gpus": []},),
            steps=steps,
        )
    )


def step_times(rng: np.random.Generator, row: Row, count: int) -> list[Array]:
    """Relative step times of `count` launches in the order in which they run."""
    noise = rng.standard_normal((count, STEPS))
    for step in range(1, STEPS):
        noise[:, step] = CORRELATION * noise[:, step - 1] + math.sqrt(1 - CORRELATION**2) * noise[:, step]
    times = np.exp(STEP_SPREAD * noise + row.spread * rng.standard_normal((count, 1)))
    if row.disturbance == OUTLIERS:
        times += (rng.random((count, STEPS)) < 0.02) * rng.exponential(0.5, (count, STEPS))
        times *= 1 + 0.1 * (rng.random((count, 1)) < 0.05)
    elif row.disturbance == DRIFT:
        times *= np.linspace(1.0, 1.02, count * STEPS).reshape(count, STEPS)
    elif row.disturbance == BURSTS:
        begin = rng.integers(0, count * STEPS)
        times.reshape(-1)[begin : begin + STEPS // 2] *= 1.1
    return list(times)


class Simulation:
    """Campaigns of one row, analysed as `report` and `compare` do."""

    def __init__(self, row: Row, day_s: float = 86400.0) -> None:
        self.row, self.most = row, row.launches or MOST_LAUNCHES
        names = STRATEGIES[: row.cells]
        # Windows are built once and get new step times for each campaign: only those differ.
        self.days = [
            {
                spec.run_id: window_of(spec, day * day_s + spec.repeat)
                for name in names
                for spec in (spec_of(name, repeat) for repeat in range(self.most))
            }
            for day in (0, 1)
        ]
        self.specs = [spec_of(name) for name in names]
        cell_numbers = {spec.cell: number for number, spec in enumerate(self.specs)}
        self.orders = [
            [(spec.run_id, cell_numbers[spec.cell]) for spec in expansion.order(self.specs, self.most, seed)]
            for seed in range(ORDERS)
        ]

    def campaign(self, rng: np.random.Generator, effects: Sequence[float], day: int = 0) -> list[Any]:
        ordered = self.orders[rng.integers(ORDERS)]
        times = step_times(rng, self.row, len(ordered))
        day_factor = math.exp(BETWEEN_DAYS * rng.standard_normal()) if self.row.disturbance == DAYS else 1.0
        windows = [
            retimed(self.days[day][run], seconds[1:] * day_factor / (1 + effects[cell]))
            for (run, cell), seconds in zip(ordered, times, strict=True)
        ]
        if self.row.launches != UNTIL_LAUNCHES:
            return metrics.gather(windows)
        wanted = {spec.cell: FEWEST_LAUNCHES for spec in self.specs}
        while True:
            found = metrics.gather(w for w in windows if w.record.spec.repeat < wanted[w.record.spec.cell])
            wide = [cell for cell, (width, _, _) in trained_widths(found).items() if width > UNTIL]
            left = [cell for cell in wide if wanted[cell] < MOST_LAUNCHES]
            if not left:
                return found
            for cell in left:
                wanted[cell] += 1

    def comparisons(self, rng: np.random.Generator, effect: float) -> Iterator[tuple[float, Any]]:
        """Every comparison as its true ratio, and its interval and verdict."""
        equal = [0.0] * self.row.cells
        if self.row.disturbance != DAYS:
            found = self.campaign(rng, [effect, *equal[1:]])
            truth = {cell.id: 1 + (effect if cell.spec.cell == self.specs[0].cell else 0.0) for cell in found}
            for compared in cells.compare_cells(found, ("strategy",)):
                for c in compared.comparisons:
                    if c.metric == "tokens_per_s":
                        yield truth[c.cell] / truth[c.other], (c.low, c.high, c.verdict, c.ratio)
            return
        before, after = self.campaign(rng, equal), self.campaign(rng, [effect, *equal[1:]], day=1)
        for a, b in zip(*(sorted(side, key=lambda c: c.id) for side in (before, after)), strict=True):
            over, under = metrics.estimate(b, "tokens_per_s"), metrics.estimate(a, "tokens_per_s")
            assert over
            assert under
            ratio = ratio_between([over], [under])
            assert ratio
            earlier, later = ([w.record for w in side.windows] for side in (a, b))
            ratio = fingerprint.allow_for_days(ratio, earlier, later)
            verdict, _ = verdict_of(ratio, "higher", self.row.cells)
            truth_of = 1 + (effect if a.spec.cell == self.specs[0].cell else 0.0)
            yield truth_of, (ratio.low, ratio.high, verdict, ratio.value)


def retimed(window: Window, seconds: Array) -> Window:
    steps = window.steps.copy()
    for name in ("seconds", "wall"):
        steps[:, STEP_COLUMNS.index(name)] = seconds
    return dataclasses.replace(window, steps=steps)


def rates_of(row: Row, campaigns: int) -> Rates:
    rng = np.random.default_rng([row.cells, row.launches, round(row.spread * 1e4), DISTURBANCES.index(row.disturbance)])
    simulation = Simulation(row)
    wrong, covered, found = 0, [], []
    for _ in range(campaigns):
        null = list(simulation.comparisons(rng, 0.0))
        wrong += any(verdict in (BETTER, WORSE) for _, (_, _, verdict, _) in null)
        covered += [low <= truth <= high for truth, (low, high, _, _) in null]
        for truth, (_, _, verdict, ratio) in simulation.comparisons(rng, EFFECT):
            if truth != 1:
                found.append(verdict in (BETTER, WORSE) and (ratio > 1) == (truth > 1))
    return Rates(
        wrong / campaigns, float(np.mean(covered)) if covered and row.launches != 1 else None, float(np.mean(found))
    )


def table(rows: Sequence[tuple[Row, Rates]], campaigns: int) -> str:
    lines = [
        f"{campaigns:,} campaigns for each row, half of them without any difference.",
        "",
        "| disturbance | launch spread | cells | launches | false verdict in a campaign | coverage | 3 % found |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, rates in rows:
        covered = "-" if rates.covered is None else f"{rates.covered * 100:.1f} %"
        lines.append(
            f"| {row.disturbance} | {row.spread * 100:.1f} % | {row.cells} | {row.launches or '--until 2%'} "
            f"| {rates.wrong * 100:.1f} % | {covered} | {rates.found * 100:.0f} % |"
        )
    return "\n".join([*lines, "", *(f"- **{name}**: {words}." for name, words in WORDS.items())])


def history_table(series: int) -> str:
    """False changes in series without any, and how often a step of 3 % is found where it is."""
    lines = [
        f"`paceline history`, {series:,} series for each row; launches spread by 1.5 % (false) and 0.5 % (found):",
        "",
        "| launches | correlation of neighbours | false change | 3 % step found | beside one launch at -30 % |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for n, correlation in itertools.product((12, 20, 40), (0.0, 0.3, 0.5, 0.7)):
        rng = np.random.default_rng([n, round(10 * correlation)])
        counts = np.zeros(3)
        for seed in range(series):
            quiet = rng.standard_normal((2, n))
            for index in range(1, n):
                fresh = math.sqrt(1 - correlation**2) * quiet[:, index]
                quiet[:, index] = correlation * quiet[:, index - 1] + fresh
            step = 0.005 * quiet[1] - 0.03 * (np.arange(n) >= n // 2)
            hit = step.copy()
            hit[rng.integers(n)] += math.log(0.7)
            counts[0] += bool(splits(0.015 * quiet[0], seed))
            for column, x in ((1, step), (2, hit)):
                counts[column] += any(abs(split.at - n // 2) <= 1 for split in splits(x, seed))
        shares = " | ".join(f"{share * 100:.0f} %" for share in counts / series)
        lines.append(f"| {n} | {correlation:.1f} | {shares} |")
    return "\n".join(lines)


def excesses(run: Array, copies: Array) -> Array:
    """The deviation of each simulated run at each step, as a multiple of its limit."""
    return run / (SPREAD_FACTOR * np.maximum.accumulate(copies.max(axis=1), axis=1))


def certificate_table(runs: int) -> str:
    """How often one quantity of an honest run, and of those with a mistake, is refused."""
    few, all_copies = VARIANTS - 1, VARIANTS - 1 + MORE
    rng = np.random.default_rng(0)
    # The reference, the run and the copies are exchangeable.
    noise = rng.standard_normal((runs, 2 + all_copies, CERTIFIED_STEPS))
    for step in range(1, CERTIFIED_STEPS):
        noise[..., step] = CORRELATION * noise[..., step - 1] + math.sqrt(1 - CORRELATION**2) * noise[..., step]
    growth = ROUNDING_GROWTH ** np.arange(CERTIFIED_STEPS)
    copies = np.abs(noise[:, 2:] - noise[:, :1]) * growth

    def refused(mistake: float) -> dict[str, NDArray[np.bool_]]:
        """By number of copies, which runs are refused at which step."""
        run = np.abs(noise[:, 1] + mistake - noise[:, 0]) * growth
        found = {count: excesses(run, copies[:, :count]) for count in (few, 2 * few, all_copies)}
        is_narrow = found[few].max(axis=1, keepdims=True) <= NARROW
        on_demand = np.where(is_narrow, found[all_copies], found[few])
        named = {str(count): each for count, each in found.items()}
        named[f"{few}, and {MORE} more after a narrow refusal"] = on_demand
        return {name: each > 1 for name, each in named.items()}

    columns = ("re-seeded references", "honest: refused at the first step", "at any step")
    columns += tuple(f"deviation of {mistake:g} x rounding: refused" for mistake in MISTAKES)
    honest, *wrong = (refused(mistake) for mistake in (0.0, *MISTAKES))
    lines = [
        f"{runs:,} runs, one quantity, {CERTIFIED_STEPS} steps. Rounding: the standard deviation of one trajectory.",
        "",
        f"| {' | '.join(columns)} |",
        f"| --- {'| ---: ' * (len(columns) - 1)}|",
    ]
    for name, each in honest.items():
        shares = (each[:, 0].mean(), *(found[name].any(axis=1).mean() for found in (honest, *wrong)))
        lines.append(f"| {name} | {' | '.join(f'{share * 100:.1f} %' for share in shares)} |")
    return "\n".join(lines)


def between(marks: tuple[str, str], text: str) -> None:
    """Replace what is between these marks in docs/method.md."""
    page = Path(__file__).parents[1] / "docs" / "method.md"
    before, rest = page.read_text().split(marks[0])
    page.write_text(f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.split(marks[1])[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=1000, help="for each row (default: %(default)s)")
    parser.add_argument("--only-certificates", action="store_true", help="only how often certificates refuse runs")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/method.md")
    arguments = parser.parse_args()
    certificates = certificate_table(CERTIFICATES)
    print(certificates)
    if arguments.write:
        between(CERTIFICATE_MARKS, certificates)
    if arguments.only_certificates:
        return
    rows = [Row(*each) for each in itertools.product(DISTURBANCES, SPREADS, LAUNCHES, CELLS)]
    rows += [Row(PLAIN, spread, UNTIL_LAUNCHES, count) for spread in SPREADS for count in CELLS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = []
        for row, rates in zip(rows, pool.map(rates_of, rows, itertools.repeat(arguments.campaigns // 2)), strict=True):
            found.append((row, rates))
            print(row, rates, flush=True)
    text = f"{table(found, arguments.campaigns)}\n\n{history_table(arguments.campaigns // 4)}"
    print(text)
    if arguments.write:
        between(MARKS, text)


if __name__ == "__main__":
    main()
