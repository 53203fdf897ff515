"""The training step of a mesh: forward and backward of this rank's stages, and a norm over all of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.contract import Seat
from paceline.experiment.layout import Layout
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load
from paceline.training.decoder import DTYPES, IGNORED_LABEL, balance_loss, output_words
from paceline.training.strategies._mesh import pipeline, tensor
from paceline.training.strategies._mesh.context import part_of_sequence
from paceline.training.strategies._mesh.scaler import AgreedScaler
from paceline.training.strategies._mesh.stage import Stage, is_expert, loss_of, parameters_of
from paceline.training.strategies._torch import INITIAL_LOSS_SCALE, TorchTrainer, learning


class MeshTrainer(TorchTrainer):
    """Implements `contract.Trainer` for the stages of one rank.

    A pipeline needs all micro batches of a step at once: they are collected, and the last call of `backward` runs the
    schedule. The loss that `forward` returns is then filled in.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, Stage]],
        spec: RunSpec,
        seat: Seat,
        layout: Layout,
        mesh: Any,
        context: Any,
        experts: Any,
        settings: Mapping[str, Any],
    ) -> None:
        self.stages, self.spec, self.seat, self.layout, self.mesh = stages, spec, seat, layout, mesh
        self.context, self.experts, self.shape = context, experts, load(spec.model)
        at = layout.coordinates(seat.rank)
        self.part: Tensor | None = None
        if layout.cp > 1:
            length = spec.training.sequence_length
            self.part = part_of_sequence(length, at["cp"], layout.cp, ring=layout.ring).to(seat.torch_device)
        module = nn.ModuleList(stage for _, stage in stages)
        super().__init__(
            module,
            spec,
            seat,
            full_parameters=self._full_parameters,
            sync=self._sync,
            settings=settings,
            prefix=f"stage.{at['pp']}." if layout.pp > 1 else "",
        )
        if self.scaler.is_enabled():
            self.scaler = AgreedScaler(seat.torch_device, INITIAL_LOSS_SCALE)
        self.tied = self._tied_group()
        self.interleaves = layout.pp > 1
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.schedule: Any = None
        self.scheduled = torch.Size()
        # A context around each run of the schedule, which it is given.
        self.watching: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    # --- forward and backward ---

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        if self.part is not None:
            tokens, labels = tokens[:, self.part], labels[:, self.part]
        self.normaliser = normaliser
        if self.layout.pp > 1:
            self.waiting.append((tokens, labels))
            return torch.zeros((), device=self.seat.torch_device)
        self.sync(last)
        with self._loss_context():
            loss = self._loss(self.stages[0][1](tokens), labels)
        return _with_value(loss, self._total(loss, "cp"))

    def backward(self, loss: Tensor, last: bool) -> None:
        if self.layout.pp == 1:
            with self._loss_context():
                self._scaled(loss).backward()  # type: ignore[no-untyped-call]
        elif last:
            loss.copy_(self._run_pipeline())

    def _scaled(self, loss: Tensor) -> Tensor:
        """Ranks of a context parallel group each have a part of the loss, and gradients are averaged over them. With
        fp16 it is also scaled."""
        scaled: Tensor = self.scaler.scale(loss * (self.layout.cp / self.training.accumulation))
        return scaled

    def _loss(self, made: Any, labels: Tensor) -> Tensor:
        """The loss of this rank's tokens, from the logits and, of a mixture, the balance term."""
        if self.shape.experts:
            logits, balance = made
            return self._loss_of_words(logits, labels) + balance_loss(self.shape, balance)
        return self._loss_of_words(made, labels)

    def _loss_of_words(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss from logits, of which each rank has those of a part of the words with tensor parallelism."""
        if self.layout.tp == 1:
            return loss_of(logits, labels, self.normaliser, IGNORED_LABEL)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        size = torch.Size((*logits.shape[:-1], self.shape.vocab))
        stride = (size[1] * size[2], size[2], 1)
        mesh = self.mesh["tp"]
        whole: Any = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=size, stride=stride)
        if not self.layout.loss_parallel:
            return loss_of(whole.full_tensor(), labels, self.normaliser, IGNORED_LABEL)
        same = DTensor.from_local(labels.contiguous(), mesh, [Replicate()], run_check=False)
        count = DTensor.from_local(self.normaliser, mesh, [Replicate()], run_check=False)
        loss: Any = loss_of(whole, same, count, IGNORED_LABEL)
        return loss.full_tensor()  # type: ignore[no-any-return]

    def _loss_context(self) -> contextlib.AbstractContextManager[Any]:
        if self.layout.tp == 1 or not self.layout.loss_parallel:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def _run_pipeline(self) -> Tensor:
        tokens, labels = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting.clear()
        self.sync(False)
        if tokens.shape != self.scheduled:
            self.schedule, self.scheduled = self._schedule(*tokens.shape), tokens.shape
        losses: list[Tensor] = []
        given = (tokens,) if self.layout.has_first(self.rank) else ()
        more = {"return_outputs": False} if "return_outputs" in inspect.signature(self.schedule.step).parameters else {}
        with self._loss_context(), self.watching(self.schedule):
            target = labels if self.layout.has_last(self.rank) else None
            self.schedule.step(*given, target=target, losses=losses, **more)
        accumulation = self.training.accumulation / self.layout.cp / self.scaler.get_scale()
        own = sum((loss.detach() for loss in losses), torch.zeros((), device=self.seat.torch_device))
        return self._total(self._total(own * accumulation, "cp"), "pp")

    @contextlib.contextmanager
    def timing(self) -> Iterator[pipeline.Times]:
        """Time the pipeline of the steps inside, which waits for the device at every piece of work."""
        times = pipeline.Times(self.seat.device)
        with self._watched(times.of):
            yield times

    def at_first_backward(self, read: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """In the steps inside, call `read` before the first backward pass: all forward passes of the pipeline's start
        are done then, so their activations are complete."""
        return self._watched(partial(pipeline.before_first_backward, read=read))

    @contextlib.contextmanager
    def _watched(self, watching: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        before, self.watching = self.watching, watching
        try:
            yield
        finally:
            self.watching = before

    def _schedule(self, batch: int, length: int) -> Any:
        """A schedule for so many sequences, of which this rank has so many tokens each."""
        count = self.layout.micro_batches or self.training.accumulation
        tp = self.layout.tp
        rows, dtype = batch // count, DTYPES[self.training.precision.base]
        between = torch.empty(
            (rows, length // (tp if self.layout.sequence_parallel else 1), self.shape.hidden),
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        own_words = self._own_words()

        def examples(stage: Stage) -> tuple[Any, Any]:
            given = torch.empty((rows, length), dtype=torch.int64, device="meta") if stage.first else between
            made = torch.empty((rows, length, own_words), dtype=dtype, device="meta", requires_grad=True)
            after = made if stage.last else between
            if not self.shape.experts:
                return given, after
            balance = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
            return given if stage.first else (given, balance), (after, balance)

        def loss(made: Any, labels: Tensor) -> Tensor:
            return self._scaled(self._loss(made, labels))

        group, device = self.mesh.get_group("pp"), self.seat.torch_device
        return pipeline.schedule_of(self.stages, self.layout, group, device, count, examples, loss)

    def _own_words(self) -> int:
        """Words whose logits this rank has: consecutive parts of equal size, and what is left for the last ranks.
        Where ranks do not share them: all, padded."""
        if self.layout.tp == 1:
            return output_words(self.shape.vocab, self.seat.torch_device)
        part = -(-self.shape.vocab // self.layout.tp)
        begin = self.layout.coordinates(self.rank)["tp"] * part
        return max(0, min(part, self.shape.vocab - begin))

    def _total(self, value: Tensor, dimension: str) -> Tensor:
        """The sum over the ranks of a dimension, without a gradient."""
        mesh = self.context if dimension == "cp" else self.mesh
        if getattr(self.layout, dimension) == 1:
            return value.detach()
        total = value.detach().clone()
        dist.all_reduce(total, group=mesh.get_group(dimension))
        return total

    def _sync(self, last: bool) -> None:
        if self.layout.data_ranks > 1 and self.layout.pp == 1:
            stage: Any = self.stages[0][1]
            stage.set_requires_gradient_sync(last or self.layout.sync_every_micro_batch)
            stage.set_reshard_after_backward(last or not self.layout.gather_once)

    # --- update ---

    def update(self) -> Tensor:
        for parameter in learning(self.module):
            gradient: Any = parameter.grad
            # Norms under sequence parallelism: each rank has the sum over its part of the sequence.
            if hasattr(gradient, "placements") and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                whole = gradient.to(self.seat.torch_device).redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
                parameter.grad = whole.to(gradient.device)
        for parameter in self._experts():
            # A rank's experts saw the tokens of `ep` ranks, and their gradients were averaged over fewer.
            _local(parameter.grad).div_(self.layout.ep)
        self._add_tied()
        return super().update()

    def prefix_of(self, number: int) -> str:
        experts = {id(p) for p in self._experts()}
        is_own = id(learning(self.module)[number]) in experts
        return self.prefix + (f"ep.{self.experts.get_local_rank('ep')}." if is_own else "")

    def _experts(self) -> list[nn.Parameter]:
        """Weights of which the ranks of an expert parallel group each have others."""
        if self.layout.ep == 1:
            return []
        return [p for name, p in self.module.named_parameters() if is_expert(name)]

    def clip(self) -> Tensor:
        """Clip by the norm over all ranks. A part that several ranks hold counts once."""
        total = torch.zeros((), device=self.seat.torch_device)
        ranks = self.layout.world_size // self.layout.pp
        apart, experts = {id(p) for p in self._twice_held()}, {id(p) for p in self._experts()}
        for own, parameter in zip(self.stepped, learning(self.module), strict=True):
            if id(parameter) not in apart:
                squares = _local(own.grad).float().square().sum().to(total.device)
                pieces = _pieces(own) * (self.layout.ep if id(parameter) in experts else 1)
                total += squares * (pieces / ranks)
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = (self.training.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for own in self.stepped:
            gradient = _local(own.grad)
            gradient.mul_(factor.to(gradient.device))
        return norm

    def _twice_held(self) -> list[Tensor]:
        """Heads whose weight is also the embedding of another stage."""
        return [stage.head.weight for _, stage in self.stages if stage.tied_apart]

    def _tied_group(self) -> Any:
        """The first and the last rank of this rank's pipeline, if the model ties embedding and head over stages."""
        if not self.shape.tied or self.layout.pp == 1 or self.layout.v_shaped:
            return None
        column = self.layout.world_size // self.layout.pp
        found = None
        for first in range(column):
            ranks = [first, first + (self.layout.pp - 1) * column]
            group = dist.new_group(ranks, group_desc="mesh_pp")
            found = group if self.seat.rank in ranks else found
        return found

    def _add_tied(self) -> None:
        """Embedding and head of a tied model are two copies of one weight: both get the sum of their gradients."""
        if not self.shape.tied or self.layout.pp == 1:
            return
        held = [*self._twice_held(), *(stage.embedding.weight for _, stage in self.stages if stage.first)]
        if self.layout.v_shaped and held:
            parts = [_local(parameter.grad) for parameter in held]
            total = parts[0] + parts[1]
            for part in parts:
                part.copy_(total)
        elif self.tied is not None:
            for parameter in held:
                own = _local(parameter.grad)
                total = own.to(self.seat.torch_device)
                dist.all_reduce(total, group=self.tied)
                own.copy_(total)

    # --- weights ---

    def _full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights in the decoder's order of names and rows; with a pipeline, sent by the rank that has them."""
        held = [(stage, name, p) for _, stage in self.stages for name, p in stage.decoder_names()]
        # A head that is tied to an embedding elsewhere is a copy.
        own = {name: p for stage, name, p in held if not (stage.tied_apart and name == "embedding.weight")}
        group = self.mesh.get_group("pp") if self.layout.pp > 1 else None
        for name, size in parameters_of(self.shape).items():
            value: Tensor | None = None
            if name in own:
                parameter: Any = own[name]
                # NCCL gathers on the device only, also what is offloaded to host memory.
                here = parameter.detach().to(self.seat.torch_device)
                value = here.full_tensor() if hasattr(here, "full_tensor") else here
                if self.layout.ep > 1 and is_expert(name):
                    value = self._all_experts(value.detach())
                value = tensor.in_decoder_order(value.detach(), tensor.row_order(name, self.shape, self.layout.tp))
            if group is not None:
                value = self._from_owner(name, value, size, group)
            assert value is not None
            yield name, value

    def _all_experts(self, own: Tensor) -> Tensor:
        """The weights of all experts of a layer, from the ranks that share them."""
        parts = [torch.empty_like(own) for _ in range(self.layout.ep)]
        dist.all_gather(parts, own.contiguous(), group=self.experts.get_group("ep"))
        return torch.cat(parts)

    def _from_owner(self, name: str, value: Tensor | None, size: tuple[int, ...], group: Any) -> Tensor:
        stage = self._stage_of(name)
        owner = next(p for p in range(self.layout.pp) if stage in self.layout.stages_of(p * self._column))
        if value is None:
            dtype = self.stepped[0].dtype if self.masters is None else self.masters.parameters[0].dtype
            value = torch.empty(size, dtype=dtype, device=self.seat.torch_device)
        else:
            value = value.to(self.seat.torch_device).contiguous()
        dist.broadcast(value, dist.get_global_rank(group, owner), group=group)
        return value

    @property
    def _column(self) -> int:
        return self.layout.world_size // self.layout.pp

    def _stage_of(self, name: str) -> int:
        part = name.split(".")
        if part[0] == "blocks":
            layer, stages = int(part[1]), range(self.layout.stages)
            return next(s for s in stages if layer in self.layout.layers_of(s, self.shape.layers))
        return 0 if part[0] in ("embedding", "positions") else self.layout.stages - 1


def _with_value(loss: Tensor, value: Tensor) -> Tensor:
    """`loss` for its gradient, with another value to report."""
    return loss + (value - loss.detach())


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def _pieces(value: Any) -> int:
    """Into how many distinct parts a DTensor is split; 1 for a plain tensor."""
    pieces = 1
    for dimension, placement in enumerate(getattr(value, "placements", ())):
        pieces *= 1 if placement.is_replicate() else value.device_mesh.size(dimension)
    return pieces
