"""A decode step of models built like Llama, of few kernels: the layers' own weights, but none of their code.

transformers' layers, compiled, take 14 kernels per layer. Most of them do next to nothing, and no weight is read
meanwhile. Here a layer takes 5 (one request) to 10.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.serving.replica.plans import PRODUCTS, Division, Plan, plan_of

if TYPE_CHECKING:
    from paceline.serving.replica import kernels

# Attention of these is: one product, rotation by halves, grouped heads, one product.
ATTENTIONS = ("LlamaAttention", "MistralAttention")
# Rotations by a table that does not depend on the longest context.
ROTATIONS = ("default", "llama3", "linear", "yarn")


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: norms, and products with joined siblings."""

    norm: Tensor
    attention_in: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    mlp_in: Tensor
    mlp_out: Tensor
    epsilon: float
    scale: float
    keys: Tensor
    values: Tensor


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our kernels run on this device: a GPU of NVIDIA's Ampere generation or later, in 16 bits."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip is not None:
        return False
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def is_fusible(model: Any) -> bool:
    """Whether a step of this model can be computed here."""
    first = next(model.parameters())
    return has_kernels(first.dtype, first.device) and has_known_layers(model)


# --- attention of a step, also for models with layers of transformers ---

_ATTENTIONS: list[kernels.SplitAttention] = []


def has_width(width: int) -> bool:
    """Tiles have a power of two."""
    return 16 <= width <= 256 and width & (width - 1) == 0


def split_attention(
    dtype: torch.dtype, device: torch.device, slots: int, heads: int, group: int, width: int, length: int
) -> int | None:
    """The number of our attention for these slots in calls of `paceline::split_attention`; None where it cannot run."""
    if not has_kernels(dtype, device) or not has_width(width):
        return None
    from paceline.serving.replica import kernels

    division = Division.of(slots * heads, processors_of(device), length)
    _ATTENTIONS.append(kernels.SplitAttention(slots, heads, group, width, division, device))
    return len(_ATTENTIONS) - 1


