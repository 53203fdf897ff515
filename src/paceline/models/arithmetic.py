"""Named model shapes, and their arithmetic: parameters, FLOPs, state bytes and wire bytes.

The formulas are those of docs/method.md section 4, with its letters: h hidden, H heads, K kv heads, d head dim, f ffn,
V vocab, s sequence, g = 3 for a gated MLP else 2; P parameters, G micro batches per step, n ranks.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import RequestError, did_you_mean, require
from paceline.experiment import plugins
from paceline.models.hf_config import read_shape, read_vocabulary, unknown_shape
from paceline.models.shape import ALIASES, FAMILIES, SETTABLE, accepted_by, require_field
from paceline.models.shape import Shape as Shape

CONVENTIONS = ("causal", "full")


class Named(Protocol):
    """Anything with a name and options, such as a `Choice`."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


@functools.cache
def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "models.toml").read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Every named shape, in the order of models.toml."""
    return tuple(_rows())


def load(choice: Named) -> Shape:
    """The named shape, changed by its options; a changed shape has no published count.

    A name with a slash is the directory of a checkpoint, whose config.json describes the shape; with the option layers,
    only so many of its first layers.
    """
    if _is_directory(choice):
        shape = read_shape(choice.name)
        layers = choice.options.get("layers", shape.layers)
        is_count = isinstance(layers, int) and not isinstance(layers, bool) and 1 <= layers <= shape.layers
        require(is_count, f"layers of {choice.name}", layers, f"a whole number from 1 to {shape.layers}")
        return replace(shape, layers=layers)
    # With the types of the options: true equals 1.
    key = choice.name, repr(sorted(choice.options.items()))
    if key not in _shapes:
        _shapes[key] = _named(choice)
    return _shapes[key]


# Each shape that was loaded by its name, which is needed several times for each run of a report.
_shapes: dict[tuple[str, str], Shape] = {}


def _named(choice: Named) -> Shape:
    if choice.name not in _rows():
        hint = did_you_mean(choice.name, names())
        raise RequestError(f"model: got {choice.name!r}, expected a name from `paceline list models`.{hint}")
    row = dict(_rows()[choice.name])
    options = {ALIASES.get(option, option): value for option, value in choice.options.items()}
    for option in options:
        if option not in SETTABLE:
            hint = did_you_mean(option, SETTABLE)
            raise RequestError(f"option of model {choice.name}: got {option!r}, expected {', '.join(SETTABLE)}.{hint}")
    if choice.options:
        row = {**row, **options, "published_parameters": None}
    # The defaults of its family, and fields that follow from heads and hidden.
    name, family = choice.name, row["family"]
    require_field(family in FAMILIES, name, "family", family, " or ".join(FAMILIES))
    full = {**FAMILIES[family], **row}
    for field in ("hidden", "heads"):
        accepted = accepted_by(field, full[field])
        require_field(accepted is None, name, field, full[field], accepted or "")
    full.setdefault("kv_heads", full["heads"])
    full.setdefault("ffn", 4 * full["hidden"])
    if "head_dim" not in full:
        divides = full["hidden"] % full["heads"] == 0
        require_field(divides, name, "heads", full["heads"], f"a divisor of {full['hidden']}")
        full["head_dim"] = full["hidden"] // full["heads"]
    return Shape(name=name, **full)


def vocabulary(choice: Named) -> int:
    """Number of token ids: all that load tests need to know about a served model of any architecture."""
    return read_vocabulary(choice.name) if _is_directory(choice) else load(choice).vocab


def known_shape(choice: Named) -> Shape | None:
    """The shape, or None for a checkpoint directory of an unknown architecture."""
    return None if _is_directory(choice) and unknown_shape(choice.name) else load(choice)


def _is_directory(choice: Named) -> bool:
    is_directory = "/" in choice.name
    known = not is_directory or choice.options.keys() <= {"layers"}
    require(known, "model", str(choice), "a directory without options, or with layers alone")
    return is_directory


def beyond_context(shape: Shape, name: str, length: int) -> str | None:
    """A warning if the sequence is longer than the model's context. Rotary positions still compute it; learned ones
    cannot."""
    if length <= shape.context or shape.positions == "learned":
        return None
    return f"the sequence length {length} exceeds the {shape.context} positions of {name}"


# --- parameters ---


def parameters(shape: Shape) -> int:
    """All trainable numbers of the reference decoder; a tied head counts once."""
    embedding = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    positions = shape.context * shape.hidden if shape.positions == "learned" else 0
    return embedding + positions + shape.layers * block_parameters(shape) + _norm_parameters(shape)


def block_parameters(shape: Shape) -> int:
    """Parameters of one layer: two norms, attention, MLP (of a mixture, all experts and the router)."""
    router = shape.hidden * (shape.experts or 0)
    mlp = (shape.experts or 1) * expert_parameters(shape)
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention_biases = joined + shape.hidden if shape.bias else joined if shape.qkv_bias else 0
    qk_norms = 2 * shape.head_dim if shape.qk_norm else 0
    attention = _attention_weights(shape) + attention_biases + qk_norms
    return 2 * _norm_parameters(shape) + attention + router + mlp


def active_parameters(shape: Shape) -> int:
    """Parameters that take part in the computation of one token: of a mixture, only the chosen experts.

    >>> from paceline.experiment.choices import Choice
    >>> f"{active_parameters(load(Choice('mixtral-8x7b'))):,}"
    '12,879,925,248'
    """
    idle = (shape.experts or 0) - (shape.experts_per_token or 0)
    return parameters(shape) - shape.layers * idle * expert_parameters(shape)


def expert_parameters(shape: Shape) -> int:
    """Parameters of one expert, or of a dense MLP."""
    biases = (2 if shape.gated else 1) * shape.ffn + shape.hidden if shape.bias else 0
    return _mlp_weights(shape) + biases


def tensor_sizes(shape: Shape) -> tuple[int, ...]:
    """Elements of every weight tensor of the reference decoder, which joins q, k, v and gate, up, and all experts."""
    h, heads_out, wide = shape.hidden, shape.heads * shape.head_dim, shape.ffn * (2 if shape.gated else 1)
    experts = shape.experts or 1
    linears = [(heads_out + 2 * shape.kv_heads * shape.head_dim, h), (h, heads_out)]
    linears += [(shape.experts, h)] if shape.experts else []
    linears += [(experts * wide, h), (experts * h, shape.ffn)]
    norm = (h,) * (2 if shape.norm == "layernorm" else 1)
    biases = tuple(rows for rows, _ in linears) if shape.bias else ()
    block = (*norm, *norm, *(rows * columns for rows, columns in linears), *biases)
    ends = (shape.vocab * h,) * (1 if shape.tied else 2)
    return (*block * shape.layers, *ends, *norm, *((shape.context * h,) if shape.positions == "learned" else ()))


def root_parameters(shape: Shape) -> int:
    """Parameters outside the blocks: embeddings, positions, last norm, an untied head."""
    return parameters(shape) - shape.layers * block_parameters(shape)


def block_matrices(shape: Shape) -> int:
    """Elements of the linear layers of all blocks, which have 8 bit with precision float8."""
    return shape.layers * (_attention_weights(shape) + _mlp_weights(shape))


def _norm_parameters(shape: Shape) -> int:
    return shape.hidden * (2 if shape.norm == "layernorm" else 1)


def _attention_weights(shape: Shape) -> int:
    """q and output h*H*d each, k and v h*K*d each."""
    return 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)


def _mlp_weights(shape: Shape) -> int:
    return (3 if shape.gated else 2) * shape.hidden * shape.ffn


def matmul_parameters(shape: Shape) -> int:
    """N_mm: the weights that each token is multiplied with, including the head once.

    sum over layers (h*H*d + 2*h*K*d + H*d*h + g*h*f) + h*V; a mixture has h*E + k*g*h*f in place of g*h*f.
    """
    return shape.layers * _block_matmul_parameters(shape) + shape.hidden * shape.vocab


def _block_matmul_parameters(shape: Shape) -> int:
    router = shape.hidden * (shape.experts or 0)
    return _attention_weights(shape) + router + (shape.experts_per_token or 1) * _mlp_weights(shape)


# --- FLOPs ---


def attention_flops_per_token(shape: Shape, sequence_length: int, convention: str = "causal") -> int:
    """Forward FLOPs of all layers. Per layer: full 2*s*H*2d; causal (s+1)*H*2d, the mean of 1..s keys.

    For rows with padding or several documents, `adapters.attention_flops_per_token` counts the keys that are seen.
    """
    require_field(convention in CONVENTIONS, shape.name, "FLOP convention", convention, " or ".join(CONVENTIONS))
    keys_twice = sequence_length + 1 if convention == "causal" else 2 * sequence_length
    return shape.layers * keys_twice * shape.heads * 2 * shape.head_dim


def flops_per_token(shape: Shape, sequence_length: int, convention: str = "causal") -> int:
    """Training FLOPs, the F of MFU: 3 * (2*N_mm + attention); a backward costs two forwards."""
    return 3 * (2 * matmul_parameters(shape) + attention_flops_per_token(shape, sequence_length, convention))


def recomputed_flops_per_token(
    shape: Shape, sequence_length: int, checkpointing: str, convention: str = "causal"
) -> int:
    """FLOPs that HFU adds to F. full: one more forward of the blocks, without the head. selective: 0, because the
    outputs of matrix products and attention are saved. none: 0."""
    if checkpointing in ("none", "selective"):
        return 0
    require_field(checkpointing == "full", shape.name, "checkpointing", checkpointing, "none, full or selective")
    blocks = shape.layers * _block_matmul_parameters(shape)
    return 2 * blocks + attention_flops_per_token(shape, sequence_length, convention)


# --- state bytes ---


def state_bytes(strategy: Named, parameters: int, group_size: int, compute: str = "bf16") -> float | None:
    """Parameters, gradients and Adam's state per rank, without live units and buffers; None without a formula.

    16 B per parameter. Half precision: weights 2, gradients 2, fp32 master and moments 12; fp32: 4, 4 and 8.
    ddp shards nothing, ZeRO-1 the optimizer state, ZeRO-2 gradients too, ZeRO-3 and FSDP2 all three. FSDP2 between
    unsynchronised micro batches also keeps whole gradients.
    """
    split = sharded_parts(strategy)
    if split is None:
        return None
    optimizer_first = (8, 4, 4) if compute == "fp32" else (12, 2, 2)
    return parameters * (sum(optimizer_first[:split]) / group_size + sum(optimizer_first[split:]))


def sharded_parts(strategy: Named) -> int | None:
    """How many of optimizer state, gradients and weights, in that order, the strategy shards; None if unknown."""
    plugin = plugins.find("strategies", strategy.name)
    return plugin.sharded_parts(strategy.options) if hasattr(plugin, "sharded_parts") else None


# --- wire bytes ---

_WIRE_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send", "recv", "send_recv", "ring", "pair"), lambda n: 1.0),
}

COLLECTIVES = tuple(_WIRE_FACTORS)


def wire_factor(operation: str, group_size: int) -> float:
    """busbw = S/t * factor, and bytes on the wire = S * factor (nccl-tests, PERFORMANCE.md); 0 for a group of one."""
    if operation not in _WIRE_FACTORS:
        raise RequestError(f"collective: got {operation!r}, expected {', '.join(_WIRE_FACTORS)}.")
    return _WIRE_FACTORS[operation](group_size) if group_size > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the `wire_bytes` of a strategy may depend on, in bytes of one whole copy.

    parameters: elements of all weights. gradient_bytes: P*r, gradients that are reduced. weight_bytes: P*p, all weights
    as they are gathered; root_weight_bytes: those outside the blocks. updated_bytes: the weights that learn. tensors:
    elements and bytes of every weight tensor. padding: what a strategy that pads its shards sends as well.
    block_matrices: elements of the linear layers of all blocks.
    """

    options: Mapping[str, Any]
    parameters: int
    accumulation: int
    gradient_bytes: int
    weight_bytes: int
    root_weight_bytes: int
    updated_bytes: int
    tensors: Sequence[tuple[int, int]]
    padding_weight_bytes: int = 0
    padding_gradient_bytes: int = 0
    block_matrices: int = 0


