"""Imported by Python at start-up when this folder is on ``PYTHONPATH``; see ``ckptguard/testing/cpu_stand_in.py``.

Waits for torch to be imported, so that helper processes that never import it start as fast as ever.
"""

from __future__ import annotations

from ckptguard.core.after_import import after_import


def _install(_: object) -> None:
    from ckptguard.testing import cpu_stand_in

    cpu_stand_in.install()


after_import("torch", _install)
