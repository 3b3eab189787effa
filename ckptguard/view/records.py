"""What is written down about a view: the record inside it, and beside it when it was published and confirmed.

The record is made before the view appears and never changes. What happens to the view later cannot go into its read-only
directory: it stands in ``V.d/<version>.json``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckptguard.core.errors import DamagedError, NotFoundError
from ckptguard.core.writing import check_relative
from ckptguard.engine.write_calls import create, store, sync_directory, writing
from ckptguard.view.messages import from_plain, to_plain
from ckptguard.view.values import Agreement

NAME = "ckptguard-view.json"
_FORMAT = "ckptguard-view/1"
_WRITE_BITS = 0o222


@dataclass(frozen=True, slots=True)
class Record:
    """What a view says about itself.

    Attributes:
        format: Of the record.
        node: Number of the node that the view stands on.
        staged: When its files were complete there, ISO 8601 in UTC, by the node's own clock.
        agreement: What the nodes agreed on.
    """

    format: str
    node: int
    staged: str
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Publication:
    """What happened to a view. Moments are ISO 8601 in UTC by the node's own clock; "" where it has not happened.

    Attributes:
        previous: Name of the version that was current before; "" if none was.
        published: When it became current.
        confirmed: When every node was known to have published it.
    """

    previous: str = ""
    published: str = ""
    confirmed: str = ""


def moment() -> str:
    """Now, as records have it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_record(directory: Path, agreement: Agreement, node: int) -> None:
    """Writes the record into a directory that is about to become a view.

    Raises:
        EnvironmentFailedError: The file system refuses.
    """
    put_file(directory / NAME, _text(Record(_FORMAT, node, moment(), agreement)))


def read_record(directory: Path) -> Record:
    """The record of a view.

    Raises:
        NotFoundError: There is none.
        DamagedError: It cannot be read, or is not what ``write_record`` writes.
    """
    path = directory / NAME
    again = "Prepare the view again; ckptguard view prune removes this one once another is current."
    try:
        plain = json.loads(path.read_bytes())
        if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
            said = plain.get("format") if isinstance(plain, dict) else type(plain).__name__
            raise ValueError(f"format {said!r}, expected {_FORMAT!r}")
        record = from_plain(Record, plain)
        for name in record.agreement.files:
            check_relative(name)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: not there, so this is no view", next_step=again) from error
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}", next_step=again) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not the record of a view: {error}", next_step=again) from error
    return record


def write_publication(path: Path, publication: Publication) -> None:
    """Writes what happened to a view, in place of what was written before.

    Raises:
        EnvironmentFailedError: The file system refuses.
    """
    put_file(path, _text(publication))
    with writing(path):
        sync_directory(path.parent)


def read_publication(path: Path) -> Publication:
    """What happened to a view. Where that cannot be read, nothing has: then the view is taken back and made again."""
    try:
        return from_plain(Publication, json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return Publication()


def put_file(path: Path, data: bytes) -> None:
    """Makes a small file that nobody may write to, whole or not at all.

    What stood there is replaced, not changed: it may be a hard link of a file of the user's.

    Raises:
        EnvironmentFailedError: The file system refuses.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path, len(data)):
        temporary.unlink(missing_ok=True)
        handle = create(temporary, len(data))
        try:
            store(handle, memoryview(data), 0)
            os.fchmod(handle, os.fstat(handle).st_mode & ~_WRITE_BITS & 0o777)
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)


def _text(value: Any) -> bytes:
    return json.dumps(to_plain(value), indent=2).encode() + b"\n"
