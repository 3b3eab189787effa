"""One checkpoint view that every node agrees on: what each node has and needs, agreement, staging, publishing.

For launchers, on every node at once::

    from ckptguard.view import Given, Options, here, prepare

    nodes = here(Given(ranks_each=8), None, os.environ)
    result = prepare(Options(places=("/local/ckpt",), view=Path("/local/view"), nodes=nodes))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptguard.view.nodes import Given, Nodes, here
    from ckptguard.view.preparing import Options, Result, prepare, status

__all__ = ["Given", "Nodes", "Options", "Result", "here", "prepare", "status"]
_HOMES = {"Given": "nodes", "Nodes": "nodes", "here": "nodes"}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the values of this room cost little, what moves files costs a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'preparing')}"), name)
