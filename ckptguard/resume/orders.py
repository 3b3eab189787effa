"""What a recorded process is told to do: one JSON file per arm, named by an environment variable that launchers pass on."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "CKPTGUARD_RECORD"  # path of the arm's order file
ORDER_FILE = "order.json"
FAILED = "recorder failed"  # begins a line of a stream that cannot be trusted

Level = Literal["metrics", "state", "module", "op"]
LEVELS: tuple[Level, ...] = Level.__args__  # type: ignore[attr-defined]  # each holds what those before it hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the processes of one arm record.

    Attributes:
        arm: Name of the arm, such as ``reference``.
        folder: Where every rank writes its stream; visible on all nodes.
        level: How much is recorded.
        calls: Steps, ``(first, last)`` inclusive, of which module or op calls are recorded; None for none.
        scope: With level ``op``: the module (``chunk 0 decoder.layers.1.mlp``), or ``optimizer``, ``collectives``, to look
            into; None for everything.
        placed: Parts of whole tensors are recorded too when state is saved or loaded, to compare it under another layout.
        stop_when_loaded: End with exit code 0 once the loaded state was recorded.
        keep: Names of items whose values are kept when a save is made, for ``restore``.
        restore: Names of items that are overwritten right after loading with what the arm in ``restore_from`` kept.
        restore_from: Folder of that arm.
        plugin: ``module:function`` that is called with the recorder when it starts, to plant faults in tests; or None.
        plugin_argument: What that function is given.
    """

    arm: str
    folder: str
    level: Level = "state"
    calls: tuple[int, int] | None = None
    scope: str | None = None
    placed: bool = False
    stop_when_loaded: bool = False
    keep: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    restore_from: str | None = None
    plugin: str | None = None
    plugin_argument: str | None = None

    def write(self) -> Path:
        """Writes the order into its folder, which is made; returns the file's path."""
        path = Path(self.folder) / ORDER_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))
        return path


def read_order(path: Path) -> Order:
    """Reads what ``write`` wrote."""
    fields = json.loads(path.read_text())
    calls = fields.pop("calls")
    return Order(
        **fields | {name: tuple(fields[name]) for name in ("keep", "restore")}, calls=tuple(calls) if calls else None
    )
