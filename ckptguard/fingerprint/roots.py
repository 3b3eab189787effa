"""The root of a set of fingerprints: one digest for all tensors of a checkpoint, the same in every layout and format."""

from __future__ import annotations

from collections.abc import Mapping

from ckptguard.fingerprint.values import ALGORITHM, Fingerprint

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n"})


def root(fingerprints: Mapping[str, Fingerprint]) -> str:
    """BLAKE3 of the sorted lines ``name TAB dtype TAB shape TAB hex``, after a line with the algorithm's name.

    Args:
        fingerprints: By tensor name; the order does not matter.

    Returns:
        64 hexadecimal digits.

    Raises:
        UnicodeEncodeError: A name has no UTF-8 form.
    """
    from blake3 import blake3

    digest = blake3(f"{ALGORITHM} root\n".encode())
    for name in sorted(fingerprints, key=str.encode):
        digest.update(line(name, fingerprints[name]))
    return digest.hexdigest()


def line(name: str, fingerprint: Fingerprint) -> bytes:
    r"""One line of the root's input, in UTF-8.

    A backslash, tab or newline in the name is written ``\\``, ``\t`` or ``\n``, so that no two sets make the same
    lines. The shape is its extents in decimal joined by commas, empty for a 0-d tensor.
    """
    shape = ",".join(map(str, fingerprint.shape))
    return f"{name.translate(_ESCAPES)}\t{fingerprint.dtype}\t{shape}\t{fingerprint.hex}\n".encode()
