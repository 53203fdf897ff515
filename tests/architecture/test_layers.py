"""The laws of the architecture that a reader cannot check by eye: who imports whom, and what starts without torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import paceline

ROOT = Path(paceline.__file__).parent

# Each line may import only lines above it; names on one line do not see each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "environment", "neutral", "designs", "offspring", "clocks", "tether", "scratch", "stopping", "identity"),
    ("shapes", "choices", "parcel"),
    ("voice", "serving"),
    ("checkpoints", "self_audit"),
    ("spec", "models", "machine", "processes", "files", "places", "reach", "cron", "probes"),
    (
        *("prices", "rows", "adapters", "acceptance", "contents", "profiles", "meeting", "interruptions", "depot"),
        *("prompts", "loadgen", "guardian", "model_directory", "client_ceiling"),
    ),
    ("instructions", "dialogues", "records", "findings", "doctor", "recipe", "redaction", "image"),
    ("series",),
    ("samples",),
    ("trajectory",),
    ("store", "measure", "telemetry", "decoder", "ledger", "footprint", "capacity"),
    ("campaign", "health", "agenda", "attempts"),
    ("timers", "notification"),
    ("corpus", "timeline", "present", "claims", "capsule"),
    ("plugins", "tuned"),
    ("replica",),
    ("workloads", "strategies", "launchers", "exporters", "analysis", "experiment", "engines"),
    ("supervision",),
    ("ending",),
    ("restarts",),
    ("run", "worker", "adviser", "agent"),
    ("display", "watch", "monitor", "replay", "mock_wire"),
    ("endpoint", "status_page", "mock_replica"),
    ("schedule", "selftest"),
    ("cli",),
    ("entry", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
STANDARD_LIBRARY_ONLY = (
    "errors",
    "identity",
    "environment",
    "neutral",
    "designs",
    "shapes",
    "choices",
    "serving",
    "self_audit",
    "stopping",
    "probes",
    "checkpoints",
    "spec",
    "models",
    "machine",
    "processes",
    "files",
    "acceptance",
    "contents",
    "interruptions",
    "records",
    "findings",
    "doctor",
    "profiles",
    "health",
)

# Imported inside functions, so that every analysis verb starts without them.
HEAVY = {
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "bitsandbytes",
    "matplotlib",
    "rich",
    "pydantic",
    "kubernetes",
    "ray",
    "pynvml",
    "psutil",
    "tensorboard",
    "mlflow",
    "sqlalchemy",
    "alembic",
    "mlperf_loadgen",
    "wandb",
    "prometheus_client",
    "rouge_score",
    "nltk",
}
EAGER = {
    "decoder": {"torch"},
    "tuned": {"torch"},
    "strategies._optimizers": {"torch"},
    "strategies._torch": {"torch"},
    "ledger": {"torch"},
    "workloads._loop": {"torch"},
    "workloads._checkpoints": {"torch"},
    "workloads._collectives_ensemble": {"torch"},
    "workloads._collectives_overlap": {"torch"},
    "workloads._collectives_payload": {"torch"},
    "workloads._collectives_sweep": {"torch"},
    "workloads._kernels": {"torch"},
    "workloads._nodes_proof": {"torch"},
    "workloads._nodes_stages": {"torch"},
    "workloads._rehearsal": {"torch"},
    "workloads._watch": {"torch"},
    "replica.attention": {"torch"},
    "replica.decoding": {"torch"},
    "replica.ensemble": {"torch"},
    "replica.injection": {"torch"},
    "replica.projections": {"torch"},
    "replica.weights": {"torch"},
    "experiment.fields": {"pydantic"},
}
# Modules with torch at their top: whoever imports one outside a function must be one.
TORCH_MODULES = {
    "decoder",
    "tuned",
    "ledger",
    "strategies._optimizers",
    "strategies._torch",
    "workloads._loop",
    "workloads._checkpoints",
    "workloads._collectives_ensemble",
    "workloads._collectives_overlap",
    "workloads._collectives_payload",
    "workloads._collectives_sweep",
    "workloads._collectives_tournament",
    "workloads._kernels",
    "workloads._nodes_proof",
    "workloads._nodes_stages",
    "workloads._rehearsal",
    "workloads._watch",
    "replica.attention",
    "replica.decoding",
    "replica.ensemble",
    "replica.injection",
    "replica.projections",
    "replica.weights",
}

# Every broad except, with the number of them: the worker's turns exceptions into records, corpus hands one to the
# thread that waits for the batch, machine and telemetry ask a driver that may answer with any error of its own, the
# courier tells LoadGen the end of every request, for which it waits without a bound.
BROAD_EXCEPTS = {"worker": 1, "corpus": 1, "machine": 1, "telemetry": 1, "loadgen.courier": 1}
FORBIDDEN_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "base", "manager", "handler", "factory"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


class Import(NamedTuple):
    """One imported module; executed is False under TYPE_CHECKING, deferred is True inside a function."""

    module: str
    line: int
    deferred: bool
    executed: bool


def module_name(path: Path) -> str:
    """`strategies._torch`; a package's __init__ carries the package's name, the root's is empty."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imports(tree: ast.AST, deferred: bool = False, executed: bool = True) -> Iterator[Import]:
    """All imports, wherever they stand; `from paceline import x` counts as paceline.x."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred, executed)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", node.lineno, deferred, executed)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports(node, deferred, executed=False)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, deferred or inside, executed)


def own_module(dotted: str) -> str | None:
    """The module of ours that `paceline.a.b.name` comes from, or None for another package's."""
    if dotted.split(".")[0] != "paceline":
        return None
    name = dotted.removeprefix("paceline").removeprefix(".")
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


