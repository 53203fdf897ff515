"""One plugin of each kind from another package: by dotted name, by entry point, and after the package is gone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment import plugins
from paceline.experiment.choices import Choice
from paceline.experiment.expansion import load
from paceline.experiment.plugins import Traits
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic
from paceline.results import store

MODULES = {
    "workloads": '''
        """Sums numbers on one core, which trains nothing."""
        import time
        from dataclasses import dataclass

        from paceline.experiment.plugins import Traits, parse_options
        from paceline.results.machine_samples import KernelSample

        TRAITS = Traits()


        @dataclass(frozen=True)
        class Options:
            """iters: how often the sum is timed."""

            iters: int = 3


        def check(spec):
            parse_options(Options, spec.workload)


        def run(spec, seat, recorder):
            times = []
            for _ in range(parse_options(Options, spec.workload).iters):
                began = time.perf_counter()
                total = sum(range(1000))
                times.append(time.perf_counter() - began)
            recorder.add(
                KernelSample(
                    rank=seat.rank, kernel="copy", dtype="int64", label="sum", variant="python", flops=None,
                    moved_bytes=8000, durations_s=tuple(times), size=8000, wrong=int(total != 499500),
                )
            )
        ''',
    "strategies": '''
        """One process, with formulas of its own for memory and traffic."""
        from paceline.experiment.plugins import load

        single = load("strategies", "single")
        check, wrap = single.check, single.wrap


        def sharded_parts(options):
            return 2


        def wire_bytes(traffic):
            return 3 * traffic.gradient_bytes
        ''',
    "launchers": '''
        """Processes of this host, paid for by an account."""
        from dataclasses import replace

        from paceline.experiment.choices import Choice
        from paceline.experiment.plugins import load

        local = load("launchers", "testbed.forked")
        HERE = True
        UNMEASURED = {"account": "who pays"}
        submit, poll, cancel, close = local.submit, local.poll, local.cancel, local.close


        def inner(spec):
            options = {key: value for key, value in spec.launcher.options.items() if key != "account"}
            return replace(spec, launcher=Choice("local", options))


        def check(spec):
            return local.check(inner(spec))


        def prepare(spec, run_dir):
            return local.prepare(inner(spec), run_dir)
        ''',
    "engines": '''
        """Endpoints that a tenant rents elsewhere."""
        import contextlib

        UNMEASURED = {"tenant": "who pays"}


        def check(spec):
            return None


        @contextlib.contextmanager
        def open(spec, seat):
            yield ()
        ''',
    "exporters": '''
        """Names of the runs, one per line."""
        from pathlib import Path


        def export(report, directory):
            path = Path(directory) / "names.txt"
            path.write_text("".join(f"{run.run} {run.status} {run.is_certified}\\n" for run in report.runs))
            return [path]
        ''',
}
EXPERIMENT = """
name: outside
base:
  workload: {workload}
  launcher: {{name: {launcher}, account: physics}}
  device: cpu
  processes: 1
"""


def by_module(kind: str) -> str:
    return f"outside_package.{kind}"


def by_entry_point(kind: str) -> str:
    return f"outside-{kind}"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip would fill it: a package with one module of each kind, and its entry points."""
    root = tmp_path_factory.mktemp("site")
    (root / "outside_package").mkdir()
    (root / "outside_package" / "__init__.py").touch()
    for kind, text in MODULES.items():
        (root / "outside_package" / f"{kind}.py").write_text(dedent(text).strip() + "\n")
    information = root / "outside_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-package\nVersion: 1.0\n")
    groups = (f"[paceline.{kind}]\n{by_entry_point(kind)} = {by_module(kind)}\n" for kind in MODULES)
    (information / "entry_points.txt").write_text("\n".join(groups))
    return root


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def forget() -> None:
        plugins.load.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "outside_package"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(str(package))
    forget()
    yield package
    forget()


NAMES = pytest.mark.parametrize("name_of", [by_module, by_entry_point], ids=["dotted", "entry point"])


@NAMES
@pytest.mark.parametrize("kind", plugins.KINDS)
@pytest.mark.usefixtures("installed")
def test_it_is_listed_and_loaded(kind: str, name_of: Callable[[str], str]) -> None:
    assert plugins.names(kind)[by_entry_point(kind)] == f"from {by_module(kind)}"
    assert not plugins.is_shipped(kind, name_of(kind))
    assert plugins.load(kind, name_of(kind)).__name__ == by_module(kind)


