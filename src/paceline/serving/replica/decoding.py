"""Greedy decoding over the slots of a batch: prompts are read into slots, then all slots advance by one token a step.

A step always computes every slot, used or not, and each becomes one token longer; `clear` shortens free ones. Its
tensors never change size or address, so it is compiled once for each reach and replayed as one CUDA graph. Results of
free slots are computed and not reported.

Attention stores keys and values itself, in tensors that never move. transformers calls the function that is registered
for a model's attention; ours stores its arguments before it attends. The model then needs no cache of transformers,
whose interface changes between versions. All layers have the same code, so one compiled layer serves for all of them.

Projections of the same input (queries, keys and values; gate and up) are computed as one product. A decode step reads
every weight once and does little with it: a small product ends before it reaches full memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.errors import UnsupportedError
from paceline.serving.replica.fused import FusedStep, is_fusible, split_attention
from paceline.serving.replica.plans import Plan

WARM_STEPS = 3
# Prompts of the trial of our kernels, in tokens; and the largest difference of scores, as a share of their norm.
# Rounding to 16 bit makes 0.06 after 32 layers; scores of a wrong position or head differ by about 1.
TRIAL_PROMPTS, TRIAL_ERROR = (47, 20), 0.25
# A single prompt up to MOST_REPLAYED tokens is padded to a multiple of PROMPT_MULTIPLE and replayed as a CUDA graph.
# Launching the kernels of so short a prompt takes the host longer than the device needs for them.
PROMPT_MULTIPLE, MOST_REPLAYED = 128, 1024
# The name under which transformers knows our attention.
ATTENTION = "paceline_slots"
# Prompts come in any length. cuDNN, which torch prefers on some GPUs, plans each new length: 50 ms on an H200, where
# reading 512 tokens of an 8B model takes 23 ms.
PROMPT_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Projections of the llama family that have the same input, each used once in a pass.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Decoding:
    """`read` and `step` return tokens on this host, in the order of rows (slots). heads: key heads on this device."""

    def __init__(self, model: Any, *, slots: int, length: int, reaches: Sequence[int], heads: int, width: int) -> None:
        from transformers import AttentionInterface

        self.model, self.length, self.reaches = model, length, tuple(reaches)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.positions = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros((slots, 1), dtype=torch.long, device=self.device)
        self._columns = torch.arange(length, device=self.device)
        self.current = Pass(self.positions, torch.arange(slots, device=self.device), length)
        shared = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        group = model.config.num_attention_heads // shared
        self.current.split = split_attention(self.dtype, self.device, slots, heads, group, width, length)
        self._has_flash = has_flash(self.dtype, self.device, width)
        # Why our kernels are not used where they could be.
        self.refusal: str | None = None
        self._fused: FusedStep | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        self._prompt_graphs: dict[int, Callable[[], None]] = {}
        # A single prompt, padded: its tokens, length and slot, and the first token of its answer.
        self._prompt = torch.zeros((1, length), dtype=torch.long, device=self.device)
        self._prompt_length, self._slot, self._first = (torch.zeros_like(self.positions[:1]) for _ in range(3))
        AttentionInterface.register(ATTENTION, attend)
        model.config._attn_implementation = ATTENTION
        named = (part for part in model.modules() if type(part).__name__.endswith("Attention"))
        attentions = [part for part in named if hasattr(part, "layer_idx")]
        if len(attentions) != model.config.num_hidden_layers:
            raise UnsupportedError(
                f"{type(model).__name__} has {len(attentions)} attentions that can keep keys for "
                f"{model.config.num_hidden_layers} layers: this engine needs one in each"
            )
        for part in attentions:
            size = (slots, length, heads, width)
            part.key_value_cache = KeyValueCache(size, self.dtype, self.device, self.current)

    @property
    def attention(self) -> str:
        """The attention of a step: our kernel, FlashAttention's for decoding, or torch's choice among its kernels."""
        if self.current.split is not None:
            return "split"
        return "flash" if self._has_flash else "sdpa"

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    @property
    def layers(self) -> Any:
        """The decoder layers, under whatever name the architecture has for them."""
        count = self.model.config.num_hidden_layers
        lists = (part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read prompts into slots and return the first token of each answer. Padding at the end is not attended to."""
        longest = max(len(prompt) for prompt in prompts)
        padded_to = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        if len(prompts) == 1 and padded_to in self._prompt_graphs:
            return [self._replay(padded_to, rows[0], prompts[0])]
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        slots = torch.tensor(rows, device=self.device)
        positions = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        first = self._read(slots, torch.tensor(padded, device=self.device), positions, lengths)
        return [int(token) for token in first.tolist()]

    def _read(self, slots: Tensor, tokens: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(PROMPT_KERNELS):
            self.current.rows = slots
            hidden = self.model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)[0]
            self.current.rows = None
            # Only the last token of each prompt: the logits of all tokens would be the largest tensor of all.
            last = hidden[torch.arange(len(tokens), device=self.device), lengths - 1]
            first: Tensor = self.model.lm_head(last[:, None])[:, 0].argmax(dim=-1)
        self.tokens[slots, 0] = first
        self.positions[slots] = lengths
        return first

    def _replay(self, padded_to: int, row: int, prompt: Sequence[int]) -> int:
        """Read one prompt with the graph of its padded length."""
        self._prompt[0, : len(prompt)].copy_(torch.tensor(prompt))
        self._prompt_length.fill_(len(prompt))
        self._slot.fill_(row)
        self._prompt_graphs[padded_to]()
        return int(self._first.item())

    @torch.inference_mode()
    def _read_prompt(self, padded_to: int) -> None:
        """Read the tensors of a single prompt; nothing here depends on values on the host."""
        tokens, positions = self._prompt[:, :padded_to], self._columns[None, :padded_to]
        self._first.copy_(self._read(self._slot, tokens, positions, self._prompt_length))

    @torch.inference_mode()
    def clear(self, rows: Sequence[int]) -> None:
        """Forget the contexts of these slots, which no request has."""
        self.positions[torch.tensor(rows, device=self.device)] = 0

    def step(self, reach: int) -> list[int]:
        """The next token of every slot. reach: one of `reaches`, at least the longest context of the used slots."""
        self.advance(reach)
        return [int(token) for token in self.tokens.view(-1).tolist()]

    def advance(self, reach: int) -> None:
        """A step whose tokens stay on the device."""
        if reach in self._graphs:
            self._graphs[reach]()
        else:
            self._advance(reach)

    @torch.inference_mode()
    def _advance(self, reach: int) -> None:
        if self._fused is not None:
            self._fused.advance()
            return
        self.tokens.copy_(self._scores(reach).argmax(dim=-1, keepdim=True))
        # The position of a free slot advances too; it must stay within its row.
        self.positions.add_(1).clamp_(max=self.length - 1)

    def _scores(self, reach: int) -> Tensor:
        """Of every token of the vocabulary, for every slot, by the model's own layers."""
        current = self.current
        current.reach = reach
        # Computed once a step, for all layers.
        if current.split is not None:
            pass
        elif self._has_flash:
            current.used = (self.positions + 1).int()
        else:
            # Added to the scores: with a mask of booleans, every layer would convert it to numbers.
            hidden = self._columns[:reach] > self.positions[:, None]
            current.mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        logits: Tensor = self.model(input_ids=self.tokens, position_ids=self.positions[:, None], use_cache=False).logits
        return logits[:, -1]

    # --- before the first request ---

    def fuse(self, plan: Plan | None = None) -> bool:
        """Compute steps with few kernels of our own, if the model and the device allow it and the kernels pass a trial;
        prompts are not affected. `refusal` says why they did not pass: then our attention is not used either."""
        if not is_fusible(self.model):
            return False
        step = FusedStep(self.model, self.tokens, self.positions, self.length, plan)
        self.refusal = self._trial(step)
        if self.refusal is None:
            self._fused = step
        else:
            self.current.split = None
        return self.is_fused

    @torch.inference_mode()
    def _trial(self, step: FusedStep) -> str | None:
        """Why the scores of this step after two prompts are not those of the model's own layers with kernels of torch;
        None if they are, but for rounding."""
        vocabulary, split = self.model.config.vocab_size, self.current.split
        lengths = [min(length, self.length // 2) for length in TRIAL_PROMPTS[: len(self.positions)]]
        rows = [*range(len(lengths))]
        self.read(rows, [[(7 * place + 3) % vocabulary for place in range(length)] for length in lengths])
        try:
            self.current.split = None
            expected = self._scores(self.length)[rows].float()
            self.current.split = split
            error = float((step.scores()[rows].float() - expected).norm() / expected.norm())
        except step.kernels.ERRORS as problem:
            return f"{type(problem).__name__}: {problem}"[:200]
        finally:
            self.current.split, self.current.used, self.current.mask = split, None, None
            self.positions.zero_()
            self.tokens.zero_()
        return None if error < TRIAL_ERROR else f"their scores differ by {error:.2g} of the norm"

    def compile_layers(self) -> None:
        """Compile each layer by itself: all have the same code, so one compilation per reach serves the whole model."""
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(self.reaches))
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)

    def warm_up(self, graph: bool) -> None:
        """Select and compile every kernel, and capture every graph, before the first request."""
        self.read([0], [[0, 0]])
        for reach in reversed(self.reaches):
            advance = partial(self._advance, reach)
            for _ in range(WARM_STEPS):
                advance()
            if graph:
                self._graphs[reach] = captured(advance)
            if self._fused is not None:
                # It looks back as far as each slot needs.
                self._graphs = dict.fromkeys(self.reaches, self._graphs[reach]) if graph else {}
                break
        if graph:
            self._prompt_length.fill_(1)
            # Prompts are read one after another and leave nothing in the memory of their graphs, so these share it.
            pool = torch.cuda.graph_pool_handle()
            for padded_to in range(PROMPT_MULTIPLE, min(self.length, MOST_REPLAYED) + 1, PROMPT_MULTIPLE):
                read = partial(self._read_prompt, padded_to)
                read()
                self._prompt_graphs[padded_to] = captured(read, pool)
        self.positions.zero_()
        self.tokens.zero_()