def kind(module: str) -> str:
    return module.partition(".")[0]


def violations(module: str, tree: ast.AST) -> list[str]:
    """Imports of `module` that the table does not allow. TYPE_CHECKING imports count: they are knowledge too."""
    found = []
    for item in imports(tree):
        target = own_module(item.module)
        if not target or kind(target) == kind(module):
            continue
        if LEVEL[kind(target)] >= LEVEL[kind(module)]:
            found.append(f"{module}:{item.line} imports {target}")
    return found


def test_every_module_stands_in_the_table() -> None:
    unlisted = {kind(module) for module in SOURCES if module} - set(LEVEL)
    assert not unlisted, f"not in the layer table: {sorted(unlisted)}"
    assert not set(LEVEL) - {kind(module) for module in SOURCES}, "the table names a module that does not exist"


@pytest.mark.parametrize("module", [name for name in SOURCES if name])
def test_a_module_imports_only_lines_above_it(module: str) -> None:
    assert not violations(module, TREES[module])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec", "from paceline.results.records import Status"),
        ("analysis.report", "def f():\n    from paceline import store, run"),
        ("strategies.ddp", "from paceline.workloads.pretrain import check"),
        ("exporters.csv", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import paceline.analysis.report"),
        ("worker", "import paceline.campaign.run.controller"),
        ("store", "from paceline import telemetry"),
    ],
)
def test_the_law_bites(module: str, source: str) -> None:
    assert violations(module, ast.parse(source))


@pytest.mark.parametrize(("package", "never"), [("analysis", "store"), ("exporters", "analysis"), ("run", "worker")])
def test_never_imported_even_where_the_table_allows(package: str, never: str) -> None:
    found = [
        f"{module}:{item.line}"
        for module, tree in TREES.items()
        if kind(module) == package
        for item in imports(tree)
        if (target := own_module(item.module)) and kind(target) == never
    ]
    assert not found


@pytest.mark.parametrize("module", STANDARD_LIBRARY_ONLY)
def test_the_lowest_lines_need_the_standard_library_only(module: str) -> None:
    eager = {i.module.partition(".")[0] for i in imports(TREES[module]) if i.executed and not i.deferred}
    assert eager <= set(sys.stdlib_module_names) | {"paceline"}


@pytest.mark.parametrize("module", list(SOURCES))
def test_heavy_packages_are_imported_inside_functions(module: str) -> None:
    eager = {i.module.partition(".")[0] for i in imports(TREES[module]) if i.executed and not i.deferred}
    assert eager & HEAVY <= EAGER.get(module, set())


@pytest.mark.parametrize("module", [name for name in SOURCES if name not in TORCH_MODULES])
def test_modules_with_torch_are_imported_inside_functions(module: str) -> None:
    eager = {own_module(i.module) for i in imports(TREES[module]) if i.executed and not i.deferred}
    assert not eager & TORCH_MODULES


def broad_excepts(tree: ast.AST) -> int:
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    names = [{n.id for n in ast.walk(h.type) if isinstance(n, ast.Name)} if h.type else None for h in handlers]
    return sum(found is None or bool(found & {"Exception", "BaseException"}) for found in names)


def test_broad_excepts_stand_where_they_are_documented() -> None:
    found = {module: broad_excepts(tree) for module, tree in TREES.items()}
    assert {module: count for module, count in found.items() if count} == BROAD_EXCEPTS


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    return ((ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_print_and_exit_live_in_the_command_line() -> None:
    found = {
        f"{kind(module)}: {name}"
        for module, tree in TREES.items()
        for name, _ in calls(tree)
        if name in ("print", "sys.exit", "exit", "quit", "os._exit")
    }
    assert found == {"cli: print", "cli: sys.exit", "worker: sys.exit", "agent: sys.exit"}


@pytest.mark.parametrize("module", ["cli.__main__", "worker", "agent"])
def test_exit_is_the_last_line_of_a_program(module: str) -> None:
    tree = TREES[module]
    last = tree.body[-1]
    assert isinstance(last, ast.If) or module.endswith("__main__")
    inside = {id(node) for node in ast.walk(last)}
    assert all(id(node) in inside for name, node in calls(tree) if name == "sys.exit")


@pytest.mark.parametrize("module", list(SOURCES))
def test_files_and_functions_stay_short(module: str) -> None:
    assert len(SOURCES[module].read_text().splitlines()) < LONGEST_FILE
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 < LONGEST_FUNCTION, f"{node.name} in {module}"


@pytest.mark.parametrize("module", [name for name in SOURCES if name])
def test_module_names_say_something(module: str) -> None:
    words = set(module.replace(".", "_").lower().split("_"))
    assert not words & FORBIDDEN_WORDS


def test_class_names_say_something() -> None:
    names = [n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert not [n for n in names if n.endswith(("Impl", "Mixin", "Manager", "Handler", "Factory", "Helper", "Base"))]


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by their base name: the second of two would not be run."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
