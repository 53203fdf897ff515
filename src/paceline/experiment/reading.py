"""YAML files and presets as plain mappings."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RequestError, did_you_mean


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-4 is a number, as people expect (YAML 1.1 requires 1.0e-4)."""


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
        given = repr(options["name"]) if options.get("name") is not None else "none"
        raise RequestError(f"{where}: name: got {given}, expected the name of a launcher, as in `name: kubernetes`.")
    return options


def _text_of(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{where} cannot be read ({error}).") from None


# What a file contains instead of a mapping.
_CONTENTS = {type(None): "nothing", list: "a list", str: "text"}


def parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader)  # noqa: S506 (Loader is a SafeLoader)


def _parse(text: str, where: str, content: str = "name, base and matrix") -> dict[str, Any]:
    try:
        value = parse_yaml(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RequestError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        given = _CONTENTS.get(type(value), "one value")
        raise RequestError(f"{where}: got {given}, expected a mapping with {content}.")
    return value
