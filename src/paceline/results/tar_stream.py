"""The members of a tar archive of somebody else, read forward once and within limits.

`tarfile` reads a header of any size into memory and searches it in quadratic time, and one of 1 MB in a gzip stream
becomes 1 GB. Here a header has at most a few kilobytes, says nothing but a name and a size, and belongs to one member.
"""

from __future__ import annotations

import tarfile
from typing import BinaryIO

_CHUNK = 1 << 20
MOST_HEADER_BYTES = 4096
# Text of samples is about a tenth when it is compressed, a bomb a thousandth. Small archives are exempt.
MOST_RATIO, LARGE_BYTES = 200, 256 * 2**20
_HEADER_FIELDS = frozenset({b"path", b"size"})


class TarStream:
    """Members one after the other: `next`, then `read` until it returns nothing. stored_bytes: size of the file that
    the stream is decompressed from."""

    def __init__(self, stream: BinaryIO, stored_bytes: int) -> None:
        self._stream, self._stored_bytes = stream, stored_bytes
        self._total_bytes = self._left_bytes = self._padding_bytes = 0

    def next(self) -> tarfile.TarInfo | None:
        """The next member; None at the end. TarError for a header that no capsule has."""
        while self.read():
            pass
        self._take(self._padding_bytes)
        fields: dict[bytes, str] = {}
        member = self._header()
        if member is not None and member.type == tarfile.XHDTYPE:
            fields, member = self._fields(member.size), self._header()
            if member is None or member.type == tarfile.XHDTYPE:
                raise tarfile.ReadError("a header without a member")
        if member is not None:
            member.name = fields.get(b"path", member.name)
            member.size = int(fields.get(b"size", member.size))
            if member.size < 0:
                raise tarfile.ReadError("a member of negative size")
            self._left_bytes = member.size if is_plain(member) else 0
            self._padding_bytes = -self._left_bytes % tarfile.BLOCKSIZE
        return member

    def read(self, most: int = _CHUNK) -> bytes:
        """The next bytes of the member; empty at its end."""
        content = self._take(min(most, self._left_bytes))
        self._left_bytes -= len(content)
        return content

    def _header(self) -> tarfile.TarInfo | None:
        try:
            return tarfile.TarInfo.frombuf(self._take(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return None

    def _fields(self, size: int) -> dict[bytes, str]:
        """The fields of an extended header: `LENGTH NAME=VALUE` and a line feed each."""
        if not 0 < size <= MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        content = self._take(size)
        self._take(-size % tarfile.BLOCKSIZE)
        fields = {}
        while content:
            digits, _, _ = content[:6].partition(b" ")
            length = int(digits) if digits.isdigit() else 0
            name, sign, value = content[len(digits) + 1 : length].partition(b"=")
            if length > len(content) or name not in _HEADER_FIELDS or not sign or not value.endswith(b"\n"):
                raise tarfile.ReadError("a header that says more than a name and a size")
            fields[name] = value[:-1].decode()
            content = content[length:]
        return fields

    def _take(self, count: int) -> bytes:
        content = self._stream.read(count) if count else b""
        if len(content) != count:
            raise tarfile.ReadError("unexpected end of data" if self._total_bytes else "empty file")
        self._total_bytes += count
        if self._total_bytes > max(LARGE_BYTES, MOST_RATIO * self._stored_bytes):
            raise tarfile.ReadError(f"it is compressed to less than 1/{MOST_RATIO} of its size")
        return content


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether it is a file whose bytes follow: neither a link, a directory nor a sparse file."""
    return member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
