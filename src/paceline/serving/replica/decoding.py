"""Greedy decoding over the slots of a batch: prompts are read into slots, then all slots advance by one token a step.

A step computes the first slots up to one of `widths`, used or not, and each of them becomes one token longer; `clear`
shortens free ones. It works on views of tensors that never change size or address, so each width is replayed as a CUDA
graph of its own. Results of free slots are computed and not reported.

A prompt can be read in pieces with steps in between, which may compute its slot, too. They do no harm: a step writes
keys and values at the position of a slot or behind it, never before it, and the position of a slot is where its next
piece begins. That piece, or the answer, overwrites whatever steps wrote there before it is attended to.

Attention stores keys and values itself, in tensors that never move. transformers calls the function that is registered
for a model's attention; ours stores its arguments before it attends. The model then needs no cache of transformers,
whose interface changes between versions. All layers have the same code, so one compiled layer serves for all of them.

Projections of the same input (queries, keys and values; gate and up) are computed as one product. A decode step reads
every weight once and does little with it: a small product ends before it reaches full memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.errors import UnsupportedError
from paceline.serving.replica.fused import FusedStep, is_fusible, split_attention

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


def widths_of(slots: int) -> tuple[int, ...]:
    """How many slots a step may compute: powers of two, and all.

    >>> widths_of(12)
    (1, 2, 4, 8, 12)
    """
    return (*(1 << power for power in range((slots - 1).bit_length())), slots)


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
        self.current.has_flash = has_flash(self.dtype, self.device, width)
        self.widths = widths_of(slots)
        shared = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
        group = model.config.num_attention_heads // shared
        # The number of our attention for each width; without one where it cannot run.
        numbers = {
            each: split_attention(self.dtype, self.device, each, heads, group, width, length) for each in self.widths
        }
        self._splits = {each: number for each, number in numbers.items() if number is not None}
        # Why our kernels are not used where they could be.
        self.refusal: str | None = None
        self._fused: dict[int, FusedStep] = {}
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
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
        if self._splits:
            return "split"
        return "flash" if self.current.has_flash else "sdpa"

    @property
    def is_fused(self) -> bool:
        return bool(self._fused)

    @property
    def layers(self) -> Any:
        """The decoder layers, under whatever name the architecture has for them."""
        count = self.model.config.num_hidden_layers
        lists = (part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], start: int = 0) -> list[int]:
        """Read prompts into slots and return the first token of each answer. Padding at the end is not attended to.

        start: the prompts are pieces that begin there; what is before it has been read into these slots.
        """
        longest = max(len(prompt) for prompt in prompts)
        padded_to = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        if len(prompts) == 1 and start == 0 and padded_to in self._prompt_graphs:
            return [self._replay(padded_to, rows[0], prompts[0])]
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        ends = torch.tensor([start + len(prompt) for prompt in prompts], device=self.device)
        slots = torch.tensor(rows, device=self.device)
        positions = torch.arange(start, start + longest, device=self.device).expand(len(prompts), -1)
        first = self._read(slots, torch.tensor(padded, device=self.device), positions, ends, start)
        return [int(token) for token in first.tolist()]

    def _read(self, slots: Tensor, tokens: Tensor, positions: Tensor, ends: Tensor, start: int = 0) -> Tensor:
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(PROMPT_KERNELS):
            self.current.rows, self.current.start = slots, start
            hidden = self.model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)[0]
            self.current.rows = None
            # Only the last token of each prompt: the logits of all tokens would be the largest tensor of all.
            last = hidden[torch.arange(len(tokens), device=self.device), ends - start - 1]
            first: Tensor = self.model.lm_head(last[:, None])[:, 0].argmax(dim=-1)
        self.tokens[slots, 0] = first
        self.positions[slots] = ends
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

    def step(self, used: int, reach: int) -> list[int]:
        """The next token of the first slots, at least as many as are used. reach: one of `reaches`, at least the
        longest context of the used slots."""
        width = self.advance(used, reach)
        return [int(token) for token in self.tokens[:width].view(-1).tolist()]

    def advance(self, used: int, reach: int) -> int:
        """A step whose tokens stay on the device. Returns how many slots it computed."""
        width = next(width for width in self.widths if width >= used)
        reach = next(own for own in self._own_reaches if own >= reach)
        if (width, reach) in self._graphs:
            self._graphs[width, reach]()
        else:
            self._advance(width, reach)
        return width

    @property
    def _own_reaches(self) -> tuple[int, ...]:
        """Reaches whose steps differ. Our kernels look back as far as each slot needs."""
        return self.reaches[-1:] if self._fused or self._splits else self.reaches

    @torch.inference_mode()
    def _advance(self, width: int, reach: int) -> None:
        if self._fused:
            self._fused[width].advance()
            return
        self.tokens[:width] = self._scores(width, reach).argmax(dim=-1, keepdim=True)
        # The position of a free slot advances too; it must stay within its row.
        self.positions[:width].add_(1).clamp_(max=self.length - 1)

    def _scores(self, width: int, reach: int) -> Tensor:
        """Of every token of the vocabulary, for the first slots, by the model's own layers."""
        current, positions = self.current, self.positions[:width]
        current.reach, current.split = reach, self._splits.get(width)
        # Computed once a step, for all layers.
        if current.split is not None:
            pass
        elif current.has_flash:
            current.used = (positions + 1).int()
        else:
            # Added to the scores: with a mask of booleans, every layer would convert it to numbers.
            hidden = self._columns[:reach] > positions[:, None]
            current.mask = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        logits: Tensor = self.model(
            input_ids=self.tokens[:width], position_ids=positions[:, None], use_cache=False
        ).logits
        return logits[:, -1]

    # --- before the first request ---

    def fuse(self) -> bool:
        """Compute steps with few kernels of our own, if the model and the device allow it and the kernels pass a trial;
        prompts are not affected. `refusal` says why they did not pass: then our attention is not used either."""
        if not is_fusible(self.model):
            return False
        widest = FusedStep(self.model, self.tokens, self.positions, self.length)
        steps = {width: widest.narrowed(width) for width in self.widths[:-1]} | {self.widths[-1]: widest}
        self.refusal = self._trial(steps)
        if self.refusal is None:
            self._fused = steps
        else:
            self._splits = {}
        return self.is_fused

    @torch.inference_mode()
    def _trial(self, steps: Mapping[int, FusedStep]) -> str | None:
        """Why the scores of these steps after two prompts are not those of the model's own layers with kernels of
        torch; None if they are, but for rounding."""
        vocabulary, splits = self.model.config.vocab_size, self._splits
        lengths = [min(length, self.length // 2) for length in TRIAL_PROMPTS[: len(self.positions)]]
        prompts = [[(7 * place + 3) % vocabulary for place in range(length)] for length in lengths]
        self.read([*range(len(lengths))], prompts)
        self._splits = {}
        try:
            for width, step in steps.items():
                expected = self._scores(width, self.length)[: len(lengths)].float()
                error = float((step.scores()[: len(lengths)].float() - expected).norm() / expected.norm())
                if not error < TRIAL_ERROR:
                    return f"their scores differ by {error:.2g} of the norm (a step of {width} slots)"
        except steps[self.widths[-1]].kernels.ERRORS as problem:
            return f"{type(problem).__name__}: {problem}"[:200]
        finally:
            self._splits = splits
            self.current.split = self.current.used = self.current.mask = None
            self.positions.zero_()
            self.tokens.zero_()
        return None

    def compile_layers(self) -> None:
        """Compile each layer by itself: all have the same code, so one compilation per reach serves the whole model.
        Steps then always compute all slots: every width would be a compilation of its own."""
        import torch._dynamo

        self.widths = self.widths[-1:]
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(self.reaches))
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)

    def warm_up(self, graph: bool) -> None:
        """Select and compile every kernel, and capture every graph, before the first request."""
        piece = [0] * min(2, self.length // 2)
        self.read([0], [piece])
        self.read([0], [piece], start=len(piece))
        # Steps leave nothing in the memory of their graphs, so these share it; the one that needs most comes first.
        pool = torch.cuda.graph_pool_handle() if graph else None
        # A CPU selects nothing by the width.
        for width in reversed(self.widths if self.device.type == "cuda" else self.widths[-1:]):
            for reach in reversed(self._own_reaches):
                advance = partial(self._advance, width, reach)
                for _ in range(WARM_STEPS):
                    advance()
                if graph:
                    self._graphs[width, reach] = captured(advance, pool)
        if graph:
            self._prompt_length.fill_(1)
            # Prompts, too, leave nothing there.
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
    """What every layer needs to know about the current pass. slots: the number of each slot. positions: the next
    position of each slot. rows: the slots whose prompts are read, None in a step. start: where in the prompts. reach:
    how many columns a step reads. has_flash: see `has_flash`.

    A step uses one of three, depending on its kernel. mask: 0 for columns that count, otherwise minus infinity. used:
    how many columns of each slot count. split: the number of our own attention, which needs the positions alone.
    """

    positions: Tensor
    slots: Tensor
    length: int
    has_flash: bool = False
    rows: Tensor | None = None
    start: int = 0
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
    """Attention of prompts, which are padded at the end, or of pieces of them to everything before and in the piece."""
    rows, start, length = cache.current.rows, cache.current.start, key.shape[2]
    end = start + length
    cache.keys[rows, start:end] = key.transpose(1, 2)
    cache.values[rows, start:end] = value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    if start == 0:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=grouped
        )
    keys, values = (part[rows, :end].transpose(1, 2) for part in (cache.keys, cache.values))
    if cache.current.has_flash:
        # The last token of the piece sees the last key, as torch's `causal_lower_right` does with this operator;
        # `scaled_dot_product_attention` alone would let its first token see the first key.
        attended = torch.ops.aten._scaled_dot_product_flash_attention
        return attended(query, keys, values, 0.0, True, scale=scaling)[0]  # type: ignore[no-any-return]
    seen = torch.ones(length, end, dtype=torch.bool, device=query.device).tril(start)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling, enable_gqa=grouped)


