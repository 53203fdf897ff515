"""Memory limits of a process: what it may use, how the limit is enforced, and what is free."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.errors import UnsupportedError, require

GIB = 2**30
# Share of the host's free memory that CPU runs without a limit may use; the rest is for other processes.
CPU_SHARE = 0.5


def check_limit(limit_gib: object, where: str) -> None:
    """Reject a limit that is not a positive number."""
    valid = limit_gib is None or (type(limit_gib) in (int, float) and 0 < limit_gib < math.inf)  # type: ignore[operator]
    require(valid, where, limit_gib, "a positive number of GiB")


def allowed_bytes(limit_gib: float | None, device: str, processes_per_node: int) -> int:
    """Bytes this process may allocate: all that is free on a GPU, an equal share of half the free memory on a CPU."""
    if device == "cuda":
        free = _free_gpu_bytes()
        return min(free, int(limit_gib * GIB)) if limit_gib else free
    if limit_gib:
        return int(limit_gib * GIB)
    import psutil

    return int(psutil.virtual_memory().available * CPU_SHARE / processes_per_node)


def confine(limit_gib: float | None, capacity: int, device: str) -> None:
    """Enforce the limit: allocations beyond it fail as on a full device or host."""
    if device == "cuda":
        if limit_gib:
            import torch

            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity / total))
        return
    import resource

    # RLIMIT_DATA counts the private writable memory of the process.
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise UnsupportedError("a memory limit on a CPU needs Linux") from None
    in_use = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + capacity, hard))


def release(device: str) -> None:
    """Remove the limit that `confine` set."""
    if device == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def room_bytes(device: str) -> int:
    """Memory this process could use now: what it uses and what is free. Memory of other processes, NCCL and the driver
    is not included."""
    if device == "cuda":
        return _free_gpu_bytes()
    import psutil

    return int(psutil.virtual_memory().available + psutil.Process().memory_info().rss)


def _free_gpu_bytes() -> int:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved())
