"""Greedy decoding over places: prompts are read into them, then all advance together by one token a step.

A step always computes every place, taken or not: its tensors never change their size or their address, so that it can
be compiled once for each reach and replayed as one CUDA graph. What stands in a free place is computed and not told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.serving.replica import attention, projections

WARM_STEPS = 3


class Decoding:
    """Rows are places. `read` and `step` return tokens on this host, in the order of rows."""

    def __init__(self, model: Any, *, places: int, length: int, reaches: Sequence[int], heads: int, width: int) -> None:
        self.model, self.length, self.reaches = model, length, tuple(reaches)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.positions = torch.zeros(places, dtype=torch.long, device=self.device)
        self.tokens = torch.zeros((places, 1), dtype=torch.long, device=self.device)
        self._columns = torch.arange(length, device=self.device)
        self.page = attention.Page(self.positions, torch.arange(places, device=self.device), length)
        attention.install(model, heads, width, self.page)
        self._flash = attention.has_flash(self.dtype, self.device, width)
        self._graphs: dict[int, Callable[[], None]] = {}

    @property
    def attention(self) -> str:
        """What a step looks back with: FlashAttention's kernel for decoding, or torch's choice among its kernels."""
        return "flash" if self._flash else "sdpa"

    @property
    def joined(self) -> bool:
        return projections.is_joined(self.model)

    @property
    def layers(self) -> Any:
        """The decoder layers, by whatever name the architecture has for them."""
        count = self.model.config.num_hidden_layers
        lists = (part for part in self.model.modules() if isinstance(part, torch.nn.ModuleList))
        return next(found for found in lists if len(found) == count)

    @torch.inference_mode()
    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read prompts into places; the first token of each answer. Padding stands behind, where nothing looks."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = max(len(prompt) for prompt in prompts)
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        places = torch.tensor(rows, device=self.device)
        with torch.compiler.set_stance("force_eager"), attention.at_any_length():
            first = self._first_tokens(torch.tensor(padded, device=self.device), lengths, places)
        self.tokens[places, 0] = first
        self.positions[places] = lengths
        return [int(token) for token in first.tolist()]

    def _first_tokens(self, tokens: Tensor, lengths: Tensor, places: Tensor) -> Tensor:
        count, longest = tokens.shape
        positions = torch.arange(longest, device=self.device).expand(count, -1)
        self.page.rows = places
        hidden = self.model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False)[0]
        self.page.rows = None
        # Of each prompt its last token alone: the head's product over all of them would be the largest tensor there is.
        last = hidden[torch.arange(count, device=self.device), lengths - 1]
        return self.model.lm_head(last[:, None])[:, 0].argmax(dim=-1)  # type: ignore[no-any-return]

    def step(self, reach: int) -> list[int]:
        """The next token of every place; reach: one of `reaches`, at least the longest context of those that count."""
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
        self.page.reach = reach
        # Made once a step, for all layers.
        if self._flash:
            self.page.used = (self.positions + 1).int()
        else:
            # Added to scores: every layer would turn truth values into numbers by itself.
            hidden = self._columns[:reach] > self.positions[:, None]
            self.page.seen = torch.zeros_like(hidden, dtype=self.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        logits = self.model(input_ids=self.tokens, position_ids=self.positions[:, None], use_cache=False).logits
        self.tokens.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))
        # A place that nobody has goes on counting; it must stay within its row.
        self.positions.add_(1).clamp_(max=self.length - 1)

    def reset(self) -> None:
        self.positions.zero_()
        self.tokens.zero_()

    # --- made ready before the first request ---

    def compile_layers(self) -> None:
        """Each layer by itself: all have the same code, so one compilation a reach serves for the whole model."""
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(self.reaches))
        for layer in self.layers:
            layer.compile(fullgraph=True, dynamic=False)

    def warm_up(self, graph: bool) -> None:
        """Every kernel chosen and compiled, and every graph captured, before the clock of any request runs."""
        self.read([0], [[0, 0]])
        for reach in reversed(self.reaches):
            for _ in range(WARM_STEPS):
                self._advance(reach)
            if graph:
                self._graphs[reach] = self._captured(reach)
        self.reset()

    def _captured(self, reach: int) -> Callable[[], None]:
        """Captured by hand and not by torch.compile's own mode: all tensors of a step are ours and stay where they are,
        so a replay has nothing to check."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: NCCL's own thread asks its events at any time, which a capture of all would not stand.
        with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._advance(reach)
        return graph.replay
