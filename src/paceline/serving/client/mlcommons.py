"""MLCommons LoadGen (package mlcommons-loadgen) against the same replicas: its schedule, its verdict, its own logs.

LoadGen decides what is sent and when; `on_demand` sends it. It runs in a process of its own: its state is global, and a
crash must not end the run. Its logs are kept byte for byte, under names that say whose they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.experiment.serving import PERCENTILE
from paceline.host.processes import end_with_parent
from paceline.serving.client.on_demand import OnDemandClient, OnDemandRequest
from paceline.serving.client.schedule import Target

# Our scenarios -> LoadGen's. The others have no counterpart there.
SCENARIOS = {"offline": "Offline", "server": "Server", "interactive": "Server", "single_stream": "SingleStream"}
# The package's import name.
PACKAGE = "mlperf_loadgen"
INSTALL = "'paceline[loadgen]'"
# Its files are PREFIX + detail + SUFFIX + .txt and so on. The suffix is the rank of the client.
PREFIX, SUFFIX = "loadgen-", "-0"
DETAIL = f"{PREFIX}detail{SUFFIX}.txt"
LOGS = (DETAIL, f"{PREFIX}summary{SUFFIX}.txt", f"{PREFIX}accuracy{SUFFIX}.json")
_MARK = ":::MLLOG "
NS, MS = 1e9, 1e3
# How often progress is reported.
REPORT_S = 0.5
# Used for no limit: longer than any request may take.
NO_LIMIT_S = 1e6
# What it means if one of its tests fails.
_TESTS = {
    "result_perf_constraints_met": "more requests were late than the percentile allows",
    "result_min_duration_met": "it was shorter than the minimum duration",
    "result_min_queries_met": "it sent fewer requests than the minimum",
}
# Adds no information.
_EMPTY_PHRASES = ("Run unsuccessful.",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """LoadGen's settings. expected_per_s: the size of the one query of `Offline`. cap: most requests in flight."""

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
        """Seeds of its three generators, derived from the run's seed."""
        names = ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed")
        return {name: self.seed + number for number, name in enumerate(names)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What LoadGen concluded, in its own words and units: settings are those in effect, numbers its results. It does
    not know how many requests were sent (asked) and failed (errors), nor the CPU share of sending them."""

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
) -> Conclusion:
    """Run a whole test; its logs are in `folder`. payloads[sample][replica] are HTTP requests."""
    require_installed()
    if not targets:
        raise UnsupportedError("no replica is left for LoadGen: all died during the load before it")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(terms, payloads, targets, folder, there), daemon=True)
    process.start()
    there.close()
    try:
        while not here.poll(REPORT_S):
            beat()
        sent, errors, cpu_ratio = here.recv()
    except EOFError:
        process.join()
        raise UnsupportedError(f"the LoadGen process ended with exit code {process.exitcode}; see log.txt") from None
    finally:
        here.close()
        process.terminate()
        process.join()
    return replace(read_back(folder / DETAIL), asked=sent, errors=errors, cpu_ratio=cpu_ratio)


def _work(
    terms: Terms, payloads: Sequence[Sequence[bytes]], targets: Sequence[Target], folder: Path, pipe: Any
) -> None:
    end_with_parent()
    package = importlib.import_module(PACKAGE)
    # Replicas take turns; None picks the least busy one.
    replicas: Sequence[int | None] = [None] if terms.shared else range(len(targets))
    turns = itertools.cycle(replicas)
    with OnDemandClient(targets, terms.cap, terms.timeout_s) as client:

        def issue(queries: Sequence[Any]) -> None:
            client.send([_request(package, query.id, payloads[query.index], next(turns)) for query in queries])

        under_test = package.ConstructSUT(issue, _nothing)
        library = package.ConstructQSL(terms.samples, terms.samples, _nothing, _nothing)
        output, logs = package.LogOutputSettings(), package.LogSettings()
        output.outdir, output.prefix, output.suffix = str(folder), PREFIX, SUFFIX
        output.copy_summary_to_stdout = False
        logs.log_output, logs.enable_trace = output, False
        # An audit file in the current directory must not change the test.
        package.StartTestWithLogSettings(under_test, library, settings_of(package, terms), logs, "no audit file")
        package.DestroyQSL(library)
        package.DestroySUT(under_test)
    account = client.account
    pipe.send((account.sent, dict(account.errors), account.cpu_s / account.wall_s if account.wall_s > 0 else None))


def _nothing(*_: object) -> None:
    """Samples are always in memory, and there is nothing to flush."""


def _request(package: ModuleType, query: int, payloads: Sequence[bytes], replica: int | None) -> OnDemandRequest:
    def first() -> None:
        package.FirstTokenComplete([package.QuerySampleResponse(query, 0, 0)])

    def ended(tokens: int) -> None:
        # LoadGen knows no failures and would wait forever: a failed request is an answer without tokens.
        package.QuerySamplesComplete([package.QuerySampleResponse(query, 0, 0, tokens)])

    return OnDemandRequest(payloads=payloads, replica=replica, first=first, ended=ended)


def settings_of(package: ModuleType, terms: Terms) -> Any:
    settings = package.TestSettings()
    settings.scenario = getattr(package.TestScenario, SCENARIOS[terms.scenario])
    settings.mode = package.TestMode.PerformanceOnly
    settings.min_query_count = terms.requests
    settings.min_duration_ms = round(terms.least_s * MS)
    settings.use_token_latencies = True
    settings.ttft_latency = round((terms.ttft_s or NO_LIMIT_S) * NS)
    settings.tpot_latency = round((terms.tpot_s or NO_LIMIT_S) * NS)
    settings.server_target_latency_percentile = PERCENTILE
    settings.server_target_qps = terms.rate_per_s or 1.0
    settings.offline_expected_qps = terms.expected_per_s
    for name, seed in terms.seeds.items():
        setattr(settings, name, seed)
    return settings


def read_back(detail: Path) -> Conclusion:
    """LoadGen's conclusion from its own log; UnsupportedError if the log has no verdict."""
    entries: dict[str, Any] = {}
    for line in detail.read_text(errors="replace", encoding="utf-8").splitlines():
        if line.startswith(_MARK):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line.removeprefix(_MARK))
                entries[str(entry["key"])] = entry["value"]
    verdict = entries.get("result_validity")
    if not isinstance(verdict, str):
        raise UnsupportedError(f"LoadGen wrote no verdict; see {detail.name} in the run directory")
    numbers = {key: value for key, value in entries.items() if type(value) in (int, float)}
    settings = {key.removeprefix("effective_"): each for key, each in entries.items() if key.startswith("effective_")}
    reasons = [text for key, text in _TESTS.items() if entries.get(key) is False]
    if entries.get("early_stopping_met") is False:
        outcomes = " ".join(str(entries.get(f"early_stopping_{limit}_result", "")) for limit in ("ttft", "tpot"))
        parts = [" ".join(part.split()) for part in outcomes.split(" * ")]
        words = " ".join(part for part in parts if part and part not in _EMPTY_PHRASES)
        reasons.append(f"early stopping: {words.rstrip('.')}")
    for limit in ("ttft_latency", "tpot_latency"):
        if f"requested_{limit}" in entries:
            settings[limit] = entries[f"requested_{limit}"]
    return Conclusion(
        version=str(entries.get("loadgen_version", "")).partition(" ")[0],
        verdict=verdict,
        reasons=tuple(reasons),
        settings={key: value for key, value in settings.items() if isinstance(value, str | int | float)},
        numbers={k.removeprefix("result_"): float(v) for k, v in numbers.items() if k.startswith("result_")},
    )
