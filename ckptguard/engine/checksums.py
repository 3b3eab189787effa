"""CRC-32 as ``zlib.crc32`` gives it, which zips store beside their data."""

from __future__ import annotations

try:  # the same sums at 15 times the speed, where it is installed
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
