"""Two folders whose every number is known: what is said about them, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import fabric_records
import numpy as np
import pytest

from paceline.analysis.compare import fingerprint
from paceline.analysis.compare.folders import compare_experiments
from paceline.analysis.findings import Between, Change
from paceline.errors import RequestError
from paceline.report.gate import catchable, least_visible, regressions
from paceline.report.tables import comparison as present
from paceline.results.machine_samples import KernelSample
from paceline.results.records import RunRecord, Status

Builder = Callable[..., Any]
Records = list[RunRecord]


def later(records: Records, **facts: Any) -> Records:
    """The same runs a day later, on a machine with other facts."""
    return [
        dataclasses.replace(r, started_at=r.started_at + 86400, machines=tuple({**m, **facts} for m in r.machines))
        for r in records
    ]


def change(found: Between, metric: str = "tokens_per_s", label: str = "") -> Change:
    (only,) = [c for c in found.changes if c.metric == metric and c.label.startswith(label)]
    return only


@pytest.fixture
def folder(make_cell: Builder, make_reference: Builder) -> Builder:
    """Strategy -> seconds per step, as a folder with its references."""

    def make(more: dict[str, Any] | None = None, **seconds: float) -> Records:
        runs = [r for name, s in seconds.items() for r in make_cell(s, strategy=name, **(more or {}))]
        works = {r.spec.work: r.spec for r in runs}
        return [*(make_reference(spec) for spec in works.values()), *runs]

    return make


def test_disturbed_launches_are_counted_before_any_table(folder: Builder) -> None:
    quiet = folder({"device": "cuda"}, ddp=1.0)
    shared = folder({"device": "cuda", "record": {"evidence": {"neighbours": 2}}}, ddp=1.0)
    assert compare_experiments(quiet, later(quiet)).disturbed is None
    found = compare_experiments(quiet, later(shared))
    assert found.disturbed == "trust amber: 3 of 3 launches of B were disturbed (2 other processes on a GPU)"
    assert found.disturbed in present.sentence(found)


class TestVerdicts:
    def test_second_over_first(self, folder: Builder) -> None:
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=0.8, fsdp2=1.0)))
        speed = change(found)
        assert speed.ratio == pytest.approx(1.25, rel=0.01)
        assert speed.low is not None
        assert speed.high is not None
        assert speed.low < 1.25 < speed.high
        assert speed.verdict == "better"
        assert change(found, "step_time_s").verdict == "better"
        assert change(found, "peak_memory_bytes").verdict == "equal"
        assert found.only_first == ()
        assert [text.split(",")[0] for text in found.only_second] == ["fsdp2"]

    def test_the_opposite_data_gives_the_opposite_sentence(self, folder: Builder, golden: object) -> None:
        fast, slow = folder(ddp=1.0), later(folder(ddp=1.25))
        text = present.sentence(compare_experiments(fast, slow))
        assert text == golden
        assert "20.0 %" in text
        assert "slower" in text
        text = present.sentence(compare_experiments(slow, fast))
        assert text == golden
        assert "25.0 %" in text
        assert "faster" in text

    def test_a_folder_with_itself_is_equal_everywhere_with_an_honest_interval(
        self, folder: Builder, golden: object
    ) -> None:
        """Subtracted from itself, a side would cancel to a ratio without any uncertainty."""
        records = folder(ddp=1.0, fsdp2=1.1)
        found = compare_experiments(records, records)
        assert {(c.verdict, c.ratio) for c in found.changes} == {("equal", 1.0)}
        speed = change(found, label="ddp")
        assert speed.high is not None
        assert speed.low is not None
        assert speed.high - speed.low > 0.001
        assert found.notes == golden
        assert present.sentence(found) == golden

    def test_memory_measured_once_has_a_ratio_and_no_verdict(self, folder: Builder, golden: object) -> None:
        once = {"repeats": 1}
        more = folder({**once, "record": {"memory_bytes": 200 * 2**20}}, ddp=1.0)
        memory = change(compare_experiments(folder(once, ddp=1.0), later(more)), "peak_memory_bytes")
        assert memory.ratio > 1.5
        assert (memory.low, memory.verdict) == (None, None)
        assert memory.reason == golden

    def test_speed_measured_once_has_a_ratio_and_no_verdict(self, folder: Builder, golden: object) -> None:
        once = folder({"repeats": 1}, ddp=1.0)
        for first, second in ((once, folder(ddp=2.0)), (folder(ddp=1.0), folder({"repeats": 1}, ddp=2.0))):
            speed = change(compare_experiments(first, later(second)))
            assert speed.ratio == pytest.approx(0.5, rel=0.01)
            assert (speed.low, speed.high, speed.detectable_ratio, speed.verdict) == (None, None, None, None)
            assert speed.reason == golden

    def test_cells_are_one_family_by_question(self, folder: Builder) -> None:
        """Speeds of all cells; their step times, which repeat them; their memory."""
        found = compare_experiments(folder(ddp=1.0, fsdp2=1.0), folder({"steps": 40}, ddp=1.1, fsdp2=1.0))
        assert {"for all 2 comparisons together" in c.reason for c in found.changes} == {True}

    def test_ranked_by_effect_with_decided_ones_first(self, folder: Builder) -> None:
        first = folder(ddp=1.0, fsdp2=1.0, single=1.0)
        found = compare_experiments(first, later(folder(ddp=1.05, fsdp2=1.3, single=1.0)))
        speeds = [c.label.split(",")[0] for c in found.changes if c.metric == "tokens_per_s"]
        assert speeds == ["fsdp2", "ddp", "single"]


class TestDifferences:
    def test_what_all_cells_share_is_said_once(self, folder: Builder) -> None:
        first = later(folder(ddp=1.0, fsdp2=1.0), driver="580", versions={"torch": "2.11.0"})
        second = later(later(folder(ddp=1.05, fsdp2=1.0)), driver="590", versions={"torch": "2.11.0"})
        second = [
            dataclasses.replace(r, machines=({**r.machines[0], "environment": {"NCCL_ALGO": "Tree"}},))
            if r.spec.strategy and r.spec.strategy.name == "ddp"
            else r
            for r in second
        ]
        found = compare_experiments(first, second)
        assert [(d.path, d.first, d.second) for d in found.shared] == [("driver", "580", "590")]
        (own,) = change(found, label="ddp").differences
        assert (own.path, own.first, own.second) == ("environment.NCCL_ALGO", None, "Tree")
        assert change(found, label="fsdp2").differences == ()
        sentence = present.sentence(found)
        assert sentence == (
            "B is 4.8 % slower than A in 1 of 2 cells; the difference is inconclusive in 1 cell; B ran on another day "
            "(1970-01-03, A on 1970-01-02): every interval of a speed allows for 1 % between them; driver 580 -> 590 "
            "differs."
        )

    def test_devices_of_a_host_that_differ_only_in_number_are_one_fact(self, folder: Builder) -> None:
        gpus = [{"index": i, "name": "H200", "power_limit_w": 700.0} for i in range(2)]
        capped = [{**g, "power_limit_w": 500.0} for g in gpus]
        first, second = later(folder(ddp=1.0), gpus=gpus), later(later(folder(ddp=1.2)), gpus=capped)
        found = compare_experiments(first, second)
        assert [present.differing_text(d) for d in found.shared] == ["power limit 700 W -> 500 W"]

    def test_cells_that_differ_in_circumstances_only_meet_and_it_is_said(self, folder: Builder) -> None:
        found = compare_experiments(folder(ddp=1.0), later(folder({"steps": 40}, ddp=1.1)))
        assert change(found).verdict == "worse"
        assert [(d.path, d.first, d.second) for d in found.shared] == [("steps", "30", "40")]


class TestDays:
    def test_an_a_a_difference_of_two_percent_across_days_is_inconclusive(self, folder: Builder) -> None:
        """1 % of either day: 1.96 * sqrt(2) % alone is 2.8 %. On one day it is slower."""
        first, second = folder(ddp=1.0), folder({"steps": 40}, ddp=1.02)
        assert change(compare_experiments(first, second)).verdict == "worse"
        across = compare_experiments(first, later(second))
        assert change(across).verdict == "inconclusive"
        assert change(compare_experiments(first, later(second), between_days=0.0)).verdict == "worse"

    def test_days_that_are_equal_are_not_called_different(self, folder: Builder) -> None:
        """An interval that allows for the days cannot lie within 2 %, so nothing is called equal either."""
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.0)))
        assert change(found).verdict == "inconclusive"
        assert change(found, "peak_memory_bytes").verdict == "equal", "memory does not depend on the day"

    def test_the_allowance_is_a_standard_error_of_one_percent_on_each_side(self, folder: Builder) -> None:
        first, second = folder(ddp=1.0), later(folder(ddp=1.1))
        speed = change(compare_experiments(first, second))
        plain = change(compare_experiments(first, second, between_days=0.0))
        assert speed.high is not None
        assert plain.high is not None
        reach, own = (math.log(high / speed.ratio) for high in (speed.high, plain.high))
        assert reach == pytest.approx(math.hypot(own, 1.95996 * 0.01 * math.sqrt(2)), rel=1e-4)

    def test_more_days_on_a_side_need_less_allowance(self, folder: Builder) -> None:
        def days(records: Records, count: int) -> Records:
            return [
                dataclasses.replace(r, started_at=r.started_at + 86400 * (i % count)) for i, r in enumerate(records)
            ]

        one, three = folder(ddp=1.0)[1:], days(folder(ddp=1.0)[1:], 3)
        assert fingerprint.apart(one, one) == 0
        assert fingerprint.apart(one, later(one)) == pytest.approx(math.sqrt(2))
        assert fingerprint.apart(one, later(three)) == pytest.approx(math.sqrt(1 + 1 / 3))
        assert fingerprint.apart(three, three) == 0

    def test_another_node_counts_as_another_day_does(self, folder: Builder, golden: object) -> None:
        there = [
            dataclasses.replace(r, machines=tuple({**m, "host": "node-b"} for m in r.machines))
            for r in folder({"steps": 40}, ddp=1.02)
        ]
        found = compare_experiments(folder(ddp=1.0), there)
        assert change(found).verdict == "inconclusive"
        assert found.occasions == golden
        assert found.occasions in present.sentence(found)
        later_there = compare_experiments(folder(ddp=1.0), later(there), between_days=0.005)
        assert later_there.occasions == golden

    def test_one_day_and_node_says_nothing(self, folder: Builder) -> None:
        records = folder(ddp=1.0)
        assert compare_experiments(records, folder({"steps": 40}, ddp=1.0)).occasions is None
        assert compare_experiments(records, records).occasions is None


class TestRefusals:
    @pytest.mark.parametrize(
        "other",
        [
            {"sequence_length": 128},
            {"precision": "bf16"},
            {"model": "tiny-llama"},
        ],
    )
    def test_other_work_is_refused_with_the_field(self, folder: Builder, other: dict[str, Any], golden: object) -> None:
        """Error 10: 1024-token against 512-token samples."""
        with pytest.raises(RequestError) as refused:
            compare_experiments(folder(ddp=1.0), folder(other, ddp=1.0))
        assert str(refused.value) == golden

    def test_another_device_is_refused_unless_asked_for(self, folder: Builder, golden: object) -> None:
        first, moved = folder(ddp=1.0), later(folder(ddp=0.5), cpu="EPYC")
        with pytest.raises(RequestError) as caught:
            compare_experiments(first, moved)
        assert str(caught.value) == golden
        assert "EPYC" in str(caught.value)
        assert "--across-devices" in str(caught.value)
        found = compare_experiments(first, moved, across_devices=True)
        assert change(found).verdict == "better"
        assert [d.path for d in found.shared] == ["cpu"]

    def test_a_slice_of_a_gpu_is_another_device_than_the_whole(self, folder: Builder, golden: object) -> None:
        whole, part = (
            folder({"device": "cuda", "record": {"gpus": [{"name": "H200", "mig": mig}]}}, ddp=1.0)
            for mig in (False, True)
        )
        with pytest.raises(RequestError) as caught:
            compare_experiments(whole, later(part))
        assert str(caught.value) == golden
        assert "H200" in str(caught.value)
        assert "MIG" in str(caught.value)

    def test_a_gpu_against_a_processor_compares_speed_but_not_memory(self, folder: Builder, golden: object) -> None:
        gpu = folder({"device": "cuda", "record": {"gpus": [{"name": "H200"}]}}, ddp=0.1)
        with pytest.raises(RequestError) as caught:
            compare_experiments(folder(ddp=1.0), gpu)
        assert str(caught.value) == golden
        assert "topology.device" in str(caught.value)
        assert "cpu" in str(caught.value)
        assert "cuda" in str(caught.value)
        found = compare_experiments(folder(ddp=1.0), gpu, across_devices=True)
        assert {c.metric for c in found.changes} == {"tokens_per_s", "step_time_s"}

    def test_nothing_certified_is_refused(self, folder: Builder, golden: object) -> None:
        with pytest.raises(RequestError) as caught:
            compare_experiments(folder(ddp=1.0), folder(ddp=1.0)[1:])
        assert str(caught.value) == golden

    def test_a_cell_in_both_folders_that_one_of_them_cannot_prove_is_named(
        self, folder: Builder, golden: object
    ) -> None:
        """The second folder has proved runs too, of other work: `no cell is in both folders` would be untrue."""
        unproved = folder(ddp=1.0)[1:]
        with pytest.raises(RequestError) as caught:
            compare_experiments(folder(ddp=1.0), [*unproved, *folder({"sequence_length": 128}, ddp=1.0)])
        assert str(caught.value) == golden


class TestGate:
    def test_only_a_loss_with_a_verdict_that_is_beyond_the_limit(self, folder: Builder) -> None:
        """10 % more time is 9.1 % fewer tokens/s."""
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.10)))
        assert len(regressions(found, 5)) == 1
        assert "(95 % interval" in regressions(found, 5)[0].text
        assert len(regressions(found, 8.5)) == 1, "the interval reaches below the limit, the measured loss does not"
        assert regressions(found, 9.5) == ()
        assert regressions(compare_experiments(later(folder(ddp=1.10)), folder(ddp=1.0)), 0) == ()

    def test_a_loss_without_a_verdict_is_no_regression(self, folder: Builder) -> None:
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.02)))
        assert change(found).verdict == "inconclusive"
        assert change(found).ratio < 0.985
        assert regressions(found, 1) == ()

    def test_what_it_could_have_caught_is_a_loss_relative_to_a(self, folder: Builder) -> None:
        speed = change(compare_experiments(folder(ddp=1.0), later(folder(ddp=1.0))))
        time = dataclasses.replace(speed, better="lower", detectable_ratio=0.25)
        assert catchable(time) == 0.25
        assert catchable(dataclasses.replace(time, better="higher")) == pytest.approx(0.2)
        assert catchable(dataclasses.replace(speed, verdict=None, low=None, detectable_ratio=None)) == math.inf
        assert catchable(dataclasses.replace(speed, verdict="equal", low=None, detectable_ratio=None)) == 0
        assert catchable(dataclasses.replace(speed, low=1.0, high=1.0)) == 0

    def test_across_days_it_catches_about_four_percent(self, folder: Builder) -> None:
        """2.8 standard errors of sqrt(2) % are a difference of 4.0 %, and launches add a little to it."""
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.0)))
        least = least_visible(found)
        assert least is change(found)
        assert 0.038 < catchable(least) < 0.045

    def test_the_cell_that_is_hardest_to_see_counts(self, folder: Builder) -> None:
        noisy = {"spread": 0.05}
        first = [*folder(ddp=1.0), *folder(noisy, fsdp2=1.0)]
        found = compare_experiments(first, later([*folder(ddp=1.0), *folder(noisy, fsdp2=1.0)]))
        assert least_visible(found) is change(found, label="fsdp2")
        only_memory = [c for c in found.changes if c.metric == "peak_memory_bytes"]
        assert least_visible(dataclasses.replace(found, changes=tuple(only_memory))) is None

    def test_more_memory_is_a_regression_of_its_own(self, folder: Builder, golden: object) -> None:
        heavy = folder({"record": {"memory_bytes": 130 * 2**20}}, ddp=1.0)
        found = compare_experiments(folder(ddp=1.0), later(heavy))
        (only,) = regressions(found, 10)
        assert "peak_memory_bytes" in only.text
        assert "B needs" in present.sentence(found)
        assert present.sentence(found) == golden

    def test_a_cell_that_is_gone_or_fails_now(self, folder: Builder, golden: object) -> None:
        first = folder(ddp=1.0, fsdp2=1.0, single=1.0)
        second = later(folder(ddp=1.0, fsdp2=1.0))
        broken = dataclasses.replace(second[-1], status=Status.OOM, error="out of memory on rank 1")
        found = compare_experiments(first, [*second[:-1], broken])
        assert {(x.label.split(",")[0], x.status) for x in found.lost} == {("fsdp2", "oom"), ("single", "missing")}
        assert len(regressions(found, 50)) == 2
        assert regressions(found, 50)[0].text == golden
        assert present.sentence(found) == golden

    def test_a_folder_in_which_everything_failed_is_an_answer(self, folder: Builder, golden: object) -> None:
        gone = [dataclasses.replace(r, status=Status.FAILED, error="a crash") for r in later(folder(ddp=1.0))]
        found = compare_experiments(folder(ddp=1.0), gone)
        assert found.changes == ()
        assert len(regressions(found, 5)) == 1
        assert present.sentence(found) == golden

    def test_a_cell_that_was_flaky_and_is_broken_now(self, folder: Builder) -> None:
        """One failed run in A excuses one in B, not the loss of all of them."""

        def failed(records: Records, count: int) -> Records:
            return [*records[:-count], *(dataclasses.replace(r, status=Status.FAILED) for r in records[-count:])]

        flaky, now = failed(folder(ddp=1.0), 1), later(folder(ddp=1.0))
        found = compare_experiments([*flaky, *folder(single=1.0)], [*failed(now, 3), *later(folder(single=1.0))])
        assert [(x.label.split(",")[0], x.status) for x in found.lost] == [("ddp", "failed")]
        assert len(regressions(found, 50)) == 1
        assert compare_experiments(flaky, failed(now, 2)).lost == ()

    def test_a_regression_is_one_line_whatever_a_rank_said(self, folder: Builder) -> None:
        """A build that prints it would obey a line of its own: `::add-mask::x` is a command there."""
        said = "lost\r\n::add-mask::x\n\u2028::error::y"
        now = [dataclasses.replace(r, status=Status.FAILED, error=said) for r in later(folder(ddp=1.0))]
        (only,) = regressions(compare_experiments(folder(ddp=1.0), now), 5)
        assert only.text.endswith(": lost ::add-mask::x ::error::y)")
        assert only.text.splitlines() == [only.text]

    def test_a_cell_in_both_folders_without_a_pair_is_named(self, folder: Builder, golden: object) -> None:
        broken = [
            r if r.is_reference else dataclasses.replace(r, status=Status.OOM, error="no room") for r in folder(ddp=1.0)
        ]
        found = compare_experiments([*broken, *folder(single=1.0)], later(folder(ddp=1.0, single=1.0)))
        (note,) = found.notes
        assert note == golden
        assert found.lost == ()

    def test_the_gate_decides_as_its_sentence_says(self, folder: Builder, golden: object) -> None:
        """10.7 % fewer tokens/s are 12 % more time: a gate at 11 must not trip where the sentence says less."""
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.12)))
        text = present.sentence(found)
        assert text == golden
        assert "10.7 %" in text
        assert "slower" in text
        assert change(found, "step_time_s").ratio > 1.11
        assert regressions(found, 11) == ()
        assert [r.text.split(": ")[1].split()[0] for r in regressions(found, 9)] == ["tokens_per_s"]

    def test_what_has_no_verdict_is_in_the_sentence_with_its_worst(self, folder: Builder, golden: object) -> None:
        once = {"repeats": 1}
        heavy = folder({**once, "record": {"memory_bytes": 200 * 2**20}}, ddp=1.0)
        found = compare_experiments(folder(once, ddp=1.0), later(heavy))
        memory = change(found, "peak_memory_bytes")
        worst = f"1 cell without a verdict on peak memory, at worst {(memory.ratio - 1) * 100:.1f} % more;"
        assert worst in present.sentence(found)
        lighter = compare_experiments(heavy, later(folder(once, ddp=1.0)))
        assert present.sentence(lighter) == golden

    def test_rows_left_out_are_not_called_unchanged(self, folder: Builder, golden: object) -> None:
        found = compare_experiments(folder(ddp=1.0), later(folder(ddp=1.0)))
        equal = dataclasses.replace(change(found), verdict="equal")
        silent = dataclasses.replace(equal, verdict=None, low=None, high=None)
        (table, *_) = present.tables(dataclasses.replace(found, changes=(equal,) * 33 + (silent,) * 2))
        assert table.notes == golden


class TestMachines:
    @pytest.fixture
    def sweep(self) -> Callable[..., Records]:
        def make(seconds: float, repeats: int = 3, seed: int = 0) -> Records:
            rng = np.random.default_rng(seed)
            found = []
            for repeat in range(repeats):
                times = seconds * (1 + 0.002 * rng.standard_normal()) * (1 + 0.002 * rng.standard_normal(100))
                rows = fabric_records.row([list(times)] * 4) + fabric_records.row(1e-4, "barrier", 0)
                found.append(fabric_records.build_record(fabric_records.build_spec(repeat=repeat), rows))
            return found

        return make

    def test_bus_bandwidth_by_row(self, sweep: Callable[..., Records], golden: object) -> None:
        found = compare_experiments(sweep(1e-3), later(sweep(1.25e-3, seed=1)))
        busbw = change(found, "busbw_bytes_per_s")
        assert (busbw.subject, busbw.row, busbw.verdict) == ("row", "all_reduce fp32 1 MiB single", "worse")
        assert busbw.ratio == pytest.approx(0.8, rel=0.01)
        assert change(found, "collective_time_s").verdict == "inconclusive", "across days"
        text = present.sentence(found)
        assert text == golden
        assert "20.0 %" in text
        assert "slower" in text

    def test_one_launch_has_no_verdict(self, sweep: Callable[..., Records], golden: object) -> None:
        found = compare_experiments(sweep(1e-3), later(sweep(1.25e-3, repeats=1)))
        busbw = change(found, "busbw_bytes_per_s")
        assert (busbw.low, busbw.verdict) == (None, None)
        assert busbw.reason == golden
        assert regressions(found, 0) == ()

    def test_ceilings_by_row(self, make_spec: Builder, make_record: Builder) -> None:
        def runs(seconds: float) -> Records:
            empty: dict[str, Any] = {"steps": (), "memory": (), "wire": (), "traces": ()}
            made = []
            for repeat in range(3):
                times = tuple(seconds * (1 + 0.001 * repeat + 0.001 * (i % 4)) for i in range(20))
                kernel = KernelSample(
                    rank=0,
                    kernel="matmul",
                    dtype="bf16",
                    label="4096",
                    variant="",
                    flops=10**12,
                    moved_bytes=None,
                    durations_s=times,
                    wrong=0,
                )
                spec = make_spec(None, world_size=1, workload="compute", repeat=repeat)
                made.append(make_record(spec, kernels=(kernel,), **empty))
            return made

        found = compare_experiments(runs(1e-3), later(runs(0.9e-3)))
        (row,) = found.changes
        assert (row.metric, row.row, row.verdict) == ("matmul_flops_per_s", "matmul bf16 4096", "better")
        assert row.ratio == pytest.approx(1 / 0.9, rel=1e-6)
