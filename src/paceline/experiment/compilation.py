"""How torch compiles a model: the field `compile`, false, true, or a mode with a scope."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import require
from paceline.experiment.choices import Choice

DEFAULT, GRAPHS = "default", "reduce-overhead"
MODES = (DEFAULT, GRAPHS, "max-autotune-no-cudagraphs")
SCOPES = ("model", "block")
ACCEPTED = f"false, true, or a mode ({', '.join(MODES)}), with :scope=block or :scope=model if you want"


@dataclass(frozen=True, slots=True)
class Compilation:
    """mode of torch.compile; scope: the whole model or each block, None for what suits the strategy."""

    mode: str = DEFAULT
    scope: str | None = None

    @property
    def records_graphs(self) -> bool:
        """Whether torch replays CUDA graphs, which need the same addresses in every step."""
        return self.mode == GRAPHS


def compilation(value: bool | str) -> Compilation | None:
    """The field `compile` as it is meant; None for no compilation.

    >>> compilation("reduce-overhead:scope=block")
    Compilation(mode='reduce-overhead', scope='block')
    """
    if isinstance(value, bool):
        return Compilation() if value else None
    choice = Choice.parse(value)
    scope = choice.options.get("scope")
    known = choice.name in MODES and set(choice.options) <= {"scope"} and scope in (None, *SCOPES)
    require(known, "compile", value, ACCEPTED)
    return Compilation(choice.name, scope)


def canonical(value: bool | str) -> bool | str:
    """The same setting in one spelling: the default mode is `true`."""
    found = compilation(value)
    if found is None or found == Compilation():
        return found is not None
    return str(Choice(found.mode, {"scope": found.scope} if found.scope else {}))


def refusal(wanted: Compilation | None, strategy: str, device: str, *, per_block: bool, graphs: bool) -> str | None:
    """Why a strategy cannot compile so; None if it can. per_block: it must compile each block alone, since it works
    between them. graphs: its weights and gradients keep their addresses."""
    if wanted is None:
        return None
    if wanted.records_graphs and device == "cpu":
        return f"compile {GRAPHS} replays CUDA graphs, which a CPU does not have"
    if wanted.records_graphs and not graphs:
        return f"compile {GRAPHS} replays CUDA graphs, which need weights at fixed addresses; {strategy} moves them"
    if per_block and wanted.scope == "model":
        return f"{strategy} works between the blocks of a model, so it is compiled block by block, not with scope=model"
    return None
