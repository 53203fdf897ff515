"""YAML files and presets as plain mappings."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import LONGEST_SHOWN, RequestError, did_you_mean, shown

# Limits of a file, checked before its content is built. An alias counts as often as it is used.
MOST_FILE_BYTES = 2**20
MOST_NODES = 100_000
LONGEST_NUMBER = 400
# Of open brackets and braces; PyYAML looks at all open ones again for every token.
MOST_BRACKETS = 100


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, as people expect (YAML 1.1 requires 1.0e-4).

    It refuses what would take long to read or to build (many open brackets, numbers of many digits, aliases of
    aliases), and a key that occurs twice."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level >= MOST_BRACKETS:
            raise yaml.YAMLError("nested too deeply")
        super().fetch_flow_collection_start(token)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _expanded(node, {}, set()) > MOST_NODES:
            raise yaml.YAMLError(f"more than {MOST_NODES:,} values, with each alias counted as often as it is used")
        return node


def _expanded(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """The number of nodes below and with this one, aliases expanded."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
            raise yaml.YAMLError(f"a number of {len(node.value):,} characters")
        return 1
    if id(node) in above:
        raise yaml.YAMLError("an alias that contains itself")
    if id(node) not in sizes:
        if isinstance(node, yaml.MappingNode):
            _require_keys_once(node)
        above.add(id(node))
        parts = (part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,)))
        sizes[id(node)] = 1 + sum(_expanded(part, sizes, above) for part in parts)
        above.discard(id(node))
    return sizes[id(node)]


def _require_keys_once(node: yaml.MappingNode) -> None:
    """PyYAML would take the last value of a key that occurs twice, without a word."""
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.MarkedYAMLError(None, None, f"{key.value!r} occurs twice", key.start_mark)
        seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def presets() -> dict[str, str]:
    """Name -> description of the experiments that ship with Paceline."""
    descriptions = {}
    for entry in resources.files(__package__).joinpath("presets").iterdir():
        if entry.name.endswith(".yaml"):
            text = _parse(entry.read_text(encoding="utf-8"), entry.name).get("description", "")
            descriptions[entry.name.removesuffix(".yaml")] = str(text)
    return dict(sorted(descriptions.items()))


def read(source: str) -> dict[str, Any]:
    """The content of a preset or of a YAML file."""
    path = Path(source)
    shipped = resources.files(__package__).joinpath("presets", f"{source}.yaml")
    if "/" not in source and not path.suffix and shipped.is_file():
        return _parse(shipped.read_text(encoding="utf-8"), source)
    if path.is_file():
        return _parse(_text_of(path, f"experiment: {source!r}"), source)
    known = presets()
    hint = did_you_mean(source, known)
    raise RequestError(
        f"experiment: got {source!r}, expected a YAML file or one of the presets {', '.join(known)}.{hint}"
    )


def read_launcher(path: str) -> dict[str, Any]:
    """A launcher with its options, from a file of its own."""
    where = f"--launcher {path}"
    if not Path(path).is_file():
        raise RequestError(f"{where}: no such file; expected a YAML file or the name of a launcher.")
    options = _parse(_text_of(Path(path), where), where, "name and the launcher's options")
    if not isinstance(options.get("name"), str):
        given = shown(options["name"]) if options.get("name") is not None else "none"
        raise RequestError(f"{where}: name: got {given}, expected the name of a launcher, as in `name: kubernetes`.")
    return options


def _text_of(path: Path, where: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise RequestError(f"{where}: got more than {MOST_FILE_BYTES // 2**20} MiB, expected a YAML file.")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RequestError(f"{where} cannot be read ({reason}), expected a YAML file.") from None


# What a file contains instead of a mapping.
_CONTENTS = {type(None): "nothing", list: "a list", str: "text"}


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; a yaml.YAMLError whatever is wrong with it."""
    try:
        return yaml.load(text, Loader)  # noqa: S506 (Loader is a SafeLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, OverflowError, TypeError, AttributeError) as error:
        # Dates that do not exist, `!!int x`, and other values that their tags do not allow.
        raise yaml.YAMLError(str(error)) from None


def _parse(text: str, where: str, content: str = "name, base and matrix") -> dict[str, Any]:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        text = " ".join(str(getattr(error, "problem", None) or error).split())
        text = text if len(text) <= 2 * LONGEST_SHOWN else f"{text[: 2 * LONGEST_SHOWN]}..."
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RequestError(f"{where}{line}: not valid YAML: {text}.") from None
    if not isinstance(value, dict):
        given = _CONTENTS.get(type(value), "one value")
        raise RequestError(f"{where}: got {given}, expected a mapping with {content}.")
    return value
