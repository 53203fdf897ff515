"""Python imports this module when it starts: it attaches the observer to a process as soon as that imports torch."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).absolute().parent


class AttachAfterImport(importlib.abc.Loader):
    """Runs a module with its own loader, then attaches the observer."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Tools that ask a module for its source or resources must find the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # The script must run whatever happens to its observer.
        with contextlib.suppress(Exception):
            import paceline_observer

            paceline_observer.attach()


class TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch with a loader that attaches the observer; everything else is found as usual.

    Libraries ask where torch is long before anybody imports it, so the finder stays until the import.
    """

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = AttachAfterImport(spec.loader)
        return spec


def run_hidden_module() -> None:
    """Run the sitecustomize that this one hides, if the environment of the script has its own."""
    rest = [entry for entry in sys.path if Path(entry or ".").absolute() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("PACELINE_OBSERVE"):
    sys.meta_path.insert(0, TorchFinder())
run_hidden_module()
