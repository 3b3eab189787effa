"""Imported by Python at start-up when this folder is on ``PYTHONPATH``; see ``ckptguard/testing/cpu_stand_in.py``.

Waits for torch to be imported, so that helper processes that never import it start as fast as ever.
"""

import importlib.util
import sys


class _InstallAfterTorch:
    """A meta path finder that installs the CPU stand-in when torch has been imported."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_and_install(module):  # type: ignore[no-untyped-def]
            execute(module)
            from ckptguard.testing import cpu_stand_in

            cpu_stand_in.install()

        spec.loader.exec_module = exec_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _InstallAfterTorch())  # type: ignore[arg-type]