def captured(call: Callable[[], None], pool: Any = None) -> Callable[[], None]:
    """Replays `call` as one CUDA graph. Captured here instead of by torch.compile: no tensor of a step moves, so a
    replay checks nothing."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Only this thread: NCCL's own thread queries its events at any time, which would end a global capture.
    with torch.inference_mode(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
        call()
    return graph.replay


# --- attention ---


@dataclass
class Pass:
    """What every layer needs to know about the current pass. slots: the number of each slot. rows: the slots whose
    prompts are read, None in a step. positions: the next position of each slot. reach: how many columns a step reads.

    A step uses one of three, depending on its kernel. mask: 0 for columns that count, otherwise minus infinity. used:
    how many columns of each slot count. split: the number of our own attention, which needs the positions alone.
    """

    positions: Tensor
    slots: Tensor
    length: int
    rows: Tensor | None = None
    reach: int = 0
    mask: Tensor | None = None
    used: Tensor | None = None
    split: int | None = None

    def __post_init__(self) -> None:
        # One token per slot, and where each slot begins among all cached tokens.
        count = torch.arange(len(self.slots) + 1, dtype=torch.int32, device=self.slots.device)
        self.each, self.starts = count, count * self.length


class KeyValueCache(nn.Module):
    """Keys and values of one layer, (slots, length, heads, width)."""

    keys: Tensor
    values: Tensor

    def __init__(self, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, of: Pass) -> None:
        super().__init__()
        self.current = of
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(size, dtype=dtype, device=device), persistent=False)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    """Called by transformers: (batch, heads, tokens, width) in, (batch, tokens, heads, width) out."""
    cache: KeyValueCache = module.key_value_cache
    kernel = step_attention if cache.current.rows is None else prompt_attention
    return kernel(cache, query, key, value, scaling).transpose(1, 2).contiguous(), None


def prompt_attention(cache: KeyValueCache, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of whole prompts, which begin at position 0 and are padded at the end."""
    rows, length = cache.current.rows, key.shape[2]
    cache.keys[rows, :length] = key.transpose(1, 2)
    cache.values[rows, :length] = value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=grouped)