def step_attention(cache: KeyValueCache, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of one token of each of the first slots to everything that its slot has cached."""
    current, width = cache.current, len(query)
    slots, positions = current.slots[:width], current.positions[:width]
    cache.keys[slots, positions] = key[:, :, 0]
    cache.values[slots, positions] = value[:, :, 0]
    if current.split is not None:
        attended = torch.ops.paceline.split_attention
        mixed = attended(query[:, :, 0], cache.keys, cache.values, positions, scaling, current.split)
        return mixed[:, :, None]  # type: ignore[no-any-return]
    if current.used is not None:
        # torch's own operator: `scaled_dot_product_attention` has no argument for how much of a slot counts.
        keys, values = (part[:width].flatten(0, 1) for part in (cache.keys, cache.values))
        each, starts = current.each[: width + 1], current.starts[: width + 1]
        more = {"scale": scaling, "seqused_k": current.used}
        mixed = torch.ops.aten._flash_attention_forward(
            query[:, :, 0], keys, values, each, starts, 1, current.reach, 0.0, False, False, **more
        )[0]
        return mixed[:, :, None]  # type: ignore[no-any-return]
    # Query heads that share a key head become rows as if they were tokens: the keys are read once and not copied for
    # each head. Reading them limits the speed of a step with many slots.
    _, heads, _, size = query.shape
    shared = key.shape[1]
    folded = query.reshape(width, shared, heads // shared, size)
    keys, values = (part[:width, : current.reach].transpose(1, 2) for part in (cache.keys, cache.values))
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=current.mask, scale=scaling)
    return mixed.reshape(width, heads, 1, size)


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
