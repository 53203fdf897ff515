"""Greedy decoding over slots against a plain loop of the same weights, token by token."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import UnsupportedError
from paceline.serving.replica import batching, weights
from paceline.serving.replica import decoding as decoding_module
from paceline.serving.replica.decoding import Decoding, is_joined, join_projections
from paceline.serving.replica.settings import Settings

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [3], [11] * 11, [1, 2]]
LLAMA = Settings(engine="transformers", model="tiny-llama", max_batch=4, max_length=64)
# Grouped key heads and rotary positions; learned positions, biases and a head that is the embedding.
SETTINGS = {"llama": LLAMA, "gpt": replace(LLAMA, model="tiny"), "bf16": replace(LLAMA, precision="bf16")}


def sharpened(model: Any) -> Any:
    """Weights as they are drawn give nearly the same token for ever; larger ones tell answers apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


def plain(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The whole context through the model again for every token: no cache, no padding, no batch."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def over_slots(settings: Settings, model: Any, rank_count: int = 1) -> Decoding:
    shape = settings.shape
    heads = shape.kv_heads // rank_count
    return Decoding(join_projections(model), slots=4, length=64, reaches=(32, 64), heads=heads, width=shape.head_dim)


def answers(decoding: Decoding, rows: Sequence[int], prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    found = [[token] for token in decoding.read(rows, prompts)]
    for number in range(count - 1):
        said = decoding.step(max(rows) + 1, 32 if number % 2 else 64)
        for row, answer in zip(rows, found, strict=True):
            answer.append(said[row])
    return found


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_padded_batches_answer_as_a_plain_loop_does(name: str) -> None:
    settings = SETTINGS[name]
    model = sharpened(weights.open_model(settings, 0, CPU))
    expected = [plain(model, prompt, 8) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 8
    decoding = over_slots(settings, model)
    assert answers(decoding, [0], PROMPTS[:1], 8) == expected[:1]
    assert answers(decoding, [2, 0, 3, 1], PROMPTS, 8) == expected


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        (None, None),
        ("head", "their scores differ by"),
        ("one width", "their scores differ by"),
        ("raises", "RuntimeError: out of resource: shared memory"),
    ],
)
def test_kernels_are_used_only_if_they_pass_a_trial(
    wrong: str | None, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that round differently pass; those with another head, or that this device cannot run, are refused, and
    the layers answer as if they had never been tried."""
    model = sharpened(weights.open_model(LLAMA, 0, CPU))
    expected = [plain(model, prompt, 8) for prompt in PROMPTS]

    class Step:
        def __init__(self, model: Any, tokens: Any, positions: Any, length: int) -> None:
            self.decoding, self.tokens, self.positions = over, tokens, positions
            self.kernels = SimpleNamespace(ERRORS=(RuntimeError,))

        def narrowed(self, width: int) -> Step:
            return Step(None, self.tokens[:width], self.positions[:width], 64)

        def scores(self) -> torch.Tensor:
            if wrong == "raises":
                raise RuntimeError("out of resource: shared memory")
            assert self.positions.tolist() == [32, 20, 0, 0][: len(self.tokens)]
            found = self.decoding._scores(len(self.tokens), 64)
            is_wrong = wrong == "head" or (wrong == "one width" and len(found) == 2)
            return found.roll(1, dims=1) if is_wrong else found * (1 + 0.05 * torch.rand_like(found))

        def advance(self) -> None:
            self.tokens.copy_(self.decoding._scores(len(self.tokens), 64).argmax(dim=-1, keepdim=True))
            self.positions.add_(1)

    over = over_slots(LLAMA, model)
    monkeypatch.setattr(decoding_module, "is_fusible", lambda model: True)
    monkeypatch.setattr(decoding_module, "FusedStep", Step)
    assert over.fuse() is over.is_fused is (refusal is None)
    assert (over.refusal or "").startswith(refusal or "")
    assert answers(over, [2, 0, 3, 1], PROMPTS, 8) == expected


def test_a_place_is_taken_while_others_go_on() -> None:
    model = sharpened(weights.open_model(LLAMA, 0, CPU))
    expected = [plain(model, prompt, 8) for prompt in PROMPTS[:2]]
    decoding = over_slots(LLAMA, model)
    first = decoding.read([1], PROMPTS[:1])
    first += [decoding.step(4, 64)[1] for _ in range(3)]
    second = decoding.read([3], PROMPTS[1:2])
    for _ in range(7):
        said = decoding.step(4, 64)
        first.append(said[1])
        second.append(said[3])
    assert (first[:8], second) == (expected[0], expected[1])


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_step_of_any_width_answers_as_a_plain_loop_does_and_leaves_other_slots_alone(name: str) -> None:
    settings = SETTINGS[name]
    model = sharpened(weights.open_model(settings, 0, CPU))
    prompts = [*PROMPTS, [9, 4, 2]]
    expected = [plain(model, prompt, 8) for prompt in prompts]
    shape = settings.shape
    more: dict[str, Any] = {"heads": shape.kv_heads, "width": shape.head_dim}
    decoding = Decoding(join_projections(model), slots=5, length=64, reaches=(32, 64), **more)
    assert decoding.widths == (1, 2, 4, 5)
    for used, width in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 5)):
        # What is in the other slots is neither read nor changed.
        decoding.positions.fill_(60)
        rows = [*range(used)][::-1]
        found = [[token] for token in decoding.read(rows, prompts[:used])]
        kept = [part.key_value_cache.keys[width:].clone() for part in attentions(decoding)]
        for number in range(7):
            said = decoding.step(used, 32 if number % 2 else 64)
            assert len(said) == width
            for row, answer in zip(rows, found, strict=True):
                answer.append(said[row])
        assert found == expected[:used]
        assert decoding.positions[width:].tolist() == [60] * (5 - width)
        for part, before in zip(attentions(decoding), kept, strict=True):
            assert torch.equal(part.key_value_cache.keys[width:], before)


def attentions(decoding: Decoding) -> list[Any]:
    return [part for part in decoding.model.modules() if hasattr(part, "key_value_cache")]


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("size", [1, 3, 10, 11, 16])
def test_a_prompt_read_in_pieces_between_steps_answers_as_a_plain_loop_does(name: str, size: int) -> None:
    """Steps compute the slot that is read in part, too: several between two pieces, and more than are left to read."""
    model = sharpened(weights.open_model(SETTINGS[name], 0, CPU))
    long = [(7 * place + 3) % 50 for place in range(21)]
    expected = plain(model, PROMPTS[0], 40), plain(model, long, 6)
    decoding = over_slots(SETTINGS[name], model)
    running = decoding.read([0], PROMPTS[:1])
    # What the request before left there.
    decoding.read([1], [[13] * 40])
    first = -1
    for start in range(0, len(long), size):
        piece = long[start : start + size]
        (first,) = decoding.read([1], [piece], start)
        assert int(decoding.positions[1]) == start + len(piece)
        if start + size < len(long):
            running += [decoding.step(2, 64)[0] for _ in range(3 if size > 1 else 1)]
            assert int(decoding.positions[1]) > start + len(piece), "the step computed it"
    answer = [first]
    for _ in range(5):
        said = decoding.step(2, 64)
        running.append(said[0])
        answer.append(said[1])
    assert (running, answer) == (expected[0][: len(running)], expected[1])


@pytest.mark.parametrize("chunk", [0, 1, 4, 7])
def test_requests_that_come_and_go_are_answered_as_a_plain_loop_does(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are freed and taken again while others go on, prompts are read in pieces, free slots are cleared, and one
    request is dropped while its prompt is read."""
    monkeypatch.setattr(batching, "STEPS_PER_CLEARING", 3)
    settings = replace(LLAMA, max_batch=4, max_length=64, prefill_chunk=chunk)
    model = sharpened(weights.open_model(settings, 0, CPU))
    drawn = random.Random(chunk)
    prompts = {number: [drawn.randrange(50) for _ in range(drawn.choice((1, 3, 8, 15, 22)))] for number in range(1, 13)}
    most = {number: drawn.choice((1, 2, 5, 9)) for number in prompts}
    expected = {number: plain(model, prompt, most[number]) for number, prompt in prompts.items()}
    decoding, slots = over_slots(settings, model), batching.Batching(settings)
    said: dict[int, list[int]] = {number: [] for number in prompts}
    waiting = [*prompts]
    slots.arrive(batching.BatchedRequest(0, [9] * 30, 5, frozenset()))
    passes = 0
    while waiting or not slots.is_idle:
        for number in waiting[: drawn.choice((0, 1, 1, 3))]:
            slots.arrive(batching.BatchedRequest(number, prompts[number], most[number], frozenset()))
            waiting.remove(number)
        for tokens in batching.tokens_of_pass(decoding, slots):
            for number, token, _ in tokens:
                said.get(number, []).append(token)
        passes += 1
        assert passes < 500, "no request ends"
        if passes == 1:
            slots.drop(0)
    assert said == expected


def test_a_single_prompt_is_replayed_at_its_padded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no graphs: a replay is the captured call itself, with the same tensors."""
    replayed: list[int] = []

    def captured(call: Any, pool: Any = None) -> Any:
        return lambda: (replayed.extend(call.args), call())

    monkeypatch.setattr(decoding_module, "captured", captured)
    monkeypatch.setattr(decoding_module, "PROMPT_MULTIPLE", 4)
    monkeypatch.setattr(decoding_module, "MOST_REPLAYED", 8)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = sharpened(weights.open_model(LLAMA, 0, CPU))
    expected = [plain(model, prompt, 4) for prompt in PROMPTS]
    decoding = over_slots(LLAMA, model)
    decoding.warm_up(graph=True)
    for prompt, answer, padded_to in zip(PROMPTS, expected, ([8], [4], [], [4]), strict=True):
        replayed.clear()
        first = decoding.read([2], [prompt])
        assert replayed == padded_to, "eleven tokens are more than the longest graph has"
        assert first + [decoding.step(4, 64)[2] for _ in range(3)] == answer


def test_one_compilation_a_reach_serves_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inductor, whose code would take longer than everything else here: what is traced, and what it answers."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: compile_module(self, backend=backend, **more))
    model = sharpened(weights.open_model(LLAMA, 0, CPU))
    expected = [plain(model, prompt, 8) for prompt in PROMPTS]
    decoding = over_slots(LLAMA, model)
    decoding.compile_layers()
    decoding.warm_up(graph=False)
    assert len(graphs) == len(decoding.reaches)
    assert answers(decoding, [0, 1, 2, 3], PROMPTS, 8) == expected
    assert len(graphs) == len(decoding.reaches)
    # Queries, keys and values are one product, gate and up another.
    assert [sum("linear" in str(node.target) for node in graph.graph.nodes) for graph in graphs] == [4, 4]


def test_joined_products_are_those_of_the_siblings_and_leave_nothing_behind() -> None:
    model = weights.open_model(LLAMA, 0, CPU)
    owner = model.model.layers[0].self_attn
    given = torch.randn(2, 3, LLAMA.shape.hidden)
    # In any order, as often as there are passes.
    names = ["v_proj", "q_proj", "k_proj"] * 2
    expected = [getattr(owner, name)(given) for name in names]
    held = sum(parameter.numel() for parameter in model.parameters())
    join_projections(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == held
    for name, value in zip(names, expected, strict=True):
        torch.testing.assert_close(getattr(owner, name)(given), value)
    assert (owner.q_proj.joined.parts, owner.q_proj.joined.input) == ((), None)


def test_a_pass_that_broke_off_does_not_answer_the_next_one() -> None:
    model = weights.open_model(LLAMA, 0, CPU)
    owner = model.model.layers[0].mlp
    given = torch.randn(2, 3, LLAMA.shape.hidden)
    expected = owner(given)
    join_projections(model)
    owner.gate_proj(torch.randn(2, 3, LLAMA.shape.hidden))
    torch.testing.assert_close(owner(given), expected)


def test_prompts_are_read_without_a_kernel_that_plans_each_length_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[bool] = []
    read = decoding_module.prompt_attention

    def watched(*given: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return read(*given)

    monkeypatch.setattr(decoding_module, "prompt_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    over_slots(LLAMA, weights.open_model(LLAMA, 0, CPU)).read([0], PROMPTS[:1])
    assert allowed == [False] * LLAMA.shape.layers
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


def test_what_has_no_siblings_stays_as_it_is() -> None:
    model = weights.open_model(SETTINGS["gpt"], 0, CPU)
    before = [type(part) for part in model.modules()]
    assert [type(part) for part in join_projections(model).modules()] == before
    assert not is_joined(model)
    assert is_joined(join_projections(weights.open_model(LLAMA, 0, CPU)))


def test_weights_are_those_of_the_seed_in_the_dtype_asked_for() -> None:
    one, same = (weights.open_model(SETTINGS["bf16"], 0, CPU) for _ in range(2))
    other = weights.open_model(replace(SETTINGS["bf16"], seed=7), 0, CPU)
    names = dict(one.named_parameters())
    assert {parameter.dtype for parameter in names.values()} == {torch.bfloat16}
    assert all(torch.equal(value, names[name]) for name, value in same.named_parameters())
    assert not torch.equal(other.lm_head.weight, one.lm_head.weight)


def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    from paceline.serving.replica.model import device_of

    with pytest.raises(UnsupportedError, match="the replica needs GPU 97, but this host shows"):
        device_of(replace(LLAMA, device="cuda", first_device=96, tensor_parallel=2), 1)
    with pytest.raises(UnsupportedError, match="the replica needs GPU 97, but this host shows"):
        device_of(replace(LLAMA, device="cuda", first_device=96, tensor_parallel=4, nodes=2, part=1), 3)


class Threads:
    """Ranks that are threads of this process, in the place of torch.distributed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: dict[int, torch.Tensor] = {}
        self.here = threading.local()

    def get_world_size(self) -> int:
        return self.size

    def _met(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.here.rank] = tensor.clone()
        self._barrier.wait()
        found = [self._slots[rank] for rank in range(self.size)]
        self._barrier.wait()
        return found

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(sum(self._met(tensor)))

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for part, value in zip(parts, self._met(tensor), strict=True):
            part.copy_(value)


def test_two_parts_of_a_model_answer_as_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sharpened(weights.open_model(LLAMA, 0, CPU))
    expected = answers(over_slots(LLAMA, whole), [0, 1, 2, 3], PROMPTS, 8)
    ranks = Threads(2)
    monkeypatch.setattr(weights, "dist", ranks)
    cut = replace(LLAMA, tensor_parallel=2)
    models = [sharpened(weights.open_model(cut, rank, CPU)) for rank in range(2)]
    held = [sum(p.numel() for p in model.parameters()) for model in models]
    assert held[0] == held[1] < 0.7 * sum(p.numel() for p in whole.parameters())
    found: dict[int, list[list[int]]] = {}

    def work(rank: int) -> None:
        ranks.here.rank = rank
        found[rank] = answers(over_slots(cut, models[rank], 2), [0, 1, 2, 3], PROMPTS, 8)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Both threads changed what belongs to their process: whoever ended last left prompts' stance for all other tests.
    torch.compiler.set_stance("default")
    assert found == {0: expected, 1: expected}


def test_clearing_free_slots_changes_no_answer_and_shortens_what_a_step_reads() -> None:
    def decoded(clears: bool) -> tuple[list[int], list[int]]:
        decoding = over_slots(LLAMA, sharpened(weights.open_model(LLAMA, 0, CPU)))
        decoding.read([0, 1, 2, 3], PROMPTS)
        said = []
        for number in range(8):
            if clears and number == 5:
                decoding.clear([0, 1, 3])
            said.append(decoding.step(4, 64)[2])
        return said, (decoding.positions.tolist())

    plainly, cleared = decoded(False), decoded(True)
    assert plainly[0] == cleared[0]
    assert plainly[1] == [5 + 8, 1 + 8, 11 + 8, 2 + 8]
    assert cleared[1] == [3, 3, 11 + 8, 3]
