"""What two QLoRA benchmark write-ups state, recomputed from their own numbers: the tables of docs/seed-qlora.md."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from pathlib import Path

from paceline.analysis.cost.training import usd_per_1k_samples, usd_per_mtok
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Tuning
from paceline.host import prices
from paceline.host.machine import gpu_row
from paceline.models import adapters, arithmetic
from paceline.models.arithmetic import wire_factor
from paceline.models.shape import Shape

FOLDER = Path(__file__).parents[2] / "docs" / "seed-qlora"
NODES = ("1", "2", "4")
BASELINE, SHORTER, BEST = "1024 x 4", "512 x 4", "512 x 8"
RANK = 16
# Not stated: estimated from the code of its loader, which pads short texts to the sequence length.
PADDING_RATIO = 0.98


def stated() -> dict[tuple[str, str, str], float]:
    """By seed, name and case."""
    with (FOLDER / "stated.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {(row["seed"], row["name"], row["case"]): float(row["value"]) for row in rows}


S = stated()
PRICE, SPOT = S["000", "usd_per_gpu_hour", ""], S["001", "usd_per_gpu_hour_spot", ""]
LENGTH, BATCH = int(S["000", "sequence_length", ""]), int(S["000", "batch", ""])
MISTRAL = arithmetic.load(Choice("mistral-7b"))


def adapter_parameters(shape: Shape, rank: int, kv_heads: int) -> int:
    """LoRA on q, k, v and o: rank * (inputs + outputs) of each, in every layer."""
    h, wide, narrow = shape.hidden, shape.heads * shape.head_dim, kv_heads * shape.head_dim
    return shape.layers * rank * ((h + wide) + 2 * (h + narrow) + (wide + h))


def scaling_rows() -> list[tuple[str, ...]]:
    """Nodes, samples/s, efficiency stated and recomputed, time, cost and cost per 1000 samples of 10,000 samples."""
    rate = {n: S["000", "samples_per_s", n] for n in NODES}
    rows = []
    for n in NODES:
        count = int(n)
        efficiency = 100 * (rate[n] / count) / rate["1"]
        minutes = 10_000 / rate[n] / 60
        total = 10 * usd_per_1k_samples(PRICE, count, rate[n])
        rows.append(
            (
                n,
                f"{rate[n]:.2f}",
                f"{S['000', 'efficiency', n]:.0f}",
                f"{efficiency:.1f}",
                f"{S['000', 'time_10k', n]:.0f}",
                f"{minutes:.1f}",
                f"{S['000', 'cost_10k', n]:.2f}",
                f"{total:.3f}",
                f"{S['000', 'cost_1k', n]:.3f}",
                f"{total / 10:.4f}",
                f"{10 * usd_per_1k_samples(SPOT, count, rate[n]):.3f}",
                f"{usd_per_mtok(PRICE, count, rate[n] * LENGTH):.3f}",
            )
        )
    return rows


def slip_ratio(nodes: str) -> float:
    """Cost per 1000 samples that is stated, over what the stated total of 10,000 gives."""
    return S["000", "cost_1k", nodes] / (S["000", "cost_10k", nodes] / 10)


def suite_rows() -> list[tuple[str, ...]]:
    """The configurations with a number, per sample as stated and per token."""
    base = S["001", "samples_per_s", BASELINE]
    lengths = {BASELINE: 1024, SHORTER: 512, BEST: 512}
    rates = {BASELINE: base, SHORTER: base * S["001", "speedup", SHORTER], BEST: S["001", "samples_per_s", BEST]}
    rows = []
    for name, length in lengths.items():
        told = S.get(("001", "speedup", name), 1.0)
        tokens = rates[name] * length
        rows.append(
            (
                name.replace("x", "tokens x"),
                f"{rates[name]:.2f}" + (" (from the ratio)" if name == SHORTER else ""),
                f"{told:.2f}",
                f"{rates[name] / base:.2f}",
                f"{tokens:.0f}",
                f"{tokens / (base * 1024):.3f}",
                f"{usd_per_1k_samples(PRICE, 1, rates[name]):.3f}",
                f"{usd_per_mtok(PRICE, 1, tokens):.3f}",
            )
        )
    return rows


def per_token_gain() -> float:
    return S["001", "samples_per_s", BEST] * 512 / (S["001", "samples_per_s", BASELINE] * 1024) - 1


def savings() -> tuple[float, float]:
    """What the best configuration saves against the baseline: per sample as stated, and per token."""
    base, best = S["001", "samples_per_s", BASELINE], S["001", "samples_per_s", BEST]
    return 1 - base / best, 1 - base * 1024 / (best * 512)


def transfer_rows() -> list[tuple[str, ...]]:
    """Seconds of a ring all-reduce of the adapters' gradients, 2(n-1)/n of them over the stated link, alone and as a
    share of the step; beside it the time by which the stated rates say that a step grows."""
    link = S["000", "network", ""] * 1e9 / 8
    step = BATCH / S["000", "samples_per_s", "1"]
    told = S["000", "gradient_bytes", ""] * 1e6
    counted = adapter_parameters(MISTRAL, RANK, MISTRAL.kv_heads)
    sizes = {"as stated, 16 bit": told, "counted, 16 bit": 2.0 * counted, "counted, fp32": 4.0 * counted}
    rows = []
    for name, size in sizes.items():
        for n in ("2", "4"):
            seconds = wire_factor("all_reduce", int(n)) * size / link
            grown = BATCH * int(n) / S["000", "samples_per_s", n] - step
            rows.append(
                (
                    name,
                    n,
                    f"{size / 1e6:.1f}",
                    f"{1e3 * seconds:.1f}",
                    f"{100 * seconds / step:.2f}",
                    f"{1e3 * grown:.0f}",
                    f"{100 * seconds / grown:.0f}",
                )
            )
    return rows


def spreads() -> dict[str, float]:
    """Of the four nodes, in per cent of their mean: every usual meaning of "variance" in a table of rates."""
    rates = [S["001", "node", n] for n in ("1", "2", "3", "4")]
    mean = statistics.fmean(rates)
    found = {
        "(largest - smallest) / mean": max(rates) - min(rates),
        "largest distance from the mean": max(abs(rate - mean) for rate in rates),
        "standard deviation of a sample": statistics.stdev(rates),
        "standard deviation of a population": statistics.pstdev(rates),
    }
    return {name: 100 * value / mean for name, value in found.items()}


def utilisation() -> tuple[float, float]:
    """MFU and HFU of the one-node rate in per cent: LoRA's FLOPs, full checkpointing, the A10's dense 16-bit peak."""
    row = gpu_row("NVIDIA A10")
    assert row is not None
    tuning, keys = Tuning(rank=RANK), (LENGTH + 1) / 2
    flops = adapters.flops_per_token(MISTRAL, tuning, keys)
    again = adapters.recomputed_flops_per_token(MISTRAL, tuning, keys, "full")
    rate = S["000", "samples_per_s", "1"] * LENGTH
    peak = float(row["bf16"])
    return 100 * rate * flops / peak, 100 * rate * (flops + again) / peak


def price_rows() -> list[tuple[str, ...]]:
    """10,000 samples on one node at every known price of this GPU."""
    rate = S["000", "samples_per_s", "1"]
    found = sorted((p for p in prices.table() if p.holds_for("NVIDIA A10")), key=lambda p: p.usd_per_gpu_hour)
    return [
        (p.name, p.kind, f"{p.usd_per_gpu_hour:.2f}", f"{10 * usd_per_1k_samples(p.usd_per_gpu_hour, 1, rate):.2f}")
        for p in found
    ]


def padding() -> tuple[float, float]:
    """Non-pad tokens/s of one node, and USD per million of them, where PADDING_RATIO of what was counted is padding."""
    rate = S["000", "tokens_per_s", "1"] * (1 - PADDING_RATIO)
    return rate, usd_per_mtok(PRICE, 1, rate)


# --- the page ---

SCALING_HEAD = (
    *("nodes", "samples/s", "efficiency stated, %", "recomputed, %", "10,000 samples stated, min", "recomputed, min"),
    *("total stated, USD", "recomputed, USD", "1000 samples stated, USD", "recomputed, USD", "10,000 at spot, USD"),
    "USD/Mtoken",
)
SUITE_HEAD = (
    *("configuration", "samples/s", "speed-up stated", "per sample", "tokens/s", "per token"),
    *("1000 samples, USD", "USD/Mtoken"),
)
TRANSFER_HEAD = (
    *("gradients", "nodes", "size, MB", "all-reduce, ms", "of the step, %"),
    *("step grows by, ms", "explained, %"),
)


def blocks() -> dict[str, str]:
    """Every generated part of the page by the name of its mark."""
    return {
        "scaling": "\n\n".join((_table(SCALING_HEAD, scaling_rows()), _bullets(scaling_sentences()))),
        "suite": "\n\n".join((_table(SUITE_HEAD, suite_rows()), _bullets(suite_sentences()))),
        "network": "\n\n".join((_table(TRANSFER_HEAD, transfer_rows()), _bullets(network_sentences()))),
        "nodes": "\n\n".join((_table(("spread", "%"), _spread_rows()), _bullets(node_sentences()))),
        "price": _table(("price", "kind", "USD per GPU-hour", "10,000 samples, USD"), price_rows(), texts=2),
        "rest": _bullets(other_sentences()),
    }


def scaling_sentences() -> list[str]:
    per_1k = {n: usd_per_1k_samples(PRICE, int(n), S["000", "samples_per_s", n]) for n in NODES}
    node = S["001", "cost_10k_per_node", "4"]
    return [
        f"The stated cost of 1000 samples is {slip_ratio('2'):.2f} of a tenth of the stated total at 2 nodes "
        f"and {slip_ratio('4'):.2f} at 4: the total was divided by the nodes, so it is the share of one node. The cost "
        f"does not fall to {S['000', 'cost_1k', '4']:.3f} USD; it rises from {per_1k['1']:.4f} to "
        f"{per_1k['4']:.4f}, by {100 * (per_1k['4'] / per_1k['1'] - 1):.1f} %.",
        f"One of 4 nodes costs {per_1k['4'] * 10 / 4:.3f} USD for 10,000 samples; the other write-up says "
        f"{node:.2f}, which is {4 * node:.2f} in total.",
        f"The efficiency against one node is correct: {S['000', 'samples_per_s', '2']:.2f} / (2 x "
        f"{S['000', 'samples_per_s', '1']:.2f}) and {S['000', 'samples_per_s', '4']:.2f} / (4 x "
        f"{S['000', 'samples_per_s', '1']:.2f}). Every rate above one node is marked `~`: expected, not measured.",
    ]


def suite_sentences() -> list[str]:
    sample, token = savings()
    product = S["001", "speedup", SHORTER] * S["001", "speedup_batch", BEST]
    return [
        f"Per token the best configuration is {100 * per_token_gain():+.1f} %, not {S['001', 'speedup', BEST]:.2f} "
        "times: a sample of 512 tokens is half the work of one of 1024.",
        f"Per token the shorter sequence alone is {100 * (S['001', 'speedup', SHORTER] / 2 - 1):+.1f} %, and the "
        f"larger batch adds {100 * (S['001', 'speedup_batch', BEST] - 1):+.0f} %: fixing the supposed bottleneck "
        "cost throughput, and the supposedly additional change made the gain.",
        f"It saves {100 * sample:.1f} % per sample (stated: {S['001', 'cost_reduction', BEST]:.0f} %) and "
        f"{100 * token:.1f} % per token.",
        f"{S['001', 'speedup', SHORTER]:.2f} x {S['001', 'speedup_batch', BEST]:.2f} is {product:.2f}, and "
        f"{S['001', 'samples_per_s', BEST]:.2f} / {S['001', 'samples_per_s', BASELINE]:.2f} is "
        f"{S['001', 'samples_per_s', BEST] / S['001', 'samples_per_s', BASELINE]:.2f}: the factors agree within "
        "their rounding.",
        "Two of the other three configurations (other optimizer, rank 8) are stated as 0 %, without a rate, an "
        "interval or a number of repeats; fp16 has no number at all.",
    ]


def network_sentences() -> list[str]:
    counted = adapter_parameters(MISTRAL, RANK, MISTRAL.kv_heads)
    wide = adapter_parameters(MISTRAL, RANK, MISTRAL.heads)
    step = BATCH / S["000", "samples_per_s", "1"]
    return [
        f"Rank {RANK} on q, k, v and o of Mistral-7B is {counted:,} parameters. The stated "
        f"{S['000', 'adapters', '']:.1f} million is {wide:,}: it counts k and v as wide as q, but there are "
        f"{MISTRAL.kv_heads} key-value heads and {MISTRAL.heads} query heads.",
        f"The step of one node is {BATCH} / {S['000', 'samples_per_s', '1']:.2f} = {step:.2f} s, as stated. The stated "
        f"{S['000', 'all_reduce', '']:.0f} ms have the right order of magnitude, and are under 2 % of it.",
        "So the network does not explain the stated efficiency: according to the rates, a step grows by several times "
        "the duration of an all-reduce over that link, even without any overlap with the backward pass. Either the "
        "rates or the link are not as stated.",
    ]


def _spread_rows() -> list[tuple[str, str]]:
    return [(name, f"{value:.2f}") for name, value in spreads().items()]


def node_sentences() -> list[str]:
    return [
        f"The stated {S['001', 'node_variance', '']:.1f} % is none of them.",
        "There is one rate per node: without repeats, differences between nodes cannot be distinguished from "
        "differences between runs of one node.",
    ]


def other_sentences() -> list[str]:
    mfu, hfu = utilisation()
    rate, usd = padding()
    return [
        f"{S['001', 'utilisation_low', '']:.0f} to {S['001', 'utilisation_high', '']:.0f} % GPU utilisation is the "
        f"share of time in which any kernel ran. The stated rate is {mfu:.1f} % MFU and {hfu:.1f} % HFU of the A10's "
        "dense 16-bit peak (LoRA's FLOPs, causal attention, full checkpointing).",
        f"The loader pads short texts to the sequence length and counts every token. If "
        f"{100 * PADDING_RATIO:.0f} % of the counted tokens are padding, "
        f"{S['000', 'tokens_per_s', '1']:.0f} tokens/s are {rate:.1f} non-pad tokens/s, and a million of them cost "
        f"{usd:.2f} USD. Neither write-up states the length of its samples before padding.",
    ]


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]], texts: int = 1) -> str:
    columns = list(head)
    rule = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))
