"""What the client holds on this machine, against a server of known law in another process; and what others hold.

First the goal: so many answers under way at once, so many events a second. The server writes its own clock into every
token, so that the error of each stamp is known, not estimated. Goals on two cores: 5,000 streams, 25,000 events/s, 99 %
of stamps within 1 ms, TTFT and TPOT within 1 % of the law at p50 and 5 % at p99, gaps between requests exponential.

Then the same Poisson load through this client, guidellm and `vllm bench serve`, one after the other, each against a
fresh server: what each reads where the law says TTFT 100 ms and 20 ms a token. `server late` is what the server says of
itself in that run: no tool can be blamed for that much.

    python benchmarks/loadgen.py [--streams 5000] [--events 25000] [--seconds 20] [--shards 1]
                                 [--guidellm FILE] [--vllm FILE] [--rates 20,100] [--requests 200]

guidellm and vllm are executables of environments of their own (or the variables PACELINE_GUIDELLM, PACELINE_VLLM); one
that is not named is left out, and said so. Run it on a machine that does nothing else. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.serving import selftest
from paceline.serving.client import audit, schedule, worker_pool
from paceline.serving.client.schedule import ShardResult, Target
from paceline.serving.mock import Latencies

LAW = Latencies(ttft_s=0.1, itl_s=0.02, tokens=32)
PROMPT_TOKENS = 8
PEER_S = 900.0
# The critical value of sqrt(n) D at 1 %.
MOST_DISTANCE = 1.63
TRAPS = (
    "Every tool's TTFT here starts when it sent the request; Paceline's results start when the request was due."
    " guidellm also reports a latency from its schedule (`request_scheduled_latency`), but no such TTFT.",
    "guidellm: `time_per_output_token` is (last token - send) / tokens, so it has the TTFT in it; its"
    " `inter_token_latency` is what others call TPOT, and is shown.",
    "vllm bench serve: the gaps of a Poisson load are rescaled so that the last request falls on requests / rate: its"
    " bursts and lulls are not those of the law. With --backend openai-chat an empty role chunk counts as first token.",
    "CPU of the others is that of the whole command, with its start; this client's is that of the load.",
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one tool says of one load, milliseconds; None where it does not say it."""

    tool: str
    rate_per_s: float
    answered: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    server_late_p99_ms: float | None = None
    cpu_s: float | None = None
    verdict: str = "does not say"


# --- the goal ---


def distance_from_poisson(shards: Sequence[ShardResult], rate_per_s: float) -> float:
    """Kolmogorov and Smirnov's sqrt(n) D between the gaps of the requests as they were sent and the exponential law."""
    sent = np.sort([each.sent_ns for shard in shards for each in shard.results if each.sent_ns is not None])
    gaps = np.sort(np.diff(sent) / 1e9)
    law, n = 1 - np.exp(-rate_per_s * gaps), len(gaps)
    apart = np.maximum(np.arange(1, n + 1) / n - law, law - np.arange(n) / n)
    return float(apart.max() * math.sqrt(n))


def hold(asked: argparse.Namespace) -> dict[str, Any]:
    rung = selftest.one(asked.events, asked.streams, asked.seconds, asked.shards)
    law, verdict = rung.latencies, rung.verdict
    distance = distance_from_poisson(rung.shards, asked.streams / (law.ttft_s + law.itl_s * law.tokens))
    errors = np.percentile(rung.stamp_errors_s, (50, 99)) * 1e3 if len(rung.stamp_errors_s) else (None, None)
    events = sum(each.pieces for each in rung.answered)
    print(rung.text)
    print(
        f"gaps of the requests as sent: {distance:.2f} from the exponential law (below {MOST_DISTANCE} they cannot be "
        f"distinguished), client {sum(s.cpu_s for s in rung.shards) / max(events, 1) * 1e6:.1f} us of a core per event"
    )
    return {
        "streams": rung.streams,
        "events_per_s": rung.events_per_s,
        "stamp_error_ms": dict(zip(("p50", "p99"), errors, strict=True)),
        "schedule_lag_p99_s": verdict.schedule_lag_p99_s,
        "read_lag_p99_s": verdict.read_lag_p99_s,
        "coalesced_ratio": verdict.coalesced_ratio,
        "cpu_ratio": verdict.cpu_ratio,
        "cpu_us_per_event": sum(shard.cpu_s for shard in rung.shards) / max(events, 1) * 1e6,
        "off_the_law": rung.off,
        "distance_from_poisson": distance,
        "reasons": rung.reasons,
    }


