"""Starting points by GPU, as others recommend them, held against what this host has. Nothing is ever set here."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.host import machine

# Interfaces that lead to no other host.
_INWARD = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tunl", "ifb", "dummy")
_SHARP = ("opt/mellanox/sharp", "opt/hpcx/nccl_rdma_sharp_plugin", "usr/lib/libnccl-net.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One recommended variable. needs is what must be true of the host; mind is what the vendor says otherwise.
    known is False where the library reads no such variable."""

    variable: str
    value: str
    needs: str
    mind: str | None = None
    known: bool = True

    def __str__(self) -> str:
        return f"{self.variable}={self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What others recommend for a first run; ranges are from, to."""

    name: str
    micro_batch: tuple[int, int]
    sequence_length: tuple[int, int]
    precision: str
    settings: tuple[Setting, ...]
    source: str
    finetune: str | None = None

    def __str__(self) -> str:
        batch, length = _range(self.micro_batch), _range(self.sequence_length)
        precision = f"{self.precision} (not trained in here: bf16)" if self.precision == "fp8" else self.precision
        first = f"others start with: micro batch {batch}, sequence {length}, {precision}"
        # Whether their settings make sense depends on the host.
        network = "`paceline doctor` on a host holds their NCCL settings against it" if self.settings else None
        return "; ".join(filter(None, (first, self.finetune, network)))


def _range(pair: tuple[int, int]) -> str:
    low, high = pair
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@functools.cache
def _profiles() -> tuple[tuple[frozenset[str], Profile], ...]:
    table = tomllib.loads((Path(__file__).parent / "gpus.toml").read_text(encoding="utf-8"))["profile"]
    settings = {row["name"]: tuple(Setting(**one) for one in row.get("setting", ())) for row in table}
    return tuple(
        (
            frozenset(row["gpus"]),
            Profile(
                name=row["name"],
                micro_batch=tuple(row["micro_batch"]),
                sequence_length=tuple(row["sequence_length"]),
                precision=row["precision"],
                settings=settings[row.get("settings_of", row["name"])],
                source=row["source"],
                finetune=row.get("finetune"),
            ),
        )
        for row in table
    )


def of(gpu: str) -> Profile | None:
    """The profile of exactly this GPU, by any of its names in the table; None for any other, never a relative's."""
    row = machine.gpu_row(gpu)
    if row is None:
        return None
    return next((profile for gpus, profile in _profiles() if gpus & set(row["names"])), None)


# --- the host ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """What leads from this host to others: its interfaces, the one of the default route, active ports of InfiniBand
    (or RoCE), and whether the network can reach GPU memory or reduce in its switches."""

    interfaces: tuple[str, ...]
    default: str | None
    infiniband: tuple[str, ...]
    gpudirect: bool
    sharp: bool


def interconnect(root: Path = Path("/")) -> Interconnect:
    """Read from the kernel's own trees below `root`."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*/state"))
    active = [port for port in ports if "ACTIVE" in _text(port)]
    return Interconnect(
        interfaces=tuple(sorted(path.name for path in (root / "sys/class/net").glob("*"))),
        default=_default_route(_text(root / "proc/net/route")),
        infiniband=tuple(f"{port.parents[2].name}:{port.parent.name}" for port in active),
        gpudirect=any((root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")),
        sharp=any((root / path).exists() for path in _SHARP),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _default_route(table: str) -> str | None:
    rows = [line.split() for line in table.splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), None)


def matching(value: str, interfaces: Collection[str]) -> list[str]:
    """Which interfaces NCCL_SOCKET_IFNAME means: prefixes, `=` for whole names, `^` for all others."""
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    exact, words = rest.startswith("="), [word for word in rest.removeprefix("=").split(",") if word]

    def named(interface: str) -> bool:
        return any(interface == word if exact else interface.startswith(word) for word in words)

    return [interface for interface in interfaces if named(interface) != excludes]


# --- the verdict ---


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a setting fits this host, why not, and what to do instead; fits is None where the host does not tell."""

    setting: Setting
    fits: bool | None
    text: str
    fix: str | None = None


def fit(setting: Setting, host: Interconnect) -> Fit:
    if not setting.known:
        return Fit(setting, None, "nothing reads it", f"leave {setting.variable} unset")
    if setting.needs == "interface":
        return _interface(setting, host)
    has = {
        "infiniband": (bool(host.infiniband), "no active port under /sys/class/infiniband", "active InfiniBand"),
        "no infiniband": (
            not host.infiniband,
            f"active ports here: {', '.join(host.infiniband)}",
            "no InfiniBand here",
        ),
        "gpudirect": (host.gpudirect, "the module nvidia_peermem is not loaded", "nvidia_peermem is loaded"),
        "sharp": (host.sharp, "no SHARP plugin was found under /opt/mellanox or /opt/hpcx", "a SHARP plugin"),
    }
    fits, lacking, having = has[setting.needs]
    return Fit(setting, fits, having if fits else lacking, None if fits else _without(setting, host))


def _without(setting: Setting, host: Interconnect) -> str:
    """What to do where the host is not what the profile was written for."""
    if setting.needs == "no infiniband":
        return f"leave {setting.variable} unset, so that NCCL uses {host.infiniband[0]}"
    if setting.needs == "gpudirect":
        return f"leave {setting.variable} unset, or load the module: `modprobe nvidia-peermem`"
    return f"leave {setting.variable} unset"


def _interface(setting: Setting, host: Interconnect) -> Fit:
    if matching(setting.value, host.interfaces):
        return Fit(setting, True, f"{setting.value} is here")
    outward = [name for name in host.interfaces if not name.startswith(_INWARD)]
    there = ", ".join(outward) or "none that leads anywhere"
    instead = f"set {setting.variable}={host.default}, or leave it unset" if host.default else "leave it unset"
    return Fit(setting, False, f"this host has no {setting.value}, but {there}", instead)


def unmatched(environ: Mapping[str, str], interfaces: Collection[str]) -> dict[str, str]:
    """Variables that name interfaces of which this host has none: ranks would fail or hang where they meet."""
    found = {}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable, "").strip()
        # Gloo takes whole names only.
        asked = f"={value}" if variable.startswith("GLOO") else value
        if value and not matching(asked, interfaces):
            found[variable] = value
    return found
