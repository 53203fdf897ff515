"""Replicas of our own on the GPU: every way of making a step answers as a plain loop does, and a whole run is asked."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")
PROMPTS = [[5, 6, 7, 8, 9], [3], [11] * 40, [1, 2]]
ANSWER = 24


def settings() -> Any:
    from paceline.serving.replica.settings import Settings

    return Settings(engine="transformers", model="tiny-llama", device="cuda", max_batch=4, max_length=128)


def sharpened_model(precision: str) -> Any:
    """Weights as they are drawn give nearly the same token for ever; larger ones tell answers apart."""
    import torch

    from paceline.serving.replica import weights

    torch.set_float32_matmul_precision("highest")
    model = weights.open_model(replace(settings(), precision=precision), 0, torch.device("cuda", 0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def opened(model: Any, compiled: bool, graph: bool, fused: bool = False) -> Any:
    from paceline.serving.replica.decoding import Decoding, join_projections

    decoding = Decoding(join_projections(model), slots=4, length=128, reaches=(64, 128), heads=2, width=32)
    if compiled:
        decoding.compile_layers()
    assert decoding.fuse() if fused else not decoding.is_fused, decoding.refusal
    decoding.warm_up(graph)
    return decoding


def answers(model: Any, compiled: bool, graph: bool, fused: bool = False) -> list[list[int]]:
    decoding = opened(model, compiled, graph, fused)
    rows = [2, 0, 3, 1]
    found = [[token] for token in decoding.read(rows, PROMPTS)]
    for number in range(ANSWER - 1):
        said = decoding.step(4, 64 if number < 10 else 128)
        for row, answer in zip(rows, found, strict=True):
            answer.append(said[row])
    return found


def answers_by_width(decoding: Any) -> list[list[list[int]]]:
    """Answers to the first prompts, one after the other more of them, so that steps of every width make them."""
    found = []
    for used in (1, 2, 3, 4):
        asked = [[token] for token in decoding.read([*range(used)], PROMPTS[:used])]
        # What a step must neither read nor change.
        decoding.positions[used:] = 100
        for number in range(ANSWER - 1):
            for answer, token in zip(asked, decoding.step(used, 64 if number < 10 else 128), strict=False):
                answer.append(token)
        width = next(width for width in decoding.widths if width >= used)
        assert decoding.positions[width:].tolist() == [100] * (4 - width)
        found.append(asked)
    return found


def answers_in_pieces(decoding: Any, size: int) -> list[list[int]]:
    """Prompts are read in pieces, with steps between them that compute slots that are read in part, too; requests come
    and go, and take slots again. In the order of PROMPTS, each three times."""
    from paceline.serving.replica.batching import BatchedRequest, Batching, tokens_of_pass

    slots = Batching(replace(settings(), prefill_chunk=size))
    prompts = [*PROMPTS, *PROMPTS, *PROMPTS]
    found: list[list[int]] = [[] for _ in prompts]
    waiting = deque(enumerate(prompts))
    for _ in range(1000):
        if waiting:
            number, prompt = waiting.popleft()
            slots.arrive(BatchedRequest(number, prompt, ANSWER, frozenset()))
        for tokens in tokens_of_pass(decoding, slots):
            for number, token, _ in tokens:
                found[number].append(token)
        if slots.is_idle and not waiting:
            return found
    raise AssertionError("no request ends")


def plain(model: Any, prompt: list[int]) -> list[int]:
    import torch

    tokens = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        for _ in range(ANSWER):
            last = model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(dim=-1)
            tokens = torch.cat((tokens, last), dim=1)
    return [int(token) for token in tokens[0, len(prompt) :].tolist()]


@pytest.mark.parametrize(("compiled", "graph"), [(False, False), (False, True), (True, False), (True, True)])
def test_every_way_of_making_a_step_answers_as_a_plain_loop_does(compiled: bool, graph: bool) -> None:
    """In fp32, where no other order of sums changes the largest of 256 scores."""
    model = sharpened_model("fp32")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 8
    assert answers(model, compiled, graph) == expected


@pytest.mark.parametrize("graph", [False, True])
def test_steps_of_every_width_answer_as_a_plain_loop_does(graph: bool) -> None:
    model = sharpened_model("fp32")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    decoding = opened(model, False, graph)
    assert decoding.widths == (1, 2, 4)
    assert len(decoding._graphs) == (6 if graph else 0), "by width and reach"
    assert answers_by_width(decoding) == [expected[:used] for used in (1, 2, 3, 4)]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("size", [0, 3, 16])
def test_prompts_read_in_pieces_are_answered_as_a_plain_loop_does(size: int, graph: bool) -> None:
    model = sharpened_model("fp32")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    assert answers_in_pieces(opened(model, False, graph), size) == expected * 3


def test_bf16_answers_are_the_same_with_and_without_a_graph() -> None:
    model = sharpened_model("bf16")
    assert answers(model, False, True) == answers(model, False, False)
    assert answers(model, False, True, fused=True) == answers(model, False, False, fused=True)


@pytest.mark.parametrize(
    ("compiled", "graph", "fused"),
    [(False, False, False), (True, False, False), (True, True, False), (False, False, True), (False, True, True)],
)
def test_bf16_answers_are_the_best_that_fp32_knows_within_rounding(compiled: bool, graph: bool, fused: bool) -> None:
    """With our attention, and with all of our kernels. Rounding to bf16 moves a score of this model by 0.05 standard
    deviations of all scores, at most by 0.2; any token but a few is two or more behind the best."""
    model = sharpened_model("bf16")
    exact = copy.deepcopy(model).float()
    behind = how_far_behind(exact, PROMPTS, answers(model, compiled, graph, fused))
    assert len(behind) == len(PROMPTS) * ANSWER
    assert max(behind) < 0.4


def how_far_behind(exact: Any, prompts: Sequence[list[int]], found: Sequence[list[int]]) -> list[float]:
    """The best score less that of the answered token, in standard deviations of all scores, for every token."""
    import torch

    behind = []
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.inference_mode():
            scores = exact(input_ids=torch.tensor([prompt + answer], device="cuda"), use_cache=False).logits[0]
        for place, token in enumerate(answer, start=len(prompt) - 1):
            behind.append(float((scores[place].max() - scores[place, token]) / scores[place].std()))
    return behind


@pytest.mark.parametrize(("graph", "fused"), [(False, False), (True, False), (False, True), (True, True)])
def test_bf16_steps_of_every_width_answer_within_rounding(graph: bool, fused: bool) -> None:
    """With our attention, and with all of our kernels; a step of one slot has products of ours."""
    model = sharpened_model("bf16")
    exact = copy.deepcopy(model).float()
    decoding = opened(model, False, graph, fused)
    assert decoding.attention == "split"
    assert len(decoding._graphs) == (3 if graph else 0), "by width"
    for used, found in zip((1, 2, 3, 4), answers_by_width(decoding), strict=True):
        behind = how_far_behind(exact, PROMPTS[:used], found)
        assert len(behind) == used * ANSWER
        assert max(behind) < 0.4


def test_the_scores_of_a_step_do_not_depend_on_its_width() -> None:
    """With weights of a size for which a step of one slot has products of ours."""
    import torch

    from paceline.serving.replica import weights
    from paceline.serving.replica.decoding import Decoding, join_projections
    from paceline.serving.replica.plans import PRODUCTS

    options = {"hidden": 1024, "heads": 32, "kv_heads": 8, "head_dim": 32, "ffn": 1024}
    large = replace(settings(), model_options=options, precision="bf16")
    model = join_projections(weights.open_model(large, 0, torch.device("cuda", 0)))
    decoding = Decoding(model, slots=12, length=128, reaches=(128,), heads=8, width=32)
    assert decoding.fuse(), decoding.refusal
    assert {width: set(step.plan.tiles) for width, step in decoding._fused.items()} == {
        1: set(PRODUCTS),
        **{width: set() for width in (2, 4, 8, 12)},
    }
    decoding.read([*range(12)], [[7, 5, 3 + number] * 9 for number in range(12)])
    with torch.inference_mode():
        expected = decoding._fused[12].scores().float()
        for width, step in decoding._fused.items():
            found = step.scores().float()
            assert found.shape == (width, large.shape.vocab)
            for row in range(width):
                assert float((found[row] - expected[row]).norm() / expected[row].norm()) < 0.05
                assert width == 12 or float((found[row] - expected[row + 1]).norm() / expected[row + 1].norm()) > 0.1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [0, 3, 16])
def test_bf16_prompts_read_in_pieces_are_answered_within_rounding(size: int, fused: bool) -> None:
    model = sharpened_model("bf16")
    exact = copy.deepcopy(model).float()
    found = answers_in_pieces(opened(model, False, True, fused), size)
    behind = how_far_behind(exact, PROMPTS * 3, found)
    assert len(behind) == 3 * len(PROMPTS) * ANSWER
    assert max(behind) < 0.4


@pytest.mark.parametrize(
    ("start", "length", "width", "heads"), [(1, 1, 64, 2), (1, 7, 32, 2), (128, 128, 128, 8), (1024, 333, 128, 2)]
)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_piece_of_a_prompt_looks_back_at_the_pieces_before_it(
    start: int, length: int, width: int, heads: int, precision: str
) -> None:
    """Against products in fp32; bf16 has FlashAttention's kernel. What the slot has behind the piece is not seen."""
    import torch

    from paceline.serving.replica import decoding

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    device, dtype = torch.device("cuda", 0), torch.bfloat16 if precision == "bf16" else torch.float32
    current = decoding.Pass(torch.zeros(3, dtype=torch.long, device=device), torch.arange(3, device=device), 2048)
    current.has_flash = decoding.has_flash(dtype, device, width)
    assert current.has_flash == (precision == "bf16")
    current.rows, current.start = torch.tensor([1], device=device), start
    cache = decoding.KeyValueCache((3, 2048, heads, width), dtype, device, current)
    cache.keys.normal_()
    cache.values.normal_()
    untouched = cache.keys[[0, 2]].clone()
    query = torch.randn(1, 8, length, width, device=device, dtype=dtype)
    key, value = torch.randn(2, 1, heads, length, width, device=device, dtype=dtype)
    with torch.inference_mode(), torch.nn.attention.sdpa_kernel(decoding.PROMPT_KERNELS):
        found = decoding.prompt_attention(cache, query, key, value, None)
    end = start + length
    assert torch.equal(cache.keys[1, start:end], key[0].transpose(0, 1))
    assert torch.equal(cache.keys[[0, 2]], untouched)
    keys, values = (part[1, :end].float().repeat_interleave(8 // heads, dim=1) for part in (cache.keys, cache.values))
    scores = torch.einsum("hqd,nhd->hqn", query[0].float(), keys) / width**0.5
    later = torch.arange(end, device=device) > torch.arange(start, end, device=device)[:, None]
    shares = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    tolerance = 2e-2 if precision == "bf16" else 1e-4
    expected = torch.einsum("hqn,nhd->hqd", shares, values)
    torch.testing.assert_close(found[0].float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", ["split", "flash"])
@pytest.mark.parametrize(
    ("places", "length", "width", "heads"), [(5, 192, 64, 2), (5, 192, 64, 8), (2, 2048, 128, 2), (80, 192, 128, 4)]
)
def test_a_step_looks_back_at_what_its_place_uses_and_no_further(
    kernel: str, places: int, length: int, width: int, heads: int
) -> None:
    """Against products in fp32, with other places' keys right behind. Few places with long contexts and shared key
    heads are divided among processors, many are not; reaches are shorter than the room of a place, too."""
    import torch

    from paceline.serving.replica import decoding, fused

    torch.manual_seed(0)
    positions = torch.linspace(0, length // 2 - 1, places, device="cuda").long()
    # A step of the first slots: others have keys and values, too.
    more = torch.zeros(3, dtype=torch.long, device="cuda")
    current = decoding.Pass(torch.cat((positions, more)), torch.arange(places + 3, device="cuda"), length)
    if kernel == "split":
        current.split = fused.split_attention(
            torch.bfloat16, positions.device, places, heads, 8 // heads, width, length
        )
        assert current.split is not None
    current.used = (positions + 1).int()
    assert decoding.has_flash(torch.bfloat16, positions.device, width)
    cache = decoding.KeyValueCache((places + 3, length, heads, width), torch.bfloat16, positions.device, current)
    cache.keys.normal_()
    cache.values.normal_()
    query = torch.randn(places, 8, 1, width, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, places, heads, 1, width, device="cuda", dtype=torch.bfloat16)
    for current.reach in (length // 2, length):
        found = decoding.step_attention(cache, query, key, value, None)
        for place, last in enumerate(positions.tolist()):
            assert torch.equal(cache.keys[place, last], key[place, :, 0])
            used = (part[place, : last + 1].float() for part in (cache.keys, cache.values))
            keys, values = (part.repeat_interleave(8 // heads, dim=1) for part in used)
            scores = torch.einsum("hd,nhd->hn", query[place, :, 0].float(), keys) / width**0.5
            expected = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1), values)
            torch.testing.assert_close(found[place, :, 0].float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 5, 32, 128])
@pytest.mark.parametrize("early", [False, True])
def test_our_kernels_agree_with_fp32(rows: int, early: bool) -> None:
    """Norm and gate, and for a single row products with the norm before, the gate after, and the sum after them."""
    import torch
    from torch.nn import functional as F

    from paceline.serving.replica import kernels
    from paceline.serving.replica.plans import Tile

    if early and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels that start early need the Hopper generation")
    torch.manual_seed(0)
    drawn = {"device": "cuda", "dtype": torch.bfloat16}
    given, weight = torch.randn(rows, 512, **drawn), torch.randn(768, 512, **drawn) / 512**0.5
    scales = torch.rand(512, **drawn) + 0.5
    normed = torch.empty_like(given)
    kernels.normalise(given, scales, normed, 1e-5, early=early)
    exact = F.rms_norm(given.float(), (512,), scales.float(), 1e-5)
    torch.testing.assert_close(normed.float(), exact, rtol=1e-2, atol=1e-2)
    gate, other = (exact @ weight.float().t()).chunk(2, dim=1)
    active = torch.empty(rows, 384, **drawn)
    kernels.gate(torch.cat((gate, other), dim=1).to(torch.bfloat16), active, early=early)
    torch.testing.assert_close(active.float(), F.silu(gate) * other, rtol=2e-2, atol=2e-2)
    if rows > 1:
        return  # Several rows are torch's products.
    tile = Tile(4, 256, 4)
    active.zero_()
    kernels.multiply_one(given, weight, active, tile, scales=scales, epsilon=1e-5, gated=True, early=early)
    torch.testing.assert_close(active.float(), F.silu(gate) * other, rtol=2e-2, atol=2e-2)
    joined = torch.randn(rows, 768, **drawn)
    expected = joined.float() + given.float() @ weight.float().t()
    kernels.multiply_one(given, weight, joined, tile, adds=True, early=early)
    torch.testing.assert_close(joined.float(), expected, rtol=2e-2, atol=2e-2)


def test_the_best_token_is_chosen_and_positions_stay_within_their_slot() -> None:
    import torch

    from paceline.serving.replica import kernels

    torch.manual_seed(0)
    scores = torch.randn(7, 32_003, device="cuda").to(torch.bfloat16)
    tokens, positions = torch.zeros(7, 1, dtype=torch.long, device="cuda"), torch.arange(7, device="cuda")
    choice = kernels.Choice(7, 32_003, scores.device)
    for _ in range(2):
        choice(scores, tokens, positions, 6)
        assert torch.equal(scores.gather(1, tokens), scores.amax(dim=1, keepdim=True))
    assert positions.tolist() == [2, 3, 4, 5, 6, 6, 6]


RUN = """
name: own
base: {workload: inference, engine: "transformers:max_batch=16,max_length=256", device: cuda, processes: 1,
       model: "tiny-llama:hidden=256,ffn=512", precision: bf16, requests: 64, max_tokens: 32,
       data: "synthetic:prompt=uniform,prompt_mean=64,prompt_spread=0.5,answer_mean=32", warmup_requests: 4,
       request_timeout_s: 120, timeout_s: 500, stall_s: 400}
matrix:
  - scenario: [offline]
  - {scenario: [concurrency], concurrency: [4]}
"""


@pytest.mark.parametrize("option", ["batching=continuous", "batching=static", "prefill_chunk=32"])
def test_a_whole_run_is_answered_token_by_token(option: str, tmp_path: Path, remember: Any) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(RUN)
    campaign(expansion.load(str(file), [f"engine.{option}"]), tmp_path, remember)
    records, skipped = store.read_runs(tmp_path / "own")
    assert not skipped
    assert len(records) == 2
    for record in records:
        # A client beside other work may be late, and says so against itself.
        assert record.status is Status.OK or "client: " in str(record.error), record.error
        assert {(each.tokens, each.pieces, each.error) for each in record.requests} == {(32, 32, None)}
        assert sorted(each.sample for each in record.requests) == list(range(64))


TOGETHER = """
name: together
base: {workload: inference, device: cuda, processes: 1, precision: fp32, launcher: "local:shared_gpu=true",
       scenario: offline, requests: 8, max_tokens: 12, keeps_text: true, warmup_requests: 1,
       request_timeout_s: 120, timeout_s: 400, stall_s: 300}
matrix:
  engine:
    - "transformers:max_batch=4,max_length=128"
    - "transformers:max_batch=4,max_length=128,tensor_parallel=2"
    - "transformers:max_batch=4,max_length=128,tensor_parallel=2,compile=false,graph=false"
    - "deepspeed:max_batch=4,max_length=128"
    - "deepspeed:max_batch=4,max_length=128,tensor_parallel=2"
"""


LITTLE_PROMPTS = [[int(token) for token in range(start, start + 3 + start % 5)] for start in range(5, 45, 5)]


def asked_together(model: Path, tmp_path: Path, remember: Any, chosen: Sequence[str]) -> list[RunRecord]:
    """The runs of TOGETHER, each with the answers to LITTLE_PROMPTS by their number."""
    asked = [json.dumps({"token_ids": prompt, "max_tokens": 12}) for prompt in LITTLE_PROMPTS]
    (tmp_path / "asked.jsonl").write_text("\n".join(asked))
    file = tmp_path / "together.yaml"
    file.write_text(TOGETHER)
    told = [f"model={model}", f"data=jsonl:path={tmp_path / 'asked.jsonl'}", *chosen]
    campaign(expansion.load(str(file), told), tmp_path, remember)
    records, skipped = store.read_runs(tmp_path / "together")
    assert not skipped
    for record in records:
        assert record.status is Status.OK or "client: " in str(record.error), record.error
        assert record.shares_gpu
        assert sorted(each.sample for each in record.requests) == list(range(len(LITTLE_PROMPTS)))
    return records


def test_processes_that_share_the_gpu_answer_as_one_and_as_deepspeed_does(tmp_path: Path, remember: Any) -> None:
    """Tensor parallelism over NCCL, also inside a CUDA graph, and DeepSpeed's: the same text of the same weights."""
    pytest.importorskip("deepspeed")
    from testbed import tiny_llama

    model = tiny_llama.write(tmp_path / "little")
    records = asked_together(model, tmp_path, remember, [])
    assert len(records) == 5
    expected = [tiny_llama.text(model, tiny_llama.continuation(model, prompt, 12)) for prompt in LITTLE_PROMPTS]
    assert len(set(expected)) == len(expected)
    for record in records:
        assert {each.sample: each.text for each in record.requests} == dict(enumerate(expected)), record.spec.engine


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_over_processes_says_what_fp32_knows_within_rounding(size: int, tmp_path: Path, remember: Any) -> None:
    """Tensor parallelism with FlashAttention's kernel, each process with its heads, in a CUDA graph."""
    from testbed import tiny_llama

    model = tiny_llama.write(tmp_path / "little")
    engine = f"transformers:max_batch=4,max_length=128,tensor_parallel={size}"
    (record,) = asked_together(model, tmp_path, remember, [f"engine={engine}", "precision=bf16"])
    for each in record.requests:
        assert tiny_llama.could_say(model, LITTLE_PROMPTS[each.sample], str(each.text), 12, slack=0.5), each
        assert not tiny_llama.could_say(model, [7, *LITTLE_PROMPTS[each.sample]], str(each.text), 12, slack=0.5)
