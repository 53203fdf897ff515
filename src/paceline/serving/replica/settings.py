"""The settings of a replica, which are passed from process to process as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from paceline.experiment.choices import Choice
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape

# The store of a process group: its host, its port, and the prefix of its keys.
Meeting = tuple[str, int, str]
# static: all slots are filled at once, and again when the last answer has ended. continuous: a free slot gets the next
# request between two steps; reading its prompt delays the others, by `prefill_chunk` tokens at a time.
BATCHING = ("continuous", "static")
# The shortest part of the keys that a step reads; longer parts are powers of two times this.
SHORTEST_REACH = 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """max_batch: slots. max_length: tokens of a prompt and its answer together. prefill_tokens: the most tokens of
    prompts that are read together, with padding. prefill_chunk: the most tokens that are read between two steps; a
    longer prompt is read in pieces (0: no limit). compiled: the layers of a step use torch.compile. graph: a step is
    one CUDA graph. nodes: hosts that share the processes of tensor parallelism. part: the number of this host among
    them; the first one answers requests."""

    engine: str
    model: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 42
    precision: str = "fp32"
    device: str = "cpu"
    first_device: int = 0
    tensor_parallel: int = 1
    nodes: int = 1
    part: int = 0
    max_batch: int = 32
    max_length: int = 2048
    prefill_tokens: int = 16_384
    prefill_chunk: int = 0
    batching: str = "continuous"
    compiled: bool = False
    graph: bool = False
    host: str = "127.0.0.1"

    @property
    def served(self) -> str:
        """The model name in requests: for a directory, the last path component."""
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def ranks(self) -> range:
        """The ranks of tensor parallelism on this host."""
        count = self.tensor_parallel // self.nodes
        return range(self.part * count, (self.part + 1) * count)

    @property
    def is_directory(self) -> bool:
        return "/" in self.model

    @cached_property
    def shape(self) -> Shape:
        """Cached: every request is checked against it, and the shape of a directory is a file."""
        return load_shape(Choice(self.model, dict(self.model_options)))

    @property
    def reaches(self) -> tuple[int, ...]:
        """How far back a step can look, shortest first: it uses the shortest that covers its longest context."""
        lengths = [min(SHORTEST_REACH, self.max_length)]
        while lengths[-1] < self.max_length:
            lengths.append(min(2 * lengths[-1], self.max_length))
        return tuple(lengths)