def step_attention(cache: KeyValueCache, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of one token per slot to everything that its slot has cached."""
    current = cache.current
    cache.keys[current.slots, current.positions] = key[:, :, 0]
    cache.values[current.slots, current.positions] = value[:, :, 0]
    if current.split is not None:
        attended = torch.ops.paceline.split_attention
        mixed = attended(query[:, :, 0], cache.keys, cache.values, current.positions, scaling, current.split)
        return mixed[:, :, None]  # type: ignore[no-any-return]
    if current.used is not None:
        # torch's own operator: `scaled_dot_product_attention` has no argument for how much of a slot counts.
        keys, values = (part.flatten(0, 1) for part in (cache.keys, cache.values))
        more = {"scale": scaling, "seqused_k": current.used}
        mixed = torch.ops.aten._flash_attention_forward(
            query[:, :, 0], keys, values, current.each, current.starts, 1, current.reach, 0.0, False, False, **more
        )[0]
        return mixed[:, :, None]  # type: ignore[no-any-return]
    # Query heads that share a key head become rows as if they were tokens: the keys are read once and not copied for
    # each head. Reading them limits the speed of a step with many slots.
    slots, heads, _, width = query.shape
    shared = key.shape[1]
    folded = query.reshape(slots, shared, heads // shared, width)
    keys, values = (part[:, : current.reach].transpose(1, 2) for part in (cache.keys, cache.values))
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=current.mask, scale=scaling)
    return mixed.reshape(slots, heads, 1, width)


def has_flash(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether FlashAttention's kernel for decoding is available. It reads only the used part of a slot. If query heads
    share key heads, it divides long contexts among processors that few slots would leave idle."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


# --- joined projections ---


class Joined(nn.Module):
    """One weight for the outputs of all siblings. The first sibling called in a pass computes the product for all."""

    def __init__(self, siblings: Sequence[nn.Linear]) -> None:
        super().__init__()
        # From the weights: in a model that was split, out_features is still the width of the whole.
        self.widths = [int(part.weight.shape[0]) for part in siblings]
        self.weight = nn.Parameter(torch.cat([part.weight for part in siblings]), requires_grad=False)
        biases: list[Tensor] = [part.bias for part in siblings if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.taken = 0

    def part(self, number: int, input: Tensor) -> Tensor:
        # Recognised by the input, not only by a count: a pass that was interrupted must not affect the next one.
        if input is not self.input:
            self.input, self.taken = input, 0
            self.parts = torch.split(F.linear(input, self.weight, self.bias), self.widths, dim=-1)
        part = self.parts[number]
        self.taken += 1
        if self.taken == len(self.widths):
            self.input, self.parts = None, ()
        return part


class Part(nn.Module):
    """Replaces one sibling under its old name."""

    def __init__(self, joined: Joined, number: int) -> None:
        super().__init__()
        self.joined, self.number = joined, number

    def forward(self, input: Tensor) -> Tensor:
        return self.joined.part(self.number, input)


@torch.no_grad()
def join_projections(model: Any) -> Any:
    """Join every group of siblings in place: plain linear layers, all with a bias or all without."""
    device = next(model.parameters()).device
    for owner in list(model.modules()):
        for names in SIBLINGS:
            siblings: list[Any] = [getattr(owner, name, None) for name in names]
            is_plain = all(type(part) is nn.Linear for part in siblings)
            if is_plain and len({part.bias is None for part in siblings}) == 1:
                joined = Joined(siblings)
                for number, name in enumerate(names):
                    setattr(owner, name, Part(joined, number))
    if device.type == "cuda":
        # Otherwise torch keeps the memory of the siblings, half of the model, which NCCL and graphs need.
        torch.cuda.empty_cache()
    return model


def is_joined(model: Any) -> bool:
    return any(isinstance(part, Joined) for part in model.modules())
