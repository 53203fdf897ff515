"""The laws of the architecture that a reader cannot check by eye: who imports whom, and what starts without torch.

Each test names every offender with its line, so one run shows all there is to fix.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import paceline
from paceline.experiment import plugins

ROOT = Path(paceline.__file__).parent

# A package may import only from lines below its own. Packages on one line do not import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("campaign",),
    ("report",),
    ("analysis", "workloads"),
    ("serving",),
    ("launchers", "training"),
    ("contract",),
    ("prediction",),
    ("results",),
    ("models",),
    ("experiment",),
    ("host",),
    ("wording",),
    ("examples",),
    ("errors",),
    ("integrations",),
    ("track",),
)
# The same inside the packages that have floors of their own.
INSIDE: dict[str, tuple[tuple[str, ...], ...]] = {
    "analysis": (
        ("reproduction",),
        ("report",),
        ("compare", "cost"),
        ("served",),
        ("training",),
        ("machine",),
        ("statistics",),
        ("findings",),
        ("grouping",),
    ),
    "report": (
        ("gate", "handover"),
        ("exporters",),
        ("replay",),
        ("terminal",),
        ("sections", "summary"),
        ("tiles",),
        ("answer", "charts"),
        ("text_bars",),
        ("tables",),
        ("text",),
    ),
    "campaign": (("scheduled_run", "ui"), ("live",), ("run", "schedule")),
    "training": (
        ("strategies",),
        ("finetuned", "observation", "precision", "step_profile"),
        ("float8",),
        ("decoder", "frozen_4bit", "instruments", "tuned_blocks"),
        ("attachment", "data", "float8_kernels", "mixture", "nf4"),
        ("nf4_kernel",),
    ),
    "launchers": (
        ("here", "kubernetes", "ray", "slurm", "ssh"),
        ("local",),
        ("image", "_job", "_warm"),
        ("_network",),
        ("node",),
    ),
    "serving": (
        ("headroom",),
        ("selftest",),
        ("engines", "mock"),
        ("client_ceiling",),
        ("client", "replica"),
        ("early_stopping", "http_server", "prompts"),
    ),
}
# Imported inside functions, so that verbs that only read start fast and without them.
HEAVY = {
    *("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "matplotlib", "rich", "pydantic", "kubernetes"),
    *("ray", "pynvml", "psutil", "tensorboard", "mlflow", "sqlalchemy", "alembic", "mlperf_loadgen", "wandb"),
    *("rouge_score", "nltk"),
}
# Read by the verbs that read an experiment, and by no others. The observer is imported by scripts that have torch.
EAGER = {
    "experiment.fields": {"pydantic"},
    "training.attachment.paceline_observer": {"torch"},
    "training.attachment.paceline_facts": {"torch"},
    "training.attachment.paceline_weights": {"torch"},
}
KINDS = tuple(plugins.FOLDERS.values())


class Import(NamedTuple):
    """One imported name; deferred is True inside a function, executed is False under TYPE_CHECKING."""

    name: str
    line: int
    deferred: bool
    executed: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
PLUGINS = {
    f"{folder}.{name.replace('-', '_')}" for kind, folder in plugins.FOLDERS.items() for name in plugins.names(kind)
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every source file, parsed when a test needs it: seconds that collecting tests shall not take in every worker."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


@functools.cache
def imports_of(module: str) -> list[Import]:
    """All imports of a file, lazy and type-checking ones included; `from paceline import x` counts as paceline.x."""
    return list(imports(trees()[module]))


def imports(tree: ast.AST, deferred: bool = False, executed: bool = True) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, deferred, executed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield from (Import(f"{node.module}.{a.name}", node.lineno, deferred, executed) for a in node.names)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from imports(node, deferred, executed=False)
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):  # no expression holds an import
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, deferred or inside, executed)


def own_module(dotted: str) -> str | None:
    """The module of ours that `paceline.a.b.name` comes from, or None for another package's."""
    if dotted.split(".")[0] != "paceline":
        return None
    name = dotted.removeprefix("paceline").removeprefix(".")
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


@functools.cache
def edges() -> list[tuple[str, str, Import]]:
    """Every import of one module of ours by another: who imports, what, and how."""
    return [
        (module, target, item)
        for module in SOURCES
        for item in imports_of(module)
        if (target := own_module(item.name)) and target != module
    ]


def upward(order: tuple[tuple[str, ...], ...], below: str = "") -> list[str]:
    """Imports between parts of one package (of the root by default) that do not go down."""
    floor = {name: -level for level, names in enumerate(order) for name in names}
    found = []
    for module, target, item in edges():
        if not module.startswith(below) or not target.startswith(below):
            continue
        importer, imported = module.removeprefix(below).split(".")[0], target.removeprefix(below).split(".")[0]
        if importer and imported and importer != imported and floor[imported] >= floor[importer]:
            found.append(f"{module}:{item.line} imports {target}")
    return found