# --- side by side ---


def ours(rate: float, count: int, port: int) -> Reading:
    whole = schedule.Plan(
        due_ns=schedule.poisson(rate, count, seed=1),
        samples=np.zeros(count, dtype=np.int64),
        replicas=schedule.spread(count, 1),
    )
    payload, targets = selftest.completion(LAW.tokens, port), [Target(host="127.0.0.1", port=port)]
    room = round(rate * (LAW.ttft_s + LAW.itl_s * LAW.tokens) * 1.2) + 8
    shards = worker_pool.run(
        [schedule.assignment_of(whole, whole.shares(1)[0], lambda _: payload, targets, connections=room)]
    )
    good = [each for shard in shards for each in shard.results if each.error is None]
    ttft = [(h.first_ns - h.sent_ns) / 1e6 for h in good if h.first_ns and h.sent_ns]
    tpot = [(h.last_ns - h.first_ns) / 1e6 / (h.pieces - 1) for h in good if h.last_ns and h.first_ns and h.pieces > 1]
    said = audit.judge(shards)
    return Reading(
        tool="paceline",
        rate_per_s=rate,
        answered=len(good),
        **_percentiles(ttft, tpot),
        cpu_s=sum(shard.cpu_s for shard in shards),
        verdict="VALID" if said.is_valid else f"INVALID(client): {'; '.join(said.reasons)}",
    )


def _percentiles(ttft: Sequence[float], tpot: Sequence[float]) -> dict[str, float | None]:
    pairs = [(name, values, p) for name, values in (("ttft", ttft), ("tpot", tpot)) for p in (50, 99)]
    return {f"{name}_p{p}_ms": float(np.percentile(values, p)) if values else None for name, values, p in pairs}


def guidellm(program: str, tokenizer: Path, rate: float, count: int, port: int) -> Reading:
    with tempfile.TemporaryDirectory() as kept:
        out = Path(kept, "benchmarks.json")
        backend = f"kind=openai_http,target=http://127.0.0.1:{port},model=mock,request_format=/v1/completions"
        arguments = ["run", "--backend", backend, "--profile", f"kind=poisson,rate={rate}"]
        arguments += [
            "--constraint",
            f"kind=max_requests,count={count}",
            "--tokenizer",
            f"kind=hf_auto,model={tokenizer}",
        ]
        arguments += ["--data", f"kind=json_file,path={_prompts(Path(kept, 'prompts.jsonl'), count)}"]
        arguments += ["--output", f"kind=json,path={out}", "--disable-console"]
        cpu_s = _run([program, *arguments])
        metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    ttft, each = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return Reading(
        tool="guidellm",
        rate_per_s=rate,
        answered=int(metrics["request_totals"]["successful"]),
        ttft_p50_ms=ttft["percentiles"]["p50"],
        ttft_p99_ms=ttft["percentiles"]["p99"],
        tpot_p50_ms=each["percentiles"]["p50"],
        tpot_p99_ms=each["percentiles"]["p99"],
        cpu_s=cpu_s,
    )


def _prompts(path: Path, count: int) -> Path:
    row = {"prompt": " ".join(["w1"] * PROMPT_TOKENS), "output_tokens_count": LAW.tokens}
    path.write_text((json.dumps(row) + "\n") * count)
    return path


