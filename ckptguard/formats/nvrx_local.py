"""Files of nvidia-resiliency-ext's local checkpoints: one per rank, on a disk of that rank's node.

They stand at ``<root>/<session>/<rank>/iter_0000020_<rank>_local.pt``; with replication a folder holds files of other ranks
too. The session is empty with Megatron-LM and Megatron-Bridge, which give none. A file is written under a name with ``.dirty``
and renamed when it is whole; there is no index.

Source: nvidia_resiliency_ext/checkpointing/local/ckpt_managers/local_manager.py (0.4.1) ``local_ckpt_dir``,
``_filename_from_template``, ``_save``; megatron/training/training.py (0.19.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Seven digits: the writer asserts it, and a reader that finds fewer asks for a file that has seven.
_FILE = re.compile(r"iter_(\d{7})_(0|[1-9]\d*)_local(\.dirty)?\.pt", re.ASCII)
_RANK = re.compile(r"0|[1-9]\d*", re.ASCII)


@dataclass(frozen=True, slots=True)
class LocalFile:
    """What the name of a local checkpoint file says.

    Attributes:
        iteration: When it was saved.
        rank: Whose state it is, whichever rank's folder it stands in.
        finished: False while it is being written, or for ever if the writer died.
    """

    iteration: int
    rank: int
    finished: bool = True

    def place(self, session: str) -> str:
        """Where the rank itself looks for it, relative to the root, POSIX.

        Args:
            session: ``session_id`` of the manager; "" for none.
        """
        own = f"{self.rank}/iter_{self.iteration:07d}_{self.rank}_local.pt"
        return f"{session}/{own}" if session else own


def parse(name: str) -> LocalFile | None:
    """What a file name says; None if it is not that of a local checkpoint."""
    match = _FILE.fullmatch(name)
    return LocalFile(int(match[1]), int(match[2]), match[3] is None) if match else None


def is_rank_folder(name: str) -> bool:
    """Whether a folder may be that of a rank: a number without leading zeros."""
    return _RANK.fullmatch(name) is not None