def sent_bytes(strategy: Named, traffic: Traffic, group_size: int) -> float | None:
    """Predicted bytes each rank sends per optimizer step; None where the strategy has no formula."""
    plugin = plugins.find("strategies", strategy.name)
    whole = plugin.wire_bytes(traffic) if hasattr(plugin, "wire_bytes") else None
    return None if whole is None else whole * (group_size - 1) / group_size


def wire_bytes(
    strategy: Named,
    parameters: int,
    group_size: int,
    accumulation: int,
    reduce_bytes: int,
    parameter_bytes: int,
    root_parameters: int = 0,
    tensors: Sequence[int] = (),
    block_matrices: int = 0,
) -> float | None:
    """Predicted bytes each rank sends per optimizer step; None where the strategy has no formula.

    reduce_bytes is r, bytes per reduced gradient element; parameter_bytes is p, bytes per gathered parameter;
    root_parameters those outside the blocks, which FSDP2 gathers once per micro batch instead of twice; tensors the
    sizes of the weight tensors, of which ZeRO-3 does not shard the small ones; block_matrices the elements that may be
    gathered in 8 bit.
    """
    traffic = Traffic(
        options=strategy.options,
        parameters=parameters,
        accumulation=accumulation,
        gradient_bytes=parameters * reduce_bytes,
        weight_bytes=parameters * parameter_bytes,
        root_weight_bytes=root_parameters * parameter_bytes,
        updated_bytes=parameters * parameter_bytes,
        tensors=[(elements, elements * parameter_bytes) for elements in tensors],
        block_matrices=block_matrices,
    )
    return sent_bytes(strategy, traffic, group_size)
