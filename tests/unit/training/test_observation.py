"""What a rank really does, seen from outside: optimizer steps, precision switches, operators of a step, movements."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.training.observation import Audit, WindowWatch, fills_range, movements  # noqa: E402


def stepped(watch: WindowWatch, optimizer: Any, steps: range) -> None:
    for step in steps:
        watch.step = step
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_every_parameter_group_is_seen_with_its_steps() -> None:
    weight, bias = torch.zeros(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    groups = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}]
    optimizer, watch = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01), WindowWatch()
    with watch.watching():
        stepped(watch, optimizer, range(3))
        optimizer.param_groups[1]["lr"] = 0.05
        stepped(watch, optimizer, range(3, 5))
    stepped(watch, optimizer, range(5, 9))
    seen = [(g["lr"], g["weight_decay"], g["elements"], g["first_step"], g["steps"]) for g in watch.groups]
    assert seen == [(0.1, 0.01, 12, 0, 5), (0.1, 0.0, 3, 0, 3), (0.05, 0.0, 3, 3, 2)]
    assert watch.groups[0]["betas[1]"] == 0.999


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_factors_in_8_bit_that_leave_half_of_the_range_unused(dtype: Any) -> None:
    """A scale for other values leaves the largest too small; the largest may be negative, and zeros have none."""
    largest = torch.finfo(dtype).max
    for value, expected in ((largest, True), (-largest, True), (largest / 2, True), (largest / 3, False), (0.0, True)):
        matrix = torch.full((3, 16), value / 10).to(dtype)
        matrix[1, 2] = value
        assert fills_range(matrix) is expected, value
        assert fills_range(matrix.t(), chunk=3) is expected, value
    audit, one = Audit(), torch.ones(())
    full, narrow = (torch.full((16, 16), x).to(torch.float8_e4m3fn) for x in (448.0, 100.0))
    with audit.watching():
        torch._scaled_mm(narrow, full.t(), one, one, out_dtype=torch.bfloat16)
    seen = {(s.operation, s.dtype): (s.calls, s.work) for s in audit.samples(0, 0)}
    assert seen["narrow", "float8_e4m3fn"] == (1, 256)


def test_a_switch_that_changes_in_between_is_seen_even_if_it_is_reset() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer, watch, before = torch.optim.SGD([weight], lr=0.1), WindowWatch(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with watch.watching():
            stepped(watch, optimizer, range(4))
            torch.set_float32_matmul_precision("medium")
            stepped(watch, optimizer, range(4, 6))
            torch.set_float32_matmul_precision("highest")
            stepped(watch, optimizer, range(6, 8))
    finally:
        torch.set_float32_matmul_precision(before)
    assert watch.flags["float32_matmul_precision"] == "highest from step 0, medium from step 4, highest from step 6"
    assert watch.flags["autocast"] == "False"


def test_operators_are_counted_with_dtype_and_work() -> None:
    """By hand: 2 * 6 * 5 * 4 FLOPs forward, as many for each gradient."""
    layer, table = torch.nn.Linear(5, 4), torch.nn.Embedding(10, 5)
    optimizer = torch.optim.SGD([*layer.parameters(), *table.parameters()], lr=0.1)
    audit = Audit()
    with audit.watching():
        x = table(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        torch.nn.functional.gelu(layer(x)).sum().backward()
        x.detach().to(torch.float8_e4m3fn)
        torch.nn.utils.clip_grad_norm_([*layer.parameters(), *table.parameters()], 0.5)
        optimizer.step()
    seen = {(s.operation, s.dtype): s for s in audit.samples(rank=1, step=7)}
    assert seen["product", "fp32"].work == 3 * 2 * 6 * 5 * 4
    assert (seen["embedding", "fp32"].calls, seen["embedding", "fp32"].work) == (1, 6)
    assert (seen["activation", "fp32"].calls, seen["activation", "fp32"].work) == (1, 24)
    assert seen["cast", "float8_e4m3fn"].work == 30
    update = seen["update", "fp32"]
    assert update.squares is not None
    assert (update.calls, update.work) == (3, 20 + 4 + 50)
    assert update.squares**0.5 == pytest.approx(0.5, rel=1e-4)
    assert (update.rank, update.step) == (1, 7)


def test_products_of_another_dtype_are_kept_apart() -> None:
    audit = Audit()
    with audit.watching(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert {(s.dtype, s.work) for s in audit.samples(0, 0) if s.operation == "product"} == {("bf16", 48)}


def test_movements_are_of_whole_fp32_tensors() -> None:
    weights = {"a": torch.full((2, 5), 3.0), "b": torch.ones(4), "half": torch.ones(4, dtype=torch.bfloat16)}

    def initial(name: str, start: int, stop: int, value: Any) -> Any:
        return None if name == "b" else torch.arange(start, stop) * 0.0 + 1.0

    assert movements(weights.items(), initial, chunk=3) == {"a": pytest.approx(2.0)}