def test_every_package_is_listed() -> None:
    assert {name.split(".")[0] for name in SOURCES if name} == {name for names in ORDER for name in names}
    for package, order in INSIDE.items():
        parts = {name.split(".")[1] for name in SOURCES if name.startswith(f"{package}.")}
        assert parts == {name for names in order for name in names}, package


def test_packages_import_only_what_is_below_them() -> None:
    assert not upward(ORDER)


def test_parts_of_a_package_import_only_what_is_below_them() -> None:
    assert not [line for package, order in INSIDE.items() for line in upward(order, f"{package}.")]


def test_no_import_cycle() -> None:
    """Tarjan's algorithm over all imports, lazy and type-checking ones included."""
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for module, target, _ in edges():
        # A package's own __init__ is the plugin or the docstring of its parts, never a part of a cycle by itself.
        graph[module].add(target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in graph:
        if module not in index:
            visit(module)
    assert not cycles


def test_plugins_of_one_kind_reach_another_only_through_the_registry() -> None:
    kind_of = {name: kind for kind in KINDS for name in SOURCES if f"{name}.".startswith(f"{kind}.")}
    assert not [
        f"{module}:{item.line} imports {target}"
        for module, target, item in edges()
        if target in PLUGINS and module in kind_of and kind_of[module] != kind_of[target]
    ], "use experiment.plugins.load"


def test_analysis_reads_records_and_report_reads_findings() -> None:
    never = (
        ("analysis", "results.store"),
        ("report", "results.store"),
        ("report.charts", "results.records"),
        ("report.exporters", "results.records"),
    )
    assert not [
        f"{module}:{item.line} imports {target}"
        for module, target, item in edges()
        for package, forbidden in never
        if module.startswith(package) and f"{target}.".startswith(f"{forbidden}.")
    ]


@functools.cache
def executed() -> dict[str, list[str]]:
    """What each module imports as soon as it is imported itself."""
    found: dict[str, list[str]] = {name: [] for name in SOURCES}
    for importer, imported, how in edges():
        if how.executed and not how.deferred:
            found[importer].append(imported)
    return found


@functools.cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(trees()[module]))


def eager_closure(module: str) -> set[str]:
    """Every module of ours that `import module` executes, its parent packages included."""
    pending, seen = [module], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        parts = name.split(".")
        pending += [".".join(parts[:n]) for n in range(1, len(parts))]
        pending += executed()[name]
    return seen


def test_what_every_verb_imports_stays_light() -> None:
    """Plugins and everything outside training, workloads and serving import heavy packages inside functions only."""
    ranks_only = ("training.", "workloads.", "serving.")
    light = [name for name in SOURCES if name and (name in PLUGINS or not f"{name}.".startswith(ranks_only))]
    heavy = {
        name: {i.name.split(".")[0] for i in imports_of(name) if i.executed and not i.deferred} & HEAVY
        for name in SOURCES
    }
    assert not [
        f"{module} -> {name} imports {package}"
        for module in light
        for name in eager_closure(module)
        for package in heavy[name] - EAGER.get(name, set())
    ]


def calls(module: str) -> Iterator[str]:
    """Calls of names, and of attributes of names."""
    for node in nodes(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func) if _is_plain(node.func) else ""


def _is_plain(called: ast.expr) -> bool:
    return isinstance(called, ast.Name) or (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name))


def test_print_and_exit_live_in_the_command_line() -> None:
    programs = ("cli.", "workloads.worker.", "launchers.node.agent.", "launchers._warm.", "__main__.")
    found = {
        f"{module}: {name}"
        for module in SOURCES
        for name in calls(module)
        if name in ("print", "sys.exit", "exit", "quit", "os._exit") and not f"{module}.".startswith(programs)
    }
    assert not found


def test_broad_excepts_are_the_documented_ones() -> None:
    """The worker turns exceptions into records, the warm process prints those of the ranks it forks, the corpus hands
    one to the thread that waits, drivers raise errors of their own, LoadGen waits for the end of every request, and
    the observer of a foreign script must not disturb it."""
    documented = {"workloads.worker", "launchers._warm", "training.data.corpus", "host.machine", "host.gauges"}
    documented |= {"serving.client.on_demand", "training.attachment.paceline_observer"}
    found = {
        module
        for module in SOURCES
        for node in nodes(module)
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or {"Exception", "BaseException"} & {ast.unparse(n) for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        )
    }
    assert found == documented


def test_every_package_says_what_it_holds() -> None:
    short = [
        name
        for name, path in SOURCES.items()
        if path.name == "__init__.py" and len((ast.get_docstring(trees()[name]) or "").splitlines()) < 3
    ]
    assert not [name for name in short if name and "." not in name]


def test_a_program_starts_on_its_last_line() -> None:
    """What is defined below `if __name__ == "__main__"` does not exist yet while the program runs."""
    assert not [
        name
        for name, tree in trees().items()
        if any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body[:-1])
    ]
