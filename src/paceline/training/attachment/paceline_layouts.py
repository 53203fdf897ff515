"""Where the token ids are among the arguments of a forward pass: looked for once for each shape of a batch.

To look through the arguments costs more than the copy that is made of them. So the answer is remembered for arguments
of the same names, types, dtypes and shapes, which are all that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import paceline_digests as digests
import paceline_facts as facts
import torch
from paceline_steps import Batch

# Layouts that are remembered: a script that pads each batch to its own length has many.
MOST_LAYOUTS = 256
_PLAIN = (NoneType, bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Layout:
    """The arguments, by position or name, with token ids and with what is counted beside them, and their shape."""

    ids: int | str
    more: tuple[tuple[str, int | str], ...]
    samples: int
    positions: int

    def batch(self, args: Any, kwargs: Any) -> Batch:
        """A copy of the rows of a micro batch, made by one operation."""
        ids = args[self.ids] if isinstance(self.ids, int) else kwargs[self.ids]
        batch = Batch(self.samples, self.positions, self.positions)
        batch.is_text, batch.layout = True, self
        if self.more:
            others = [args[place] if isinstance(place, int) else kwargs[place] for _, place in self.more]
            batch.rows, batch.stacked = torch.stack((ids, *others)), tuple([name for name, _ in self.more])
        else:
            batch.rows = ids.clone()
        return batch


class Layouts:
    """The layouts of the batches of one model. names: those of its positional arguments, as far as they are known."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = names
        self._known: dict[tuple[Any, ...], Layout | None] = {}

    def of(self, args: Any, kwargs: Mapping[str, Any]) -> Layout | None:
        """None if the batch cannot be copied by one operation: tensors in mappings or lists, unlike shapes, long rows,
        or no token ids at all."""
        key: list[Any] = [len(args), *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind is torch.Tensor:
                key += value.dtype, value.shape
            elif kind in _PLAIN:
                key.append(None)
            else:
                return None
        known = tuple(key)
        try:
            return self._known[known]
        except KeyError:
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            layout = self._known[known] = _layout(args, kwargs, self.names)
            return layout


def _layout(args: Any, kwargs: Mapping[str, Any], names: Sequence[str]) -> Layout | None:
    found = digests.tensors_in(args, kwargs, names)
    ids = facts.token_ids(found)
    if ids is None:
        return None
    more = facts.counted_in(found, ids)
    is_alone = not more and ids.dim() == 2 and ids.shape[1] <= digests.MOST_ELEMENTS
    if not is_alone and not facts.is_one_tensor(ids, more.values()):
        return None

    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]

    def place(tensor: Any) -> int | str:
        return next(place for place, value in places if value is tensor)

    others = tuple((name, place(tensor)) for name, tensor in more.items())
    return Layout(place(ids), others, ids.shape[0], ids.numel())
