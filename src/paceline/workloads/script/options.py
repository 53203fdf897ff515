"""Options of the workload script."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import require


@dataclass(frozen=True)
class Options:
    """trace: keep torch's profiler trace of these steps (`2-3`) of one rank. They belong to the warm-up, so no measured
    step is profiled. trace_rank: that rank. nsys: run the command under `nsys profile`, where it is installed.
    """

    trace: str = ""
    trace_rank: int = 0
    nsys: bool = False

    def __post_init__(self) -> None:
        parts = self.trace.split("-")
        valid = not self.trace or (all(part.isdecimal() for part in parts) and len(parts) <= 2)
        require(
            valid and self.traced == sorted(self.traced), "script.trace", self.trace, "a range of steps, such as 2-3"
        )
        require(self.trace_rank >= 0, "script.trace_rank", self.trace_rank, "a rank from 0")

    @property
    def traced(self) -> list[int]:
        """The first and the last traced step; empty without a trace."""
        parts = [int(part) for part in self.trace.split("-") if part.isdecimal()]
        return [parts[0], parts[-1]] if parts else []
