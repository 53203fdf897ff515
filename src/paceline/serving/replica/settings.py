"""What a replica is told before it starts: one line of JSON, handed from process to process."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.experiment.choices import Choice
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape

# static: all places are given out at once, and again when the last answer has ended. continuous: a place that is free
# is given to the next request between two steps; reading its prompt holds up the others meanwhile.
BATCHING = ("continuous", "static")
# The shortest part of the keys that a step looks at; longer parts are powers of two times this.
SHORTEST_REACH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """max_batch: places, which is the width of every step. max_length: tokens of a prompt and its answer together.
    prefill_tokens: prompts are read together up to so many tokens, padding included. compiled: the layers of a step go
    through torch.compile. graph: a step is one CUDA graph."""

    engine: str
    model: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 42
    precision: str = "fp32"
    device: str = "cpu"
    first_device: int = 0
    tensor_parallel: int = 1
    max_batch: int = 32
    max_length: int = 2048
    prefill_tokens: int = 16_384
    batching: str = "continuous"
    compiled: bool = False
    graph: bool = False
    host: str = "127.0.0.1"

    @property
    def served(self) -> str:
        """The name that requests ask for: of a directory its last part."""
        return self.model.rstrip("/").rpartition("/")[2]

    @property
    def is_directory(self) -> bool:
        return "/" in self.model

    @property
    def shape(self) -> Shape:
        return _shape(self.model, json.dumps(dict(self.model_options), sort_keys=True))

    @property
    def reaches(self) -> tuple[int, ...]:
        """How far back a step can look, shortest first: it takes the shortest that holds its longest context."""
        found = [min(SHORTEST_REACH, self.max_length)]
        while found[-1] < self.max_length:
            found.append(min(2 * found[-1], self.max_length))
        return tuple(found)

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Settings:
        return cls(**json.loads(line))


@functools.cache
def _shape(model: str, options: str) -> Shape:
    """Remembered: every request is held against it, and that of a directory is a file."""
    return load_shape(Choice(model, json.loads(options)))