def vllm(program: str, tokenizer: Path, rate: float, count: int, port: int) -> Reading:
    with tempfile.TemporaryDirectory() as kept:
        arguments = [
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            f"http://127.0.0.1:{port}",
            "--model",
            "mock",
        ]
        arguments += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--disable-tqdm", "--save-result"]
        arguments += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(LAW.tokens)]
        arguments += ["--num-prompts", str(count), "--request-rate", str(rate), "--metric-percentiles", "50,99"]
        arguments += ["--result-dir", kept, "--result-filename", "result.json"]
        cpu_s = _run([program, *arguments])
        result = json.loads(Path(kept, "result.json").read_text())
    names = [f"{metric}_p{p}_ms" for metric in ("ttft", "tpot") for p in (50, 99)]
    values = {name: result["_".join((name.split("_")[1], name.split("_")[0], "ms"))] for name in names}
    return Reading(tool="vllm bench", rate_per_s=rate, answered=result["completed"], **values, cpu_s=cpu_s)


def _run(command: Sequence[str]) -> float:
    """Seconds of processor time of the whole command; its own words only where it fails."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        command, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    before = os.times()
    said, _ = process.communicate(timeout=PEER_S)
    after = os.times()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {said[-2000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def make_tokenizer(directory: Path) -> Path:
    """A few words: the others make their prompts with a tokenizer, and none may be fetched."""
    words = {f"w{n}": n for n in range(512)} | {"<unk>": 512}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 4096}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def side_by_side(tools: dict[str, Callable[[float, int, int], Reading]], rate: float, count: int) -> list[Reading]:
    found = []
    for name, tool in tools.items():
        with selftest.served(LAW) as port:
            try:
                reading = tool(rate, count, port)
            except (RuntimeError, KeyError, OSError, subprocess.TimeoutExpired) as error:
                print(f"{name} at {rate:g}/s: {type(error).__name__}: {error}")
                continue
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/law") as law:
                late = json.load(law)["late_s"].get("p99")
        found.append(Reading(**asdict(reading) | {"server_late_p99_ms": None if late is None else late * 1e3}))
    return found


def table(readings: Sequence[Reading]) -> str:
    heads = ("tool", "rate/s", "answered", "TTFT p50", "p99", "TPOT p50", "p99", "server late p99", "CPU s", "says")
    rows = [heads]
    for each in readings:
        cells = (
            each.ttft_p50_ms,
            each.ttft_p99_ms,
            each.tpot_p50_ms,
            each.tpot_p99_ms,
            each.server_late_p99_ms,
            each.cpu_s,
        )
        shown = ["-" if value is None else f"{value:.2f}" for value in cells]
        rows.append((each.tool, f"{each.rate_per_s:g}", str(each.answered), *shown, each.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads) - 1)]
    return "\n".join("  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000, help="0 leaves the goal out")
    parser.add_argument("--events", type=float, default=25_000, help="events per second of all streams")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--guidellm", default=os.environ.get("PACELINE_GUIDELLM"))
    parser.add_argument("--vllm", default=os.environ.get("PACELINE_VLLM"))
    parser.add_argument("--rates", default="20,100", help="requests per second of the loads that all tools are given")
    parser.add_argument("--requests", type=int, default=200, help="of each of those loads")
    asked = parser.parse_args()
    result: dict[str, Any] = {"goal": hold(asked) if asked.streams else None}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = make_tokenizer(Path(directory))
        tools: dict[str, Callable[[float, int, int], Reading]] = {"paceline": ours}
        for name, program, tool in (("guidellm", asked.guidellm, guidellm), ("vllm bench", asked.vllm, vllm)):
            if program:
                tools[name] = partial(tool, program, tokenizer)
            else:
                print(f"{name}: not named, left out")
        readings = [
            each for rate in asked.rates.split(",") for each in side_by_side(tools, float(rate), asked.requests)
        ]
    print(f"milliseconds; the law: TTFT {LAW.ttft_s * 1e3:.0f}, TPOT {LAW.itl_s * 1e3:.0f}")
    print(table(readings))
    print("\n".join(TRAPS))
    print(json.dumps(result | {"side_by_side": [asdict(each) for each in readings]}))


if __name__ == "__main__":
    main()
