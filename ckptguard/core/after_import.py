"""Run a patch right after a module is first imported, whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a patch right after the named module is first imported."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self.name, self.patch = name, patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the one module, with a loader that runs the patch when the module's own code has run."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_patch(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_and_patch  # type: ignore[method-assign]
        return spec


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Run ``patch(module)`` when module ``name`` is imported, or now if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        patch(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, patch))
