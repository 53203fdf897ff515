"""What is predicted: a model, a batch, a layout and the software, on a number of GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from paceline.models import arithmetic
from paceline.models.shape import Shape
from paceline.prediction.hardware import Accelerator

SHARDS = ("none", "zero1", "zero2", "zero3", "hybrid")
# selective: about half of the products are repeated. attention: only the attention itself is.
CHECKPOINTING = ("none", "attention", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What the training program does that changes its speed.

    fused_attention: the scores never reach memory (FlashAttention). engine: NVIDIA Transformer Engine. cudnn_attention:
    attention by cuDNN, which on Hopper is what Transformer Engine uses. fused_elementwise: norms, activations and the
    loss have kernels of their own; plain PyTorch has not. compiled: a compiler fuses them. queued: the host queues
    steps ahead and never waits for one. recomputes: the checkpointing of published rows that state none but would not
    fit without. sequence_parallel: norms are split over tensor-parallel ranks.
    fp8_gather: sharded weights travel in 8 bits. late_reduce: gradients are reduced after the backward pass, not during
    it. reduce_bytes: per gradient on the wire. stops_early: recomputation ends before the last product of a layer,
    whose result the backward pass does not read. weight_bytes: through memory per weight and micro batch besides what
    the products read and write: casts of weights, and gradients that are added up or copied for a collective.
    update_bytes: through memory per parameter and update, where it was measured alone; else that of the fit.
    host_update_s, host_pass_s: what the host does for each weight tensor after the last backward pass, while the GPU
    waits, and during each pass, while the GPU computes.
    """

    name: str
    family: str = "torch"
    fused_attention: bool = True
    engine: bool = False
    cudnn_attention: bool = False
    fused_elementwise: bool = True
    compiled: bool = False
    queued: bool = False
    sequence_parallel: bool = False
    late_reduce: bool = False
    async_tp: bool = False
    fp8_gather: bool = False
    recomputes: str = "full"
    reduce_bytes: float = 2.0
    stops_early: bool = False
    weight_bytes: float = 6.0
    bucket_bytes: float = 25 * 2**20
    update_bytes: float | None = None
    host_update_s: float = 0.0
    host_pass_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training configuration. Data parallelism is what remains: gpus / (tp * pp * cp).

    micro_batches: per step and data-parallel rank. stages: virtual pipeline stages of one rank. trained: parameters
    that learn (adapters: few). document_length: where short documents are packed into a sequence, their length.
    quantised: frozen weights are stored in 4 bits and expanded before each product. offload: the host keeps the
    optimizer's state and updates it (ZeRO-Offload); at stage 3 it also keeps the weights. ep: how many of the dp * cp
    ranks share the experts of every layer.
    """

    shape: Shape
    gpu: Accelerator
    software: Software
    gpus: int
    sequence_length: int
    micro_batch: int
    micro_batches: float
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stages: int = 1
    shard: str = "none"
    offload: bool = False
    fp8: bool = False
    fp8_rowwise: bool = False
    checkpointing: str = "none"
    trained: int | None = None
    quantised: bool = False
    document_length: int | None = None
    gpus_per_node: int | None = None
    link_bytes_per_s: float | None = None
    node_bytes_per_s: float | None = None

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def global_batch(self) -> float:
        return self.micro_batch * self.micro_batches * self.dp

    @property
    def tokens_per_step(self) -> float:
        return self.global_batch * self.sequence_length

    @property
    def per_node(self) -> int:
        return self.gpus_per_node or self.gpu.gpus_per_node

    @property
    def link(self) -> float:
        return self.link_bytes_per_s or self.gpu.link_bytes_per_s

    @property
    def node_network(self) -> float:
        return self.node_bytes_per_s or self.gpu.node_bytes_per_s

    @property
    def parameters(self) -> int:
        return arithmetic.parameters(self.shape)

    @property
    def held(self) -> int:
        """Parameters of one copy of the model but for the experts that other ranks of its group have."""
        if self.ep == 1:
            return self.parameters
        experts = self.shape.layers * (self.shape.experts or 0) * arithmetic.expert_parameters(self.shape)
        return self.parameters - experts + experts // self.ep

    @property
    def has_adapters(self) -> bool:
        return self.trained is not None and self.trained < self.parameters

    @property
    def layout(self) -> str:
        """`dp=32,tp=8`, with what differs from plain data parallelism."""
        degrees = [f"dp={self.dp}"]
        degrees += [f"{name}={n}" for name in ("tp", "pp", "cp", "ep") if (n := getattr(self, name)) > 1]
        degrees += [f"vp={self.stages}"] if self.stages > 1 else []
        degrees += [self.shard] if self.shard != "none" else []
        degrees += ["offload"] if self.offload else []
        return ",".join(degrees)

    def replaced(self, **changes: object) -> Setup:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
