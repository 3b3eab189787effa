"""The tiny trainer with its loop watched: every rank writes what it was told to ``DIR/rank_N.json`` (``--collect=DIR``).

Nothing heavy is imported at the top: saving starts a helper process that imports this file again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SWITCH = "--collect="


def digest(value: Any) -> Any:
    """A value as JSON: tensors and bytes as digests."""
    import torch

    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{list(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()[:32]}"
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:32]
    if isinstance(value, Mapping):
        return {key: digest(item) for key, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else value


class Collector:
    """A watcher that keeps everything, whole tensors too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, Any] = {"calls": [], "loaded": {}, "saved": {}, "steps": {}, "groups": {}}
        self.gathered: dict[str, Any] = {}

    def placed_sum(self, parts: Sequence[Any], shape: Sequence[int]) -> str:
        from ckptguard.resume.placed_sums import placed_sum

        return placed_sum(parts, shape)

    def _read(self, items: Sequence[Any]) -> dict[str, Any]:
        names = [item.name for item in items]
        assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
        self.told["groups"].update({item.name: item.group for item in items})
        return {item.name: digest(item.read()) for item in items}

    def _call(self, name: str, step: int | None = None) -> None:
        self.told["calls"].append([name, step])

    def started(self, facts: Mapping[str, Any]) -> None:
        self._call("started")
        self.told["facts"] = dict(facts)

    def built(self, modules: Sequence[Any], optimizer: Any) -> None:
        self._call("built")

    def loaded(self, step: int, items: Sequence[Any], unobserved: Sequence[str]) -> None:
        self._call("loaded", step)
        self.told["loaded"], self.told["unobserved"] = self._read(items), list(unobserved)
        self.told["written"] = [item.name for item in items if item.write is not None]
        self._write()  # a run that only loads has no end

    def step_begins(self, step: int, items: Sequence[Any]) -> None:
        self._call("step begins", step)
        self.gathered = self._read(items) | {"batch": []}

    def batch(self, batch: Any) -> None:
        self.gathered["batch"].append(digest(batch))

    def gradients(self, items: Sequence[Any]) -> None:
        self._call("gradients")
        self.gathered |= self._read(items)

    def step_ended(self, step: int, values: Mapping[str, Any], items: Sequence[Any]) -> None:
        self._call("step ended", step)
        self.told["steps"][step] = self.gathered | digest(values) | self._read(items)

    def saved(self, step: int, items: Sequence[Any]) -> None:
        self._call("saved", step)
        self.told["saved"][step] = self._read(items)

    def ended(self) -> None:
        self._call("ended")
        self._write()

    def _write(self) -> None:
        path = self.folder / f"rank_{os.environ['RANK']}.json"
        path.write_text(json.dumps(self.told, indent=1))


def main() -> None:
    """Run the tiny trainer, watched."""
    (folder,) = (Path(a.removeprefix(SWITCH)) for a in sys.argv if a.startswith(SWITCH))
    sys.argv = [a for a in sys.argv if not a.startswith(SWITCH)]

    from ckptguard.megatron.watch_lm import watch
    from ckptguard.testing import cpu_stand_in, tiny_trainer

    cpu_stand_in.install()
    watch(Collector(folder))
    tiny_trainer.main()


if __name__ == "__main__":
    main()
