"""What one node has of a checkpoint, found out on its own: steps, trackers, copies of files, and what is wrong with them.

A place is a root as Megatron-LM and Megatron-Bridge write it (``iter_*`` or ``release`` directories, trackers, and the same
below ``non_persistent``: megatron/training/checkpointing.py ``_NON_PERSISTENT_CKPT_SUBDIR``, 0.19.2), or one of
nvidia-resiliency-ext's local checkpoints, or both. Every directory is listed once; of a global step only files that are no
data files are read.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType

from ckptguard.core.errors import CkptguardError, DamagedError, EnvironmentFailedError, NotFoundError, UsageError
from ckptguard.core.wording import some
from ckptguard.formats import train_state
from ckptguard.formats.remote import RemotePath, path_of, refuse_unfinished
from ckptguard.formats.trackers import LATEST_TRAIN_STATE, TEXT
from ckptguard.view.listing import Child, children_of, joined, leaves
from ckptguard.view.local_survey import Sessions
from ckptguard.view.network_files import FileSystem, Patience, file_system_of, is_recent
from ckptguard.view.step_survey import Indexes, StepFolder, look, said
from ckptguard.view.values import FoundStep, NodeReport, Step

NON_PERSISTENT = "non_persistent"
UNREADABLE = "unreadable"
MOST_STEPS = 16
_STEP = re.compile(r"iter_(\d{1,18})|release", re.ASCII)
_DIGITS = re.compile(r"\d{1,18}", re.ASCII)
_UNFINISHED_STEP = re.compile(r"(iter_\d+|release)\.partial-.*", re.ASCII)
_MOST_TRACKER_BYTES = 1 << 20
_MOST_NAMED = 8


def survey(
    node: int,
    host: str,
    places: Sequence[str],
    *,
    step: str | None = None,
    wait_seconds: float = 10.0,
    file_system: FileSystem = file_system_of,
) -> NodeReport:
    """Looks at every place. What is wrong with a file is told in the step's ``problems``, or in the notes.

    Of each place the newest 16 steps and those that trackers name are looked at. A place that is not there is a note: a
    replacement node has nothing. A symlink that leaves its directory is a problem, not a copy.

    Args:
        node: Number of this node.
        host: Its name.
        places: Paths or URLs: CKPT_DIR, then the sources.
        step: The only step to look for (``20``, ``iter_0000020`` or ``release``).
        wait_seconds: Longest wait, all together, for files on a network file system that may not be visible yet.
        file_system: Tells the type of the file system that a local path is on.

    Returns:
        The report; its ``url``, ``free_bytes`` and ``sees`` are left for the caller.

    Raises:
        UsageError, UnsupportedError: ``step`` is none, or a URL is of no kind whose files can be listed.
        EnvironmentFailedError: The first place is there and cannot be listed.
    """
    wanted = None if step is None else number_of(step)
    patience, indexes = Patience(wait_seconds, file_system), Indexes()
    trackers: dict[str, str] = {}
    found: list[FoundStep] = []
    notes: list[str] = []
    for number, text in enumerate(places):
        try:
            place = _Place(node, number, path_of(text), wanted, patience, indexes)
            place.look()
        except NotFoundError:
            notes.append(f"{text}: not there on this node")
        except DamagedError as error:
            notes.append(error.message)
        except EnvironmentFailedError as error:
            if number == 0:
                raise
            notes.append(error.message)
        except OSError as error:
            if number == 0:
                raise _unlisted(text, error) from error
            notes.append(_unlisted(text, error).message)
        else:
            trackers |= place.trackers
            found += place.found
            notes += place.notes
    found.sort(key=lambda one: (-one.step.iteration, one.step.kind, one.place))
    return NodeReport(
        node, host, tuple(places), trackers=MappingProxyType(trackers), found=tuple(found), notes=tuple(notes)
    )


def number_of(text: str) -> str:
    """A step as a person or a tracker names it: the iteration without leading zeros, or ``release``.

    Raises:
        UsageError: It is none.
    """
    match = _STEP.fullmatch(text)
    if text == "release":
        return text
    digits = match[1] if match else text
    if not _DIGITS.fullmatch(digits):
        raise UsageError(f"{text!r} is no step", next_step="Give an iteration such as 20, or release.")
    return str(int(digits))


def _unlisted(text: str, error: OSError) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"{text}: cannot be listed: {error.strerror or error}",
        next_step="Give a directory that this user may read, and check the disk or the mount.",
    )


class _Place:
    """Collects what one place holds."""

    def __init__(
        self, node: int, number: int, root: Path, wanted: str | None, patience: Patience, indexes: Indexes
    ) -> None:
        self.trackers: dict[str, str] = {}
        self.found: list[FoundStep] = []
        self.notes: list[str] = []
        self._node, self._number, self._root, self._wanted = node, number, root, wanted
        self._patience, self._indexes = patience, indexes
        self._iterations: set[str] = set()

    def look(self) -> None:
        """Looks at everything.

        Raises:
            NotFoundError: The place is not there.
            DamagedError: It is a target at a URL that is not whole yet.
            OSError, EnvironmentFailedError: It cannot be listed.
        """
        refuse_unfinished(self._root)
        children = self._tracked("")
        self._global_steps(children)
        sessions = Sessions(self._node, self._number, self._root, self._wanted)
        sessions.look(children)
        self.found += sessions.steps()
        self.notes += sessions.notes
        self._iterations |= sessions.iterations
        if not children:
            self.notes.append(f"{self._root}: empty")
        elif not self.found:
            there = sorted(self._iterations, key=_by_age, reverse=True)
            have = f"; it has {some(there, _MOST_NAMED)}" if there else ""
            what = "no checkpoint" if self._wanted is None else f"no step {self._wanted}"
            self.notes.append(f"{self._root}: {what} in it{have}{self._hint(children)}")

    def _hint(self, children: dict[str, Child]) -> str:
        inside = _STEP.fullmatch(self._root.name) and not any(_STEP.fullmatch(name) for name in children)
        return f"; is it a step itself? Then give the directory above, {self._root.parent}" if inside else ""

    def _tracked(self, below: str) -> dict[str, Child]:
        """Lists a root, until the step that its tracker names is there; notes trackers and unfinished steps."""
        notes: list[str] = []
        trackers: dict[str, str] = {}

        def once() -> dict[str, Child]:
            children = children_of(self._root / below)
            notes.clear()
            trackers.clear()
            for name in (TEXT, LATEST_TRAIN_STATE):
                if name in children:
                    trackers[name] = self._tracker(joined(below, name), notes)
            return children

        children, waited = self._until(once, lambda found: self._untracked(below, found, trackers))
        self.notes += [*notes, *([waited] if waited else [])]
        self.trackers.update((f"{self._number}:{joined(below, name)}", text) for name, text in trackers.items())
        unfinished = [name for name in children if _UNFINISHED_STEP.fullmatch(name)]
        self.notes += [f"{self._root / below / name}: a write that has not ended, left out" for name in unfinished]
        return children

    def _until[T](self, once: Callable[[], T], doubtful: Callable[[T], Sequence[str]]) -> tuple[T, str]:
        """Looks, and waits for what a network file system may not show yet. Object stores show what is there."""
        if isinstance(self._root, RemotePath):
            return once(), ""
        return self._patience.until(self._root, once, doubtful)

    def _untracked(self, below: str, children: dict[str, Child], trackers: dict[str, str]) -> list[str]:
        """Step directories that trackers name and that are not there, and trackers that are perhaps not whole yet."""
        torn = [joined(below, name) for name, text in trackers.items() if text == UNREADABLE]
        torn = [path for path in torn if is_recent(self._root / path)]
        there = {number_of(name) for name in children if _STEP.fullmatch(name)}
        missing = {text for text in trackers.values() if text != UNREADABLE and text not in there}
        if self._wanted is not None:
            missing &= {self._wanted}
        folders = [Step("global", text).folder for text in sorted(missing)]
        return [*torn, *[joined(below, folder) for folder in folders]]

    def _tracker(self, path: str, notes: list[str]) -> str:
        """What a tracker names: an iteration without leading zeros, ``release``, or ``unreadable``, with a note."""
        where = self._root / path
        try:
            data = self._small(path)
            if path.endswith(LATEST_TRAIN_STATE):
                return str(train_state.tracked_step(data, where=str(where)))
            return number_of(data.decode().strip())
        except UsageError as error:
            notes.append(f"{where}: {error.message}")
        except UnicodeDecodeError:
            notes.append(f"{where}: not text")
        except (CkptguardError, OSError) as error:
            notes.append(said(error) if isinstance(error, CkptguardError) else f"{where}: {said(error)}")
        return UNREADABLE

    def _small(self, path: str) -> bytes:
        """All bytes of a tracker.

        Raises:
            EnvironmentFailedError: It is no plain small file inside the place, or the store cannot be asked.
            OSError: It cannot be read.
        """
        where = self._root / path
        found = where.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_TRACKER_BYTES or leaves(self._root, path):
            raise EnvironmentFailedError(f"{where}: not a plain small file inside the place")
        return where.read_bytes()

    def _global_steps(self, children: dict[str, Child]) -> None:
        """Steps of distributed checkpoints, persistent ones and others, the newest first."""
        folders = [child for child in children.values() if child.folder and _STEP.fullmatch(child.name)]
        inner = children.get(NON_PERSISTENT)
        if inner is not None and inner.link and leaves(self._root, NON_PERSISTENT):
            self.notes.append(
                f"{self._root / NON_PERSISTENT}: leads out of {self._root}: give its target with --source"
            )
        elif inner is not None and inner.folder:
            below = self._listed(NON_PERSISTENT, self._tracked).values()
            folders += [
                Child(f"{NON_PERSISTENT}/{child.name}", True, child.link)
                for child in below
                if child.folder and _STEP.fullmatch(child.name)
            ]
        numbered = [(number_of(child.name.rpartition("/")[2]), child) for child in folders]
        numbered.sort(key=lambda pair: _by_age(pair[0]), reverse=True)
        self._iterations |= {number for number, _ in numbered}
        chosen = [(number, child) for number, child in numbered if self._wanted in (None, number)]
        awaited = {*self.trackers.values(), *[number for number, _ in chosen[:1]]}
        kept = [pair for at, pair in enumerate(chosen) if at < MOST_STEPS or pair[0] in awaited]
        for number, child in kept:
            self._global_step(number, child, awaited=number in awaited)
        rest = [number for number, child in chosen if (number, child) not in kept]
        if rest:
            self.notes.append(
                f"{self._root}: {len(rest)} older steps were not looked at ({some(rest, _MOST_NAMED)}); --step looks at one"
            )

    def _listed(self, path: str, how: Callable[[str], dict[str, Child]]) -> dict[str, Child]:
        """What stands in a directory of the place; nothing, with a note, if it cannot be listed."""
        try:
            return how(path)
        except NotFoundError:  # removed meanwhile
            return {}
        except (OSError, CkptguardError) as error:
            self.notes.append(f"{self._root / path}: {said(error)}")
            return {}

    def _global_step(self, number: str, child: Child, *, awaited: bool) -> None:
        if child.link and leaves(self._root, child.name):
            where = self._root / child.name
            problem = f"{where}: a symlink that leads out, to {where.resolve()}: give the directory that holds it with --source"
            self.found.append(FoundStep(Step("global", number), self._node, self._number, (), problems=(problem,)))
            return
        folder = StepFolder(self._node, self._number, self._root, child.name, number)
        seen, waited = self._until(lambda: look(folder, self._indexes), lambda now: now.doubtful if awaited else ())
        self.found.append(seen.found)
        self.notes += [waited] if waited else []


def _by_age(number: str) -> int:
    """For ordering steps; a release comes before all."""
    return int(number) if number.isdigit() else -1