@torch.library.custom_op("paceline::split_attention", mutates_args=())
def _split_attention(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float | None, number: int
) -> Tensor:
    """query: (slots, heads, width). An operator: the compiler does not look inside."""
    query = query.contiguous()
    out = torch.empty_like(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _ATTENTIONS[number](query.flatten(1), keys, values, positions, out, scale)
    return out


@_split_attention.register_fake
def _(query: Tensor, _keys: Tensor, _values: Tensor, _positions: Tensor, _scale: float | None, _number: int) -> Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# --- whole steps ---


def has_known_layers(model: Any) -> bool:
    """Whether all layers are ones that `FusedStep` computes: bias-free, whole, with joined siblings."""
    config, body = model.config, model.get_decoder()
    rotation = getattr(getattr(body, "rotary_emb", None), "rope_type", None)
    if rotation not in ROTATIONS or getattr(config, "hidden_act", None) != "silu":
        return False
    layers = getattr(body, "layers", ())
    return bool(len(layers)) and all(map(_is_known, layers))


def _is_known(layer: Any) -> bool:
    attention: Any = getattr(layer, "self_attn", None)
    mlp = getattr(layer, "mlp", None)
    if type(attention).__name__ not in ATTENTIONS or not hasattr(attention, "key_value_cache"):
        return False
    outs = (attention.o_proj, getattr(mlp, "down_proj", None))
    joined = [getattr(part, "joined", None) for part in (attention.q_proj, getattr(mlp, "gate_proj", None))]
    if not has_width(attention.head_dim):
        return False
    # A hook sums over the processes of tensor parallelism.
    plain = all(type(part) is torch.nn.Linear and part.bias is None and not part._forward_hooks for part in outs)
    return plain and all(part is not None and part.bias is None for part in joined)


def layers_of(model: Any) -> list[Layer]:
    found = []
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        found.append(
            Layer(
                norm=layer.input_layernorm.weight,
                attention_in=attention.q_proj.joined.weight,
                attention_out=attention.o_proj.weight,
                mlp_norm=layer.post_attention_layernorm.weight,
                mlp_in=mlp.gate_proj.joined.weight,
                mlp_out=mlp.down_proj.weight,
                epsilon=layer.input_layernorm.variance_epsilon,
                scale=attention.scaling,
                keys=attention.key_value_cache.keys,
                values=attention.key_value_cache.values,
            )
        )
    return found


class FusedStep:
    """`advance` computes the next token of every slot from `tokens` and `positions`, and writes it to them. With views
    of the first slots' tokens and positions it computes these slots alone."""

    def __init__(self, model: Any, tokens: Tensor, positions: Tensor, length: int, plan: Plan | None = None) -> None:
        from paceline.serving.replica import kernels

        self.kernels = kernels
        body = model.get_decoder()
        self.layers = layers_of(model)
        self.length = length
        self.embedding, self.norm, self.head = body.embed_tokens.weight, body.norm.weight, model.lm_head.weight
        first = self.layers[0]
        _, _, heads, width = first.keys.shape
        self.keyed, self.asking = heads * width, first.attention_out.shape[1]
        columns = torch.arange(length, device=self.head.device)[None]
        # In the precision of the model, as transformers rotates.
        self.cosines, self.sines = (part[0].contiguous() for part in body.rotary_emb(self.embedding[:1], columns))
        self._begin(tokens, positions, plan)

    def narrowed(self, width: int) -> FusedStep:
        """A step of the first slots: the same weights, tables and cache, but a plan and intermediate results of its
        own."""
        step = copy.copy(self)
        step._begin(self.tokens[:width], self.positions[:width], None)
        return step

    def _begin(self, tokens: Tensor, positions: Tensor, plan: Plan | None) -> None:
        """What depends on the number of slots."""
        kernels, first, device, slots = self.kernels, self.layers[0], self.head.device, len(tokens)
        _, _, heads, width = first.keys.shape
        self.tokens, self.positions = tokens, positions
        self.plan = plan or plan_for(first, slots, self.length, device)
        group = self.asking // self.keyed
        self.attention = kernels.SplitAttention(slots, heads, group, width, self.plan.attention, device)
        self.choice = kernels.Choice(slots, self.head.shape[0], device)
        hidden, ffn = self.head.shape[1], first.mlp_out.shape[1]

        def room(columns: int) -> Tensor:
            return torch.zeros((slots, columns), dtype=self.head.dtype, device=device)

        self.hidden, self.normed, self.joined = room(hidden), room(hidden), room(first.attention_in.shape[0])
        self.mixed, self.gates, self.active = room(self.asking), room(2 * ffn), room(ffn)

    @torch.inference_mode()
    def advance(self) -> None:
        self.choice(self.scores(), self.tokens, self.positions, self.length - 1, self.plan.early)

    @torch.inference_mode()
    def scores(self) -> Tensor:
        """Of every token of the vocabulary, for every slot; keys and values are cached."""
        kernels, early, hidden = self.kernels, self.plan.early, self.hidden
        torch.index_select(self.embedding, 0, self.tokens.view(-1), out=hidden)
        asked, key, value = torch.split(self.joined, [self.asking, self.keyed, self.keyed], dim=1)
        new = key, value, self.cosines, self.sines
        gated = "mlp_in" in self.plan.tiles
        for layer in self.layers:
            self._enter("attention_in", layer.norm, layer.attention_in, layer.epsilon, self.joined)
            keys, values, mixed = layer.keys, layer.values, self.mixed
            self.attention(asked, keys, values, self.positions, mixed, layer.scale, new=new, early=early)
            self._leave("attention_out", mixed, layer.attention_out)
            out = self.active if gated else self.gates
            self._enter("mlp_in", layer.mlp_norm, layer.mlp_in, layer.epsilon, out)
            if not gated:
                kernels.gate(self.gates, self.active, early=early)
            self._leave("mlp_out", self.active, layer.mlp_out)
        kernels.normalise(hidden, self.norm, self.normed, self.layers[0].epsilon, early=early)
        return F.linear(self.normed, self.head)

    def _enter(self, name: str, norm: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
        """A product of the normed hidden state."""
        kernels, early, tile = self.kernels, self.plan.early, self.plan.tiles.get(name)
        if tile is None:
            kernels.normalise(self.hidden, norm, self.normed, epsilon, early=early)
            torch.mm(self.normed, weight.t(), out=out)
        else:
            gated = name == "mlp_in"
            kernels.multiply_one(self.hidden, weight, out, tile, scales=norm, epsilon=epsilon, gated=gated, early=early)

    def _leave(self, name: str, given: Tensor, weight: Tensor) -> None:
        """A product that is added to the hidden state."""
        tile = self.plan.tiles.get(name)
        if tile is None:
            self.hidden.addmm_(given, weight.t())
        else:
            self.kernels.multiply_one(given, weight, self.hidden, tile, adds=True, early=self.plan.early)


def plan_for(layer: Layer, slots: int, length: int, device: torch.device) -> Plan:
    sizes = {name: tuple(getattr(layer, name).shape) for name in PRODUCTS}
    # Gate and up are one output.
    sizes["mlp_in"] = (sizes["mlp_in"][0] // 2, sizes["mlp_in"][1])
    early = torch.cuda.get_device_capability(device) >= (9, 0)
    return plan_of(sizes, slots, layer.keys.shape[2], length, processors_of(device), early)