@NAMES
@pytest.mark.usefixtures("installed")
def test_an_untrained_workload_is_neither_trained_nor_certified(tmp_path: Path, name_of: Callable[[str], str]) -> None:
    file = tmp_path / "outside.yaml"
    file.write_text(EXPERIMENT.format(workload=name_of("workloads"), launcher=name_of("launchers")))
    (spec,) = load(str(file))
    assert spec.traits == Traits()
    assert (spec.is_trained, spec.is_certified, spec.strategy) == (False, False, None)
    assert "micro_batch" not in spec.axes()
    (longer,) = load(str(file), ["micro_batch=4", "workload.iters=3"])
    assert longer.cell != spec.cell, "iters is an option of the workload"
    assert load(str(file), ["micro_batch=4"])[0].cell == spec.cell, "nothing trains on a micro batch"
    with pytest.raises(RequestError, match="Did you mean 'iters'"):
        plugins.load("workloads", name_of("workloads")).check(
            replace(spec, workload=Choice(spec.workload.name, {"iter": 2}))
        )


@NAMES
@pytest.mark.usefixtures("installed")
def test_an_unmeasured_option_does_not_change_the_run(
    make_spec: Callable[..., RunSpec], name_of: Callable[[str], str]
) -> None:
    def ids(launcher: dict[str, Any], engine: dict[str, Any]) -> tuple[str, str]:
        spec = replace(
            make_spec(workload="inference"),
            serving=Serving(),
            launcher=Choice(name_of("launchers"), launcher),
            engine=Choice(name_of("engines"), engine),
        )
        return spec.run_id, spec.cell

    assert ids({"account": "physics"}, {"tenant": "a"}) == ids({"account": "biology"}, {"tenant": "b"}) == ids({}, {})
    assert ids({"queue": "fast"}, {}) != ids({"queue": "slow"}, {})
    assert ids({}, {"size": 1}) != ids({}, {"size": 2})


@NAMES
@pytest.mark.usefixtures("installed")
def test_a_strategy_brings_its_own_formulas(name_of: Callable[[str], str]) -> None:
    strategy = Choice(name_of("strategies"))
    plugins.load("strategies", strategy.name)
    assert arithmetic.state_bytes(strategy, 1000, 2) == 1000 * (14 / 2 + 2)
    assert arithmetic.wire_bytes(strategy, 1000, 2, 1, 4, 2) == 3 * 4000 / 2


@pytest.mark.usefixtures("installed")
def test_a_stored_dotted_name_is_never_imported(make_spec: Callable[..., RunSpec]) -> None:
    """A run folder from elsewhere must not decide which code is executed here."""
    stored = RunSpec.from_dict(replace(make_spec(), workload=Choice(by_module("workloads")), declared={}).to_dict())
    assert stored.traits.trains, "as runs with a strategy were read before workloads declared anything"
    assert arithmetic.state_bytes(Choice(by_module("strategies")), 1000, 2) is None
    assert "outside_package" not in sys.modules


@pytest.mark.parametrize("trait", [field.name for field in fields(Traits)])
def test_recorded_traits_are_read_where_the_plugin_is_missing(make_spec: Callable[..., RunSpec], trait: str) -> None:
    recorded = {"workloads": {"gone.workload": {"TRAITS": {trait: True, "of a later version": True}}}}
    spec = replace(make_spec(), workload=Choice("gone.workload"), declared=recorded)
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again.traits == spec.traits == Traits(**{trait: True})
    assert (again.run_id, again.cell) == (spec.run_id, spec.cell)
    assert again.to_dict()["declared"]["workloads"]["gone.workload"]["TRAITS"][trait] is True


def test_a_declaration_of_the_wrong_type_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dedent(MODULES["workloads"]).replace("TRAITS = Traits()", "TRAITS = {'trains': True}")
    (tmp_path / "holder").mkdir()
    (tmp_path / "holder" / "wrong.py").write_text(wrong)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RequestError, match=r"holder\.wrong\.TRAITS: got .*, expected a plugins\.Traits\."):
        plugins.load("workloads", "holder.wrong")


@NAMES
@pytest.mark.usefixtures("nursery")
def test_it_runs_and_is_reported(
    package: Path, tmp_path: Path, paceline: Callable[..., Any], name_of: Callable[[str], str]
) -> None:
    """A real process on this host. The report needs the exporter, but neither the workload nor the launcher."""
    file, out = tmp_path / "outside.yaml", tmp_path / "results"
    file.write_text(EXPERIMENT.format(workload=name_of("workloads"), launcher=name_of("launchers")))
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    ran = paceline("run", str(file), "--out", str(out), env={"PYTHONPATH": path}, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run_dir,) = store.run_dirs(out)
    recorded = json.loads((run_dir / "spec.json").read_text())["declared"]
    assert recorded["launchers"][name_of("launchers")]["UNMEASURED"] == {"account": "who pays"}
    assert store.read_spec(run_dir).run_id == run_dir.name
    done = paceline("report", str(out), "--format", by_module("exporters"), env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.read_text() for line in out.rglob("names.txt")] == [f"{run_dir.name} ok False\n"]
    without = paceline("report", str(out), "--format", "json")
    assert without.returncode == 0, without.stdout + without.stderr
    report = json.loads(next(out.rglob("report.json")).read_text())
    assert [(run["run"], run["status"]) for run in report["runs"]] == [(run_dir.name, "ok")]
    assert {row["kernel"] for row in report["measurements"]} == {"copy"}
