"""Imported by Python at start-up when this folder is on ``PYTHONPATH``; see ``ckptguard/testing/cpu_stand_in.py``.

Waits for torch to be imported, so that helper processes that never import it start as fast as ever.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _InstallAfterTorch(importlib.abc.MetaPathFinder):
    """Installs the CPU stand-in right after torch is first imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_install(module: ModuleType) -> None:
            execute(module)
            from ckptguard.testing import cpu_stand_in

            cpu_stand_in.install()

        spec.loader.exec_module = exec_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _InstallAfterTorch())
