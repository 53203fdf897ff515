"""How much memory a process may use: a limit that was asked for, made real, and what was left when it ran out."""

from __future__ import annotations

import math

from paceline.errors import UnsupportedError, require

GIB = 2**30
# Of the host's free memory, for a CPU run that was given no limit: the rest of the host must live on.
CPU_SHARE = 0.5


def check_limit(limit_gib: object, where: str) -> None:
    valid = limit_gib is None or (type(limit_gib) in (int, float) and 0 < limit_gib < math.inf)  # type: ignore[operator]
    require(valid, where, limit_gib, "a positive number of GiB")


def allowed_bytes(limit_gib: float | None, device: str, processes_per_node: int) -> int:
    """What this process may allocate: of a GPU all that is free or its own, of a CPU its share of half of that."""
    if device == "cuda":
        free = _free_gpu_bytes()
        return min(free, int(limit_gib * GIB)) if limit_gib else free
    if limit_gib:
        return int(limit_gib * GIB)
    import psutil

    return int(psutil.virtual_memory().available * CPU_SHARE / processes_per_node)


def confine(limit_gib: float | None, capacity: int, device: str) -> None:
    """Make the limit real: whoever asks for more gets the error that a full device or host gives."""
    if device == "cuda":
        if limit_gib:
            import torch

            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / total))
        return
    import resource

    held = _data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + capacity, hard))


def release(device: str) -> None:
    """End what `confine` began."""
    if device == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def room_bytes(device: str) -> int:
    """What this process has to itself at this moment: what it holds, and what nobody does. Other processes on the
    device, NCCL's buffers and the driver's own memory are already taken off."""
    if device == "cuda":
        return _free_gpu_bytes()
    import psutil

    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def _free_gpu_bytes() -> int:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved())


def _data_bytes() -> int:
    """Private writable memory of this process, which is what RLIMIT_DATA counts."""
    from pathlib import Path

    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise UnsupportedError("a limit on a CPU's memory needs Linux") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
