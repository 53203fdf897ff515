"""Observes a training script from inside its process, by torch's global hooks, and writes one line per optimizer step.

    no step ── forward of a module that learns ── step open ── optimizer step ── step closed ── next forward ── written

A step ends with the last optimizer step before the next forward pass, so several optimizers, or the parts of a sharded
one, make one step. Forward passes inside compiled code cannot be seen; there, backward passes mark the steps, and the
data are unknown. Nothing is printed, no device is waited for, and an error of the observer never reaches the script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import sys
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import paceline_digests as digests
import paceline_facts as facts
import paceline_weights as weights
import torch
from paceline_clocks import CudaClock, HostClock
from paceline_layouts import Layouts
from paceline_steps import Batch, Readout, Step

# The step whose collectives are counted and those that `--trace` records: all belong to the warm-up.
WIRE_STEP = 2
LAST_LINES = 30
LOSS_SOURCES = {source: f"loss:{source}" for source in ("track", "output", "backward", "none")}
is_compiling = torch.compiler.is_compiling
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# A union such as `int | float` would be made again in every step.
NUMBER, SEQUENCE = (float, int), (list, tuple)


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """The method, without errors of its own: the observer turns itself off instead."""

    @functools.wraps(method)
    def call(self: Observer, *args: Any) -> None:
        if self.broken is not None:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.turn_off(error)

    return call


class Hook:
    """A hook on the script's model, guarded. Copies of the model, also pickled ones, get a call without effect instead.

    Not one call more than needed: after the operations of a model, every line of ours has to be fetched from memory.
    """

    def __init__(self, observer: Observer, method: Callable[..., None]) -> None:
        self._observer, self._method = observer, method

    def __call__(self, *args: Any) -> None:
        # The first line, because the hook becomes part of what is compiled.
        if is_compiling() or is_tracing() or self._observer.broken is not None:
            return
        try:
            self._method(*args)
        except Exception as error:
            self._observer.turn_off(error)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


@dataclass(slots=True)
class Aside:
    """Forward passes with gradients of a model in evaluation mode: when they began, and what the step had before them.

    is_work: whether an input needs a gradient, as in adversarial training: that is no evaluation.
    """

    began: Any
    batches: int
    losses: int
    spans: int
    is_work: bool


class Observer:
    """The state of one process. `options` are those of the workload script, see `paceline.workloads.script`."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self.folder, self.options = Path(folder), options
        self.broken: str | None = None
        self.clock: Any = HostClock()
        self.device: Any = torch.device("cpu")
        self.file: Any = None
        self.rank = 0
        # The largest model that learns, others beside it, and that of them whose calls are the micro batches.
        self.root: Any = None
        self.others: list[Any] = []
        self.reader: Any = None
        self.reader_reads_text = False
        # The model whose first call is going on, and those whose weights were read before their first update.
        self.first: Any = None
        self.read: list[Any] = []
        self.is_blind = False
        self.announced: tuple[Any, Any] | None = None
        self.depth = 0
        self.handles: list[Any] = []
        self.step: Step | None = None
        self.last_end: Any = None
        self.paused_at: Any = None
        self.optimizer_began: Any = None
        self.backward_depth = 0
        self.closure_calls = self.optimizer_calls = 0
        # The models that were called in training mode, and forward passes in evaluation mode since the last backward
        # pass, of one of them.
        self.trains: set[int] = set()
        self.aside: Aside | None = None
        # What a GradScaler returned last, as a weak reference, and the loss that it scaled.
        self.scaled: tuple[Any, Any] | None = None
        self.readout = Readout(self.write_text)
        self.facts: dict[str, Any] = {}
        self.rates = hashlib.sha256()
        self.last_rates: set[float] | None = None
        self.rates_text = b""
        self.sources: Counter[str] = Counter()
        # By number, the optimizers that have stepped with the step in which they first did, and their groups.
        self.stepped: dict[int, tuple[Any, int]] = {}
        self.groups: dict[int, tuple[str, Any]] = {}
        self.wire: Any = None
        self.profiler: Any = None
        self.tracked: dict[str, Any] = {}
        self.ended = False
        self.early: Any = None
        self.norm_of: Callable[[], Any] | None = None
        self.clips: Any = None
        self.limit = options.get("steps")
        self.traced = options.get("trace") or []
        self.is_tracked = False
        self.pause_began: Any = None
        self.pauses: list[tuple[str, Any, Any]] = []
        self.pid = os.getpid()
        self.world_size = 1
        self.forward_began: Any = None
        # The global hooks by which models are found, and the step at whose end they are removed.
        self.global_handles: list[Any] = []
        self.last_discovery = 0
        # What `sys.exit` was called with last, as a crash, if that says that something failed.
        self.failed_exit: dict[str, Any] | None = None
        # By the number of a model, where token ids are among its arguments.
        self.layouts: dict[int, Layouts] = {}

    def turn_off(self, error: Exception) -> None:
        """After an error of the observer: the script goes on, and the run says so."""
        self.broken = f"{type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            self.write_facts()

    # --- hooks on modules ---

    def discover(self, module: Any, args: Any) -> None:
        """Global hook before every forward pass, until the module that the script trains is known."""
        if is_compiling() or is_tracing():
            return
        self.depth += 1
        if self.depth == 1 and torch.is_grad_enabled() and self.root is not module:
            self.adopt(module, args)
        elif self.depth > 1 and self.root is not None and not self.facts.get("autocast"):
            self.note_inner_autocast()

    def leave_module(self, module: Any, args: Any, output: Any) -> None:
        if not (is_compiling() or is_tracing()):
            self.depth = max(0, self.depth - 1)

    @guarded
    def note_inner_autocast(self) -> None:
        """A framework may enter autocast inside the forward pass of its wrapper."""
        self.facts["autocast"] = facts.autocast(self.facts["device"])

    @guarded
    def adopt(self, module: Any, args: Any) -> None:
        """Take a module that is called by itself and learns as a model of the script, the largest as its root."""
        size = facts.trained_elements(module)
        # A scripted model takes no hooks: its steps are known by their backward passes, as those of compiled code.
        if not size or type(module).__name__ == "RecursiveScriptModule" or facts.is_transformed(module):
            return
        is_root = self.root is None or size > self.facts.get("size", 0)
        if not self.stepped and self.root is not None:
            # A wrapper of a model that the script had called without it.
            is_root = is_root or any(each is self.root for each in module.modules())
        if not is_root and facts.shares_weights(module, self.models()):
            return
        if self.is_blind and not self.see_again():
            return
        self.unhook_models()
        self.others += [module] if not is_root else [self.root] if self.root is not None else []
        if is_root:
            device = next(p for p in module.parameters() if p.requires_grad).device
            self.use_clock_of(device)
            self.root = module
            self.facts |= {"size": size, "device": device.type}
            self.wrap_methods()
        self.hook_models()
        # The hooks of this call were collected before these were added.
        self.first = module
        self.before_forward(module, args, {})
        if hasattr(module, "_orig_mod"):
            # A compiled module: global hooks would become part of what is compiled.
            self.stop_discovery()

    def models(self) -> list[Any]:
        """The root, and the others that share no weight with one before them."""
        found: list[Any] = facts.disjoint([] if self.root is None else [self.root, *self.others])
        return found

    def see_again(self) -> bool:
        """Forget backward passes without a forward pass if no optimizer has stepped since: they were no training."""
        if self.step is None or self.step.end is not None:
            return False
        self.is_blind, self.root, self.step = False, None, None
        self.others, self.read, self.reader, self.reader_reads_text = [], [], None, False
        self.facts, self.stepped, self.groups, self.layouts = {}, {}, {}, {}
        self.rates = hashlib.sha256()
        self.sources.clear()
        return True

    def use_clock_of(self, device: Any) -> None:
        self.device = device
        if device.type == "cuda" and isinstance(self.clock, HostClock):
            # The two clocks have no common marks.
            self.clock = CudaClock(device)
            self.optimizer_began = self.paused_at = self.pause_began = None
            if self.step is not None:
                self.step.begin = self.clock.mark()
                self.step.spans.clear()

    @guarded
    def hook_models(self) -> None:
        for module in self.models():
            before, after = Hook(self, self.before_forward), Hook(self, self.after_forward)
            self.handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def wrap_methods(self) -> None:
        """Gradient norms that no function of torch returns: DeepSpeed's engine keeps them, FSDP 1 has a method."""
        self.norm_of = getattr(self.root, "get_global_grad_norm", None)
        if self.norm_of is not None:
            self.facts["clip_norm"] = facts.clip_norm(self.root.gradient_clipping())
        kinds = (type(m) for m in self.root.modules() if type(m).__name__ == "FullyShardedDataParallel")
        kind = next(kinds, None)
        if kind is not None and kind is not self.clips:
            self.clips = kind
            kind.clip_grad_norm_ = observed_clip(self, kind.clip_grad_norm_)

    def unhook_models(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @contextlib.contextmanager
    def hidden_hooks(self) -> Any:
        """A file of the script must not contain our hooks: `torch.load` refuses what it does not know."""
        is_hooked = bool(self.handles)
        self.unhook_models()
        try:
            yield
        finally:
            if is_hooked:
                self.hook_models()

    def start_discovery(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self.depth = 0
        self.global_handles = [
            register_module_forward_pre_hook(self.discover),
            register_module_forward_hook(self.leave_module, always_call=True),
        ]

    @guarded
    def note_new_optimizer(self) -> None:
        """A script that makes another optimizer while it trains may train another model with it, as notebooks do. What
        was called before the first optimizer, to look at shapes, was no training."""
        if self.step is None and not self.readout.steps:
            return
        if not self.stepped and not self.is_blind and not self.is_tracked and not self.has_gone_back():
            self.step, self.reader, self.reader_reads_text = None, None, False
            self.facts = {name: self.facts[name] for name in ("size", "device") if name in self.facts}
            self.sources.clear()
            return
        # Hooks would become part of what is compiled.
        if not self.facts.get("compiled"):
            self.last_discovery = self.readout.steps + (self.step is not None)
            if not self.global_handles:
                self.start_discovery()

    def has_gone_back(self) -> bool:
        """Whether the open step has a backward pass."""
        return self.step is not None and any(phase == "backward" for phase, *_ in self.step.spans)

    def stop_discovery(self) -> None:
        for handle in self.global_handles:
            handle.remove()
        self.global_handles = []

    def before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        now = self.clock.mark()
        if not torch.is_grad_enabled():
            if not module.training and self.paused_at is None:
                self.paused_at = now
            return
        if not self.is_tracked:
            self.close_step()
        self.end_at_limit()
        step = self.step or self.open_step(now)
        is_first = not step.batches
        if module.training:
            self.trains.add(id(module))
            if self.aside is not None:
                is_first = self.leave_aside(now)
        elif self.aside is None:
            is_work = any(t.requires_grad for t in digests.tensors_in(args, kwargs).values())
            if is_work or id(module) in self.trains:
                began = now if self.pause_began is None else self.pause_began
                self.aside = Aside(began, len(step.batches), len(step.losses), len(step.spans), is_work)
        if self.paused_at is not None:
            step.spans.append(("pause", self.paused_at, now))
            self.paused_at = None
        if is_first and (self.last_end is not None or self.is_tracked):
            step.spans.append(("data_wait", step.begin, now))
        self.announced = None
        if self.reader is None and self.first is None:
            self.first = module
        if self.first is None and self.closure_calls < 2:
            source = step.source
            if source is module or source is None or module is self.reader:
                if source is not module:
                    # Until the reader is called, the batches are those of the first model of the step.
                    step.source = module
                    step.batches.clear()
                step.batches.append(self.batch_of(module, args, kwargs))
        if "autocast" not in self.facts:
            self.facts["autocast"] = facts.autocast(self.facts["device"])
        self.forward_began = now

    def leave_aside(self, now: Any) -> bool:
        """Forward passes in evaluation mode that no backward pass followed were an evaluation without `no_grad`.
        Returns whether the step has nothing before it."""
        aside, step, self.aside = self.aside, self.step, None
        if aside is None or step is None:
            return False
        del step.batches[aside.batches :], step.losses[aside.losses :]
        if not aside.is_work:
            # Pauses since then are a part of this one.
            step.spans[aside.spans :] = [("pause", aside.began, now)]
            self.paused_at = None
        return not aside.is_work and not step.batches

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        step, began = self.step, self.forward_began
        if step is None or began is None or not torch.is_grad_enabled():
            return
        self.forward_began = None
        step.spans.append(("forward", began, self.clock.mark()))
        if self.first is not None:
            self.read_first(args, kwargs)
        loss = facts.loss_in(output)
        if loss is not None and self.closure_calls < 2:
            # A copy: compiled graphs write the next loss into the same memory, and scripts divide it in place.
            step.losses.append(facts.copy_loss(loss))
            facts.mark_output(loss)
            # Hugging Face Trainer divides the loss of a micro batch by the labels of the whole step, of all ranks.
            step.divisor = kwargs.get("num_items_in_batch")

    def read_first(self, args: Any, kwargs: Any) -> None:
        """The batch of the call in which a model was found, whose start a hook without keywords saw.

        Micro batches are the calls of a model that is given token ids, or of the largest."""
        module, self.first = self.first, None
        if (step := self.step) is None:
            return
        batch = self.batch_of(module, args, kwargs)
        rank = batch.is_text, module is self.root
        if self.reader is None or rank > (self.reader_reads_text, self.reader is self.root):
            self.reader, self.reader_reads_text = module, batch.is_text
            step.source, step.batches = module, [batch]
            self.facts["sample"] = "token ids" if batch.is_text else batch.shape
        elif step.source is None:
            step.source, step.batches = module, [batch]

    def batch_of(self, module: Any, args: Any, kwargs: Any) -> Batch:
        """Counts of a micro batch of a model and a copy of its rows, left on the device."""
        layouts = self.layouts.get(id(module))
        if layouts is None:
            # Without a model, the script has shown the batch itself.
            layouts = self.layouts[id(module)] = Layouts(() if module is None else facts.argument_names(module))
        layout = layouts.of(args, kwargs)
        if layout is not None:
            self.sources["tokens"] += 1
            return layout.batch(args, kwargs)
        found = digests.tensors_in(args, kwargs, layouts.names)
        ids = facts.token_ids(found)
        if ids is None:
            self.sources["samples"] += 1
            data = next((t for t in found.values() if t.dim() > 0), None)
            rows = int(data.shape[0]) if data is not None else 1
            copied = digests.copy_rows(data) if data is not None else None
            batch = Batch(rows, rows, rows)
            batch.rows = copied
            batch.shape = None if data is None else "x".join(map(str, data.shape[1:]))
            return batch
        self.sources["tokens"] += 1
        batch = Batch(ids.shape[0], positions := ids.numel(), positions)
        batch.is_text = True
        more = facts.counted_in(found, ids)
        if facts.is_one_tensor(ids, more.values()):
            batch.rows, batch.stacked = torch.stack((ids, *more.values())), tuple(more)
            return batch
        labels, mask = more.get("labels"), more.get("mask")
        if mask is not None:
            batch.tokens = mask.sum()
        if labels is not None:
            batch.labels = (labels != digests.IGNORED_LABEL).sum()
            if "num_items_in_batch" in kwargs:
                batch.predicted = (labels[:, 1:] != digests.IGNORED_LABEL).sum()
        batch.rows = digests.copy_rows(ids)
        return batch

    # --- hooks on backward, clipping and the optimizer ---

    def before_backward(self, tensors: Any) -> Any:
        """The mark at which an outermost backward pass begins; None for one inside another."""
        self.backward_depth += 1
        if self.backward_depth > 1 or self.broken is not None or is_compiling():
            return None
        self.aside = None
        if self.root is None or self.is_blind:
            self.begin_blindly(tensors)
        try:
            return self.clock.mark() if self.step is not None else None
        except Exception as error:
            self.turn_off(error)
            return None

    @guarded
    def begin_blindly(self, tensors: Any) -> None:
        """Count a micro batch whose forward pass could not be seen, and begin a step with the first of them."""
        loss = _first(tensors)
        if not self.is_blind:
            if not hasattr(loss, "device"):
                return
            self.is_blind = True
            self.facts["device"] = loss.device.type
            self.use_clock_of(loss.device)
            if self.early is not None:
                self.root = facts.owner_of(self.early)
        if not self.is_tracked:
            self.close_step()
        self.end_at_limit()
        batches = (self.step or self.open_step(self.clock.mark())).batches
        if self.announced is None:
            self.sources["unseen"] += 1
            batches.append(Batch(1, 1, 1))
        else:
            batches.append(self.batch_of(None, *self.announced))
            self.announced = None

    @guarded
    def after_backward(self, begin: Any, tensors: Any) -> None:
        step, end = self.step, self.clock.mark()
        if step is None:
            return
        step.spans.append(("backward", begin, end))
        if self.optimizer_began is not None:
            # A closure, as in Lightning: the optimizer's own work begins after its backward pass.
            self.optimizer_began = end
        loss, scaled = _first(tensors), self.scaled
        self.scaled = None
        if self.closure_calls > 1 or getattr(loss, "numel", lambda: 0)() != 1:
            return
        is_output = bool(step.losses) and facts.is_scaled_output(loss)
        step.has_other_loss |= not is_output
        if scaled is not None and scaled[0]() is loss:
            step.backward_losses.append(scaled[1])
        elif is_output and not hasattr(loss, "to_local"):
            # What the model returned has been copied; this value is needed only beside one that it did not return.
            step.backward_losses.append(loss.detach())
        else:
            step.backward_losses.append(facts.copy_loss(loss))

    @guarded
    def note_scaled(self, scaled: Any, loss: Any) -> None:
        """The backward pass of a scaled loss is one of the loss itself."""
        if scaled is not loss and getattr(loss, "numel", lambda: 0)() == 1:
            self.scaled = weakref.ref(scaled), facts.copy_loss(loss)

    @guarded
    def note_skipped(self) -> None:
        """A GradScaler did not call the optimizer, because gradients were not finite: the step ends without update."""
        if self.step is None or self.step.end is not None:
            return
        self.step.updates = 0
        if not self.is_tracked:
            self.step.end = self.clock.mark()
        self.stop_instruments(self.step)

    def enter_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Global hook before every optimizer step. A closure counts its calls: those after the first one, as of LBFGS,
        evaluate the same samples again."""
        self.before_step(optimizer)
        self.optimizer_calls += 1
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None or self.broken is not None:
            return None

        def counted() -> Any:
            self.closure_calls += 1
            return closure()

        return ((args[0], counted, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": counted})

    @guarded
    def before_step(self, optimizer: Any) -> None:
        self.optimizer_began = self.clock.mark()
        if self.aside is not None:
            self.leave_aside(self.optimizer_began)
        if self.root is None and self.is_blind:
            self.root = facts.owner_of(optimizer)
        if self.root is None:
            # Its closure will run the first forward pass.
            self.early = optimizer
        else:
            self.note_optimizer(optimizer)

    def note_optimizer(self, optimizer: Any) -> None:
        known = self.stepped.get(id(optimizer))
        # One that steps others, as torchtitan's container, would count their groups twice.
        if known is None and isinstance(getattr(optimizer, "optimizers", None), list):
            return
        if known is None:
            # The optimizer is kept, so that its number is not given to another one.
            self.stepped[id(optimizer)] = optimizer, self.readout.steps
        elif known[1] != self.readout.steps:
            return
        # DeepSpeed steps its groups one by one, and shows the optimizer one of them each time.
        for group in optimizer.param_groups:
            if id(group) not in self.groups:
                self.groups[id(group)] = type(optimizer).__name__, group
                self.facts.setdefault("groups", []).append(facts.group_of(*self.groups[id(group)]))
        if known is None:
            number, self.read = len(self.read), facts.disjoint([*self.read, *self.models()])
            if len(self.stepped) == 1:
                self.read_start(optimizer)
            elif len(self.read) > number:
                self.read_more(number)

    def note_rates(self, rates: set[float]) -> None:
        """The learning rates of a step: frameworks split the same parameters into other numbers of groups, and step
        with them one by one."""
        if rates != self.last_rates:
            self.last_rates, self.rates_text = rates, repr(sorted(rates)).encode()
        self.rates.update(self.rates_text)

    def read_start(self, optimizer: Any) -> None:
        """What does not change: weights before the first update, dtypes, wrapper."""
        self.facts |= (
            facts.sizes_of(self.read)
            | facts.about(self.root, optimizer)
            | ({"compiled": True, "is_blind": True} if self.is_blind else {})
        )
        self.facts["autocast"] = self.facts.get("autocast") or facts.hidden_autocast(self.root)
        self.facts["weights"] = weights.digests_of(self.read)
        self.facts["flags"] = facts.precision_flags(self.facts["device"])
        self.facts["began_at_s"] = time.time()

    def read_more(self, number: int) -> None:
        """The models from this number on, which were found after the first optimizer had stepped: as two of a GAN."""
        self.facts |= facts.sizes_of(self.read)
        known, found = self.facts["weights"], weights.digests_of(self.read[number:], number)
        self.facts["weights"] = {**known, **found} if known and found else None

    @guarded
    def after_step(self, optimizer: Any, *_: object) -> None:
        self.closure_calls = 0
        if self.step is None:
            return
        end = self.clock.mark()
        rates = self.step.rates
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, NUMBER):
                rates.add(rate)
            elif getattr(rate, "is_cpu", False):
                rates.add(facts.number(rate))
        if self.optimizer_began is not None:
            self.step.spans.append(("optimizer", self.optimizer_began, end))
            self.optimizer_began = None
        self.step.updates = 1
        if not self.is_tracked:
            self.step.end = end
        if self.wire is not None or self.profiler is not None:
            self.stop_instruments(self.step)

    # --- steps that the script marks itself, see `paceline.track` ---

    @guarded
    def begin_tracked(self, tokens: int | None) -> None:
        self.close_step()
        self.is_tracked = True
        # What happened between two marked steps is in neither of them: no wait for data, and no pause.
        self.last_end = self.paused_at = self.pause_began = None
        self.pauses = []
        self.open_step(self.clock.mark())
        if tokens is not None:
            self.tracked["tokens"] = int(tokens)
            self.sources["given"] += 1

    @guarded
    def end_tracked(self) -> None:
        if self.step is not None and self.root is not None:
            if "parameters" not in self.facts:
                # No torch optimizer stepped, so nobody has looked at the model yet.
                self.read = self.models()
                self.facts |= facts.sizes_of(self.read) | facts.about(self.root, None) | {"began_at_s": time.time()}
            self.step.end = self.clock.mark()
            self.close_step()
        self.step, self.is_tracked = None, False

    @guarded
    def begin_pause(self) -> None:
        # An evaluation lasts until the next forward pass that learns, so this pause is a part of it.
        if self.paused_at is None:
            self.pause_began = self.clock.mark()

    @guarded
    def end_pause(self) -> None:
        """A pause after the optimizer step belongs to the next step, which lasts from that one to its own."""
        if self.pause_began is None or (self.last_end is None and self.step is None):
            return
        pause = ("pause", self.pause_began, self.clock.mark())
        (self.pauses if self.step is None or self.step.end is not None else self.step.spans).append(pause)
        # An evaluation that began in the pause is a part of it.
        self.pause_began = self.paused_at = None

    @guarded
    def note_batch(self, data: Any) -> None:
        self.announced = ((), data) if isinstance(data, Mapping) else ((data,), {})

    @guarded
    def note_loss(self, value: Any) -> None:
        self.tracked.setdefault("losses", []).append(
            facts.copy_loss(value) if hasattr(value, "detach") else float(value)
        )

    # --- steps ---

    def open_step(self, now: Any) -> Step:
        number = self.readout.steps
        step = self.step = Step(number, now if self.last_end is None else self.last_end, self.pauses)
        self.pauses, self.aside = [], None
        if self.early is not None and self.root is not None:
            optimizer, self.early = self.early, None
            self.note_optimizer(optimizer)
        if number == WIRE_STEP or (self.traced and number == self.traced[0]):
            self.start_instruments(number)
        return step

    def end_at_limit(self) -> None:
        """End the script after the number of steps that was asked for."""
        if self.limit and self.readout.steps >= self.limit:
            self.end()
            raise SystemExit(0)

    def close_step(self) -> None:
        """End the open step if its optimizer has stepped; write all that the device has finished."""
        step = self.step
        if step is None or step.end is None:
            return
        if step.number == self.last_discovery:
            self.stop_discovery()
        if step.number == 0:
            self.open_file()
        self.step, self.last_end = None, step.end
        self.note_rates(step.rates)
        self.name_numbers(step)
        self.readout.add(step, self.clock)
        if step.number in (0, 1, 9):
            self.write_facts()

    def name_numbers(self, step: Step) -> None:
        """Say which numbers of a step its line consists of; they stay where they are."""
        if step.norm is None and self.norm_of is not None:
            step.norm = self.norm_of()
        tracked = self.tracked.get("losses")
        # A script may train more than the loss that the model returns: a penalty, or what a teacher says.
        is_output = bool(step.losses) and not step.has_other_loss
        source = "track" if tracked else "output" if is_output else "backward"
        # The sum of what was differentiated: scripts divide by the number of micro batches before they do that.
        step.adds_losses = source == "backward" or (source == "output" and step.divisor is not None)
        step.losses = tracked or (step.losses if is_output else step.backward_losses)
        step.backward_losses = []
        self.sources[LOSS_SOURCES[source if step.losses else "none"]] += 1
        if self.tracked:
            step.given_tokens = self.tracked.get("tokens")
            self.tracked = {}

    # --- instruments of single steps ---

    def start_instruments(self, number: int) -> None:
        if self.traced and number == self.traced[0] and self.find_rank() == self.options.get("trace_rank", 0):
            self.profiler = facts.start_profiler(self.facts["device"])
        if number == WIRE_STEP and not self.facts.get("compiled") and facts.world_size() > 1:
            self.wire = facts.WireWatch()
            self.wire.start()

    def stop_instruments(self, step: Step) -> None:
        if self.wire is not None:
            self.wire.stop()
            for line in self.wire.lines(self.rank, step.number):
                self.write_line(line)
            self.wire = None
        if self.profiler is not None and step.number >= self.traced[-1]:
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.folder / f"trace-{self.find_rank()}.json"))
            self.profiler = None

    # --- files ---

    def find_rank(self) -> int:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return int(dist.get_rank())
        return int(os.environ.get("RANK") or 0)

    def open_file(self) -> None:
        """One process writes for each rank: the first that takes a step."""
        self.rank, self.world_size = self.find_rank(), facts.world_size()
        self.readout.rank = self.rank
        path = self.folder / f"rank-{self.rank}.jsonl"
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w")

    def write_line(self, line: Mapping[str, Any]) -> None:
        self.write_text(json.dumps(line) + "\n")

    def write_text(self, text: str) -> None:
        if self.file is not None:
            self.file.write(text)
            self.file.flush()

    def write_facts(self, **more: Any) -> None:
        if self.file is None and "crash" not in more and self.broken is None:
            return
        known = {
            **{name: value for name, value in self.facts.items() if name != "size"},
            "pid": os.getpid(),
            "world_size": self.world_size,
            "rates": f"{self.readout.written}:{self.rates.hexdigest()[:16]}",
            "sources": dict(self.sources),
            "broken": self.broken,
            "hidden_steps": self.readout.waiting,
            **more,
        }
        rank = self.find_rank() if self.file is None else self.rank
        whole = self.folder / f"rank-{rank}.{os.getpid()}"
        whole.write_text(json.dumps(known))
        whole.replace(self.folder / f"rank-{rank}.facts.json")

    def end(self) -> None:
        """Write what is left. Called when the script ends, however it does."""
        if self.ended or os.getpid() != self.pid:
            return
        self.ended = True
        self._end()

    def after_fork(self) -> None:
        """A forked process may be a rank, or a worker that loads data for a rank; the latter never writes."""
        if self.root is None:
            self.pid = os.getpid()

    @guarded
    def _end(self) -> None:
        self.close_step()
        if self.file is None:
            return
        self.readout.finish(self.clock)
        self.write_line(facts.memory_line(self.rank, self.device))
        is_known = self.root is not None and not self.facts.get("crash")
        final = weights.digests_of(self.read) if is_known else None
        self.facts.setdefault("crash", self.failed_exit)
        before, now = self.facts.get("groups") or [], [facts.group_of(*each) for each in self.groups.values()]
        if flags := self.facts.get("flags"):
            before, now = [*before, flags], [*now, facts.precision_flags(self.facts["device"])]
        self.facts["changed"] = facts.changed(before, now)
        self.write_facts(final_weights=final)
        self.file.close()
        self.file = None

    def crashed(self, kind: Any, error: Any, trace: Any) -> None:
        if kind.__name__ == "ChildFailedError":
            # torchrun itself, whose ranks failed; it is not one of them.
            return
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
        words = f"{kind.__name__}: {error}".split("\n")[0]
        self.facts["crash"] = {"at_s": time.time(), "error": words, "lines": lines[-LAST_LINES:]}
        with contextlib.suppress(Exception):
            self.write_facts(crash=self.facts["crash"])

    def note_exit(self, status: Any) -> None:
        """`sys.exit` with an error: the first of several ranks is the cause of what the others raise."""
        self.failed_exit = None
        if status is not None and status != 0:
            words = str(status).partition("\n")[0]
            self.failed_exit = {"at_s": time.time(), "error": f"SystemExit: {words}", "lines": [], "by": "sys.exit"}


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, SEQUENCE) and tensors else tensors


observer: Observer | None = None


def attach() -> None:
    """Register the hooks. Called once per process, when torch has been imported."""
    global observer
    folder = os.environ.get("PACELINE_OBSERVE")
    if observer is not None or not folder or not Path(folder).is_dir():
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    own = observer = Observer(folder, json.loads(os.environ.get("PACELINE_OBSERVE_OPTIONS") or "{}"))
    own.start_discovery()
    register_optimizer_step_pre_hook(own.enter_step)
    register_optimizer_step_post_hook(own.after_step)
    wrap_public_functions(own)
    # torch would warn the script of hooks that it does not have.
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules.*")
    hook = sys.excepthook

    def note_crash(kind: Any, error: Any, trace: Any) -> None:
        own.crashed(kind, error, trace)
        hook(kind, error, trace)

    sys.excepthook = note_crash
    atexit.register(own.end)
    with contextlib.suppress(Exception):
        # Processes of multiprocessing do not run atexit.
        from multiprocessing.util import Finalize

        Finalize(None, own.end, exitpriority=100)
    os.register_at_fork(after_in_child=own.after_fork)


def wrap_public_functions(own: Observer) -> None:
    """Backward passes, scaled losses, gradient clipping, saving and `os._exit` have no hook: their public functions are
    wrapped."""
    backward, save, leave, scale = torch.autograd.backward, torch.save, os._exit, torch.amp.GradScaler.scale
    make, leave_python, step_scaled = torch.optim.Optimizer.__init__, sys.exit, torch.amp.GradScaler.step

    @functools.wraps(backward)
    def observed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        begin = own.before_backward(tensors)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            own.backward_depth -= 1
            if begin is not None:
                own.after_backward(begin, tensors)

    @functools.wraps(scale)
    def observed_scale(scaler: Any, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        own.note_scaled(scaled, outputs)
        return scaled

    @functools.wraps(step_scaled)
    def observed_step_scaled(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = own.optimizer_calls
        result = step_scaled(scaler, optimizer, *args, **kwargs)
        if own.optimizer_calls == before and isinstance(optimizer, torch.optim.Optimizer):
            own.note_skipped()
        return result

    @functools.wraps(save)
    def save_without_hooks(*args: Any, **kwargs: Any) -> Any:
        with own.hidden_hooks():
            return save(*args, **kwargs)

    @functools.wraps(leave)
    def leave_after_the_last_steps(status: int) -> NoReturn:
        # With an error, the device may have stopped: nothing must wait for it.
        if status == 0:
            own.end()
        leave(status)

    @functools.wraps(make)
    def observed_make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        own.note_new_optimizer()

    @functools.wraps(leave_python)
    def observed_exit(status: Any = None, /) -> NoReturn:
        own.note_exit(status)
        leave_python(status)

    os._exit = leave_after_the_last_steps
    sys.exit = observed_exit
    torch.optim.Optimizer.__init__ = observed_make  # type: ignore[method-assign,assignment]
    torch.amp.GradScaler.scale = observed_scale  # type: ignore[method-assign,assignment]
    torch.amp.GradScaler.step = observed_step_scaled  # type: ignore[method-assign,assignment]
    torch.autograd.backward = observed_backward
    torch.nn.utils.clip_grad_norm_ = observed_clip(own, torch.nn.utils.clip_grad_norm_)
    torch.nn.utils.clip_grads_with_norm_ = observed_clip(own, torch.nn.utils.clip_grads_with_norm_)
    torch.save = save_without_hooks


def observed_clip(own: Observer, clip: Callable[..., Any]) -> Callable[..., Any]:
    """A function that clips gradients: its limit, and its result as the gradient norm of the step, are noted.

    Its arguments are the parameters, the limit and, if it returns nothing, the norm; those of a method, the module and
    the limit.
    """

    @functools.wraps(clip)
    def call(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        if norm is None:
            norm = args[2] if len(args) > 2 else kwargs.get("total_norm")
        if own.step is not None:
            own.step.norm = facts.whole_norm(norm)
        limit = args[1] if len(args) > 1 else kwargs.get("max_norm")
        if isinstance(limit, float | int):
            own.facts.setdefault("clip_norm", facts.clip_norm(limit))
        return norm

    return call
