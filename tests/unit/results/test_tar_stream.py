"""Archives that a stranger wrote by hand: headers, sizes and compression are checked before they are believed."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from paceline.errors import RequestError
from paceline.results import capsule, tar_stream
from paceline.results.tar_stream import TarStream

MANIFEST = "capsule/manifest.json"


def header(kind: bytes, size: int, name: str = MANIFEST) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.USTAR_FORMAT)


def read(content: bytes) -> list[tuple[str, bytes]]:
    stream = TarStream(io.BytesIO(content), len(content))
    return [(member.name, b"".join(iter(stream.read, b""))) for member in iter(stream.next, None)]


def test_it_reads_what_tarfile_writes() -> None:
    """Long names and names that are not ASCII are in headers of their own."""
    files = {"a": b"", "b": b"x" * 513, "é/" + "n" * 250: b"y" * 512, "/".join(["d" * 60] * 5): b"z"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert dict(read(packed.getvalue())) == files


PATH = b"12 path=abc\n"
END = b"\0" * 1024
CASES = {
    "a header of a gigabyte": header(tarfile.XHDTYPE, 2**30),
    "a negative header": header(tarfile.XHDTYPE, 0)[:124] + b"\xff" * 12 + header(tarfile.XHDTYPE, 0)[136:],
    "headers of headers": (header(tarfile.XHDTYPE, 12) + PATH.ljust(512, b"\0")) * 5000,
    "a header without a member": header(tarfile.XHDTYPE, 12) + PATH.ljust(512, b"\0") + END,
    "another field": header(tarfile.XHDTYPE, 18) + b"18 GNU.sparse.x=1\n".ljust(512, b"\0") + header(b"0", 0) + END,
    "a number that lies": header(tarfile.XHDTYPE, 12) + b"99 path=abc\n".ljust(512, b"\0") + header(b"0", 0) + END,
    "digits without an end": header(tarfile.XHDTYPE, 4096) + b"9" * 4096 + header(b"0", 0) + END,
    "no digits": header(tarfile.XHDTYPE, 12) + b"\xb2 path=abc\n\0".ljust(512, b"\0") + header(b"0", 0) + END,
    "a size that is no number": header(tarfile.XHDTYPE, 10) + b"10 size=x\n".ljust(512, b"\0") + header(b"0", 0) + END,
    "no end": header(b"0", 0),
    "a member that is cut": header(b"0", 600) + b"x" * 512,
    "noise": b"noise" * 200,
}


@pytest.mark.parametrize("case", CASES)
def test_a_header_that_no_capsule_has_is_refused_at_once(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((tarfile.TarError, ValueError)):
            read(CASES[case])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_SPARSE, tarfile.XGLTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE]
)
def test_members_of_other_kinds_are_no_manifest(tmp_path: Path, kind: bytes) -> None:
    """Hard links, sparse files and headers for all members as well."""
    path = tmp_path / "c.tar.gz"
    path.write_bytes(gzip.compress(header(kind, 512) + b"\0" * 512 + END))
    with pytest.raises(RequestError, match="does not begin with"):
        capsule.read_runs(path)


def test_what_unpacks_to_much_more_than_it_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar_stream, "LARGE_BYTES", 2**20)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(header(b"0", 2**24) + b" " * 2**24 + END))
    with pytest.raises(RequestError, match=r"compressed to less than 1/200 of its size"):
        capsule.read_runs(path)
    path.write_bytes(gzip.compress(header(b"0", capsule.MOST_MANIFEST_BYTES + 1) + b" " * 512))
    with pytest.raises(RequestError, match="does not begin with"):
        capsule.read_runs(path)
