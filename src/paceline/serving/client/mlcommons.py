"""LoadGen itself (the package mlcommons-loadgen) over the same replicas: its schedule, its verdict, its own logs.

LoadGen decides what is asked and when; `courier` carries it out. It runs in a process of its own: its state is global,
and what ends it must not end the run. Its logs are kept to the byte, under names that say whose they are.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.experiment.serving import PERCENTILE
from paceline.host.processes import end_with_parent
from paceline.serving.client.courier import Courier, Errand
from paceline.serving.client.orders import Target

# Ours -> its own. The others have no counterpart there.
SCENARIOS = {"offline": "Offline", "server": "Server", "interactive": "Server", "single_stream": "SingleStream"}
# The name under which the package is imported is its maker's.
PACKAGE = "mlperf_loadgen"
INSTALL = "'paceline[loadgen]'"
# Its files are called PREFIX + detail + SUFFIX + .txt, and so on: of the rank that is the client.
PREFIX, SUFFIX = "loadgen-", "-0"
DETAIL = f"{PREFIX}detail{SUFFIX}.txt"
LOGS = (DETAIL, f"{PREFIX}summary{SUFFIX}.txt", f"{PREFIX}accuracy{SUFFIX}.json")
_MARK = ":::MLLOG "
NS, MS = 1e9, 1e3
# How often whoever waits is told how far it is.
LOOK_S = 0.5
# Where there is no limit: longer than any request may take.
NO_LIMIT_S = 1e6
# What each test of it means where it was not passed.
_TESTS = {
    "result_perf_constraints_met": "more requests were late than its percentile allows",
    "result_min_duration_met": "it did not last as long as asked",
    "result_min_queries_met": "fewer requests than asked",
}
# Says what was seen already.
_IDLE_WORDS = ("Run unsuccessful.",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What LoadGen is told. expected_per_s: what `Offline` makes its one query long enough by; limits in seconds, None
    where there is none. cap: most requests in flight."""

    scenario: str
    samples: int
    requests: int
    seed: int
    rate_per_s: float | None
    expected_per_s: float
    least_s: float
    ttft_s: float | None
    tpot_s: float | None
    cap: int | None
    timeout_s: float
    shared: bool = False

    @property
    def seeds(self) -> dict[str, int]:
        """Of its three generators, from the one of the run."""
        names = ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed")
        return {name: self.seed + number for number, name in enumerate(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What it concluded, in its own words and units; settings are those it says were in effect, numbers its results.
    How many requests were asked and failed meanwhile, and the share of a core that asking took, it does not know."""

    version: str
    verdict: str
    reasons: tuple[str, ...]
    settings: Mapping[str, Any]
    numbers: Mapping[str, float]
    asked: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    cpu_ratio: float | None = None


def is_installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def require_installed() -> None:
    if not is_installed():
        raise MissingPackageError("mlcommons-loadgen", "loadgen=mlcommons", INSTALL)


def drive(
    terms: Terms,
    payloads: Sequence[Sequence[bytes]],
    targets: Sequence[Target],
    folder: Path,
    beat: Callable[[], None] = lambda: None,
) -> Told:
    """A whole test; its logs are in the folder afterwards. payloads are those of each sample for each replica."""
    require_installed()
    if not targets:
        raise UnsupportedError("no replica is left for LoadGen to ask: all died during the load before it")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(terms, payloads, targets, folder, there), daemon=True)
    process.start()
    there.close()
    try:
        while not here.poll(LOOK_S):
            beat()
        asked, errors, cpu_ratio = here.recv()
    except EOFError:
        process.join()
        raise UnsupportedError(f"LoadGen's process ended with code {process.exitcode}; see log.txt") from None
    finally:
        here.close()
        process.terminate()
        process.join()
    return replace(read_back(folder / DETAIL), asked=asked, errors=errors, cpu_ratio=cpu_ratio)


# --- its process ---


def _work(
    terms: Terms, payloads: Sequence[Sequence[bytes]], targets: Sequence[Target], folder: Path, pipe: Any
) -> None:
    end_with_parent()
    package = importlib.import_module(PACKAGE)
    with Courier(targets, terms.cap, terms.timeout_s) as courier:
        system = _System(package, courier, payloads, None if terms.shared else len(targets))
        under_test = package.ConstructSUT(system.issue, _nothing)
        library = package.ConstructQSL(terms.samples, terms.samples, _nothing, _nothing)
        # An audit file that lies about in the current folder must not change the test.
        package.StartTestWithLogSettings(
            under_test, library, settings_of(package, terms), _logging(package, folder), "no audit file"
        )
        package.DestroyQSL(library)
        package.DestroySUT(under_test)
    account = courier.account
    pipe.send((account.asked, dict(account.errors), account.cpu_s / account.wall_s if account.wall_s > 0 else None))


def _nothing(*_: object) -> None:
    """Samples are in memory all the time, and there is nothing to flush."""


class _System:
    """The system under test as LoadGen sees it. replicas: how many take turns; None where the free one is asked."""

    def __init__(
        self, package: ModuleType, courier: Courier, payloads: Sequence[Sequence[bytes]], replicas: int | None
    ) -> None:
        self._package, self._courier, self._payloads, self._replicas = package, courier, payloads, replicas
        self._issued = 0

    def issue(self, queries: Sequence[Any]) -> None:
        self._courier.take([self._errand(query.id, query.index) for query in queries])

    def _errand(self, query: int, sample: int) -> Errand:
        package = self._package
        turn = self._issued % self._replicas if self._replicas else None
        self._issued += 1

        def first() -> None:
            package.FirstTokenComplete([package.QuerySampleResponse(query, 0, 0)])

        def ended(tokens: int) -> None:
            # It knows no failure and would wait for ever: a failed request is an answer without tokens, and counted.
            package.QuerySamplesComplete([package.QuerySampleResponse(query, 0, 0, tokens)])

        return Errand(payloads=self._payloads[sample], replica=turn, first=first, ended=ended)


def settings_of(package: ModuleType, terms: Terms) -> Any:
    found = package.TestSettings()
    found.scenario = getattr(package.TestScenario, SCENARIOS[terms.scenario])
    found.mode = package.TestMode.PerformanceOnly
    found.min_query_count = terms.requests
    found.min_duration_ms = round(terms.least_s * MS)
    found.use_token_latencies = True
    found.ttft_latency = round((terms.ttft_s or NO_LIMIT_S) * NS)
    found.tpot_latency = round((terms.tpot_s or NO_LIMIT_S) * NS)
    found.server_target_latency_percentile = PERCENTILE
    found.server_target_qps = terms.rate_per_s or 1.0
    found.offline_expected_qps = terms.expected_per_s
    for name, seed in terms.seeds.items():
        setattr(found, name, seed)
    return found


def _logging(package: ModuleType, folder: Path) -> Any:
    output = package.LogOutputSettings()
    output.outdir, output.prefix, output.suffix = str(folder), PREFIX, SUFFIX
    output.copy_summary_to_stdout = False
    found = package.LogSettings()
    found.log_output, found.enable_trace = output, False
    return found


# --- what it wrote ---


def read_back(detail: Path) -> Told:
    """Its verdict from its own log; UnsupportedError where the log has none."""
    found = dict(_entries(detail.read_text(errors="replace")))
    verdict = found.get("result_validity")
    if not isinstance(verdict, str):
        raise UnsupportedError(f"LoadGen wrote no verdict; see {detail.name} in the run folder")
    results = {key: value for key, value in found.items() if key.startswith("result_") and _is_number(value)}
    effective = {key.removeprefix("effective_"): value for key, value in found.items() if key.startswith("effective_")}
    limits = {key: found[f"requested_{key}"] for key in ("ttft_latency", "tpot_latency") if f"requested_{key}" in found}
    return Told(
        version=str(found.get("loadgen_version", "")).partition(" ")[0],
        verdict=verdict,
        reasons=tuple(_reasons(found)),
        settings={key: value for key, value in (effective | limits).items() if isinstance(value, str | int | float)},
        numbers={key.removeprefix("result_"): float(value) for key, value in results.items()},
    )


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    for line in text.splitlines():
        if line.startswith(_MARK):
            try:
                entry = json.loads(line.removeprefix(_MARK))
                yield str(entry["key"]), entry["value"]
            except (ValueError, KeyError, TypeError):
                continue


def _reasons(found: Mapping[str, Any]) -> Iterator[str]:
    """The tests that were not passed, and what early stopping says about them."""
    yield from (text for key, text in _TESTS.items() if found.get(key) is False)
    if found.get("early_stopping_met") is False:
        said = " ".join(str(found.get(f"early_stopping_{limit}_result", "")) for limit in ("ttft", "tpot"))
        parts = [" ".join(part.split()) for part in said.split(" * ")]
        words = " ".join(part for part in parts if part and part not in _IDLE_WORDS)
        yield f"early stopping: {words.rstrip('.')}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
