"""Published settings recommended by GPU, and whether they suit this host. Nothing is set here."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.host import machine, topology

_SHARP = ("opt/mellanox/sharp", "opt/hpcx/nccl_rdma_sharp_plugin", "usr/lib/libnccl-net.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One recommended variable. needs: what the host must have. note: a remark of the vendor. known: False if the
    library does not read such a variable."""

    variable: str
    value: str
    needs: str
    note: str | None = None
    known: bool = True

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Settings that others recommend for a first run; ranges are (low, high)."""

    name: str
    micro_batch: tuple[int, int]
    sequence_length: tuple[int, int]
    precision: str
    settings: tuple[Setting, ...]
    source: str
    finetune: str | None = None

    def __str__(self) -> str:
        batch, length = _range(self.micro_batch), _range(self.sequence_length)
        precision = f"{self.precision} (in Paceline: precision float8)" if self.precision == "fp8" else self.precision
        first = f"typical start: micro batch {batch}, sequence {length}, {precision}"
        # Whether NCCL settings make sense depends on the host.
        network = "`paceline doctor` checks the recommended NCCL settings on a host" if self.settings else None
        return "; ".join(filter(None, (first, self.finetune, network)))


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@functools.cache
def of(gpu: str) -> Profile | None:
    """The profile of this GPU, by any of its names in the table; None for others, even similar ones."""
    known = machine.gpu_row(gpu)
    table = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))["profile"]
    row = next((row for row in table if known and set(row["gpus"]) & set(known["names"])), None)
    if row is None:
        return None
    settings = {other["name"]: other.get("setting", ()) for other in table}[row.get("settings_of", row["name"])]
    return Profile(
        name=row["name"],
        micro_batch=tuple(row["micro_batch"]),
        sequence_length=tuple(row["sequence_length"]),
        precision=row["precision"],
        settings=tuple(Setting(**setting) for setting in settings),
        source=row["source"],
        finetune=row.get("finetune"),
    )


# --- the host ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """How this host reaches others: interfaces, the one of the default route, active InfiniBand or RoCE ports, and
    whether the network can access GPU memory (GPUDirect) or reduce in its switches (SHARP)."""

    interfaces: tuple[str, ...]
    default: str | None
    infiniband: tuple[str, ...]
    gpudirect: bool
    sharp: bool


def interconnect(root: Path = Path("/")) -> Interconnect:
    """The interconnect of this host, read from /proc and /sys below `root`."""
    return Interconnect(
        interfaces=tuple(sorted(path.name for path in (root / "sys/class/net").glob("*"))),
        default=topology.default_interface(root),
        infiniband=tuple(f"{port.parents[1].name}:{port.name}" for port in topology.active_ports(root)),
        gpudirect=any((root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")),
        sharp=any((root / path).exists() for path in _SHARP),
    )


def matching(value: str, interfaces: Collection[str]) -> list[str]:
    """Interfaces that NCCL_SOCKET_IFNAME selects: by prefix, by exact name after `=`, or all others after `^`."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, names = rest.startswith("="), [name for name in rest.removeprefix("=").split(",") if name]

    def is_named(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return [interface for interface in interfaces if is_named(interface) != excludes]


# --- the verdict ---


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a setting suits this host, why (not), and what to do instead; fits is None if that is unknown."""

    setting: Setting
    fits: bool | None
    text: str
    fix: str | None = None


def fit(setting: Setting, host: Interconnect) -> Fit:
    """Whether the setting suits this host."""
    if not setting.known:
        return Fit(setting, None, "no library reads it", f"leave {setting.variable} unset")
    if setting.needs == "interface":
        if matching(setting.value, host.interfaces):
            return Fit(setting, True, f"this host has {setting.value}")
        external = (
            ", ".join(name for name in host.interfaces if not name.startswith(topology.INTERNAL)) or "no external one"
        )
        fix = f"set {setting.variable}={host.default}, or leave it unset" if host.default else "leave it unset"
        return Fit(setting, False, f"this host has no {setting.value}, but {external}", fix)
    has = {
        "infiniband": (bool(host.infiniband), "no active port under /sys/class/infiniband", "active InfiniBand"),
        "no infiniband": (not host.infiniband, f"active ports: {', '.join(host.infiniband)}", "no InfiniBand here"),
        "gpudirect": (host.gpudirect, "the kernel module nvidia_peermem is not loaded", "nvidia_peermem is loaded"),
        "sharp": (host.sharp, "no SHARP plugin in /opt/mellanox or /opt/hpcx", "SHARP plugin found"),
    }
    fits, missing, present = has[setting.needs]
    if fits:
        return Fit(setting, True, present)
    fix = f"leave {setting.variable} unset"
    if setting.needs == "no infiniband":
        fix += f", so that NCCL uses {host.infiniband[0]}"
    if setting.needs == "gpudirect":
        fix += ", or load the module: `modprobe nvidia-peermem`"
    return Fit(setting, False, missing, fix)


def unmatched(environ: Mapping[str, str], interfaces: Collection[str]) -> dict[str, str]:
    """Variables that name interfaces this host lacks: ranks would fail or hang at the rendezvous."""
    without_match = {}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable, "").strip()
        # Gloo accepts exact names only.
        pattern = f"={value}" if variable.startswith("GLOO") else value
        if value and not matching(pattern, interfaces):
            without_match[variable] = value
    return without_match
