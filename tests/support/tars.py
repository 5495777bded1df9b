"""Members of a tar as bytes, among them those that no module of Python writes."""

import tarfile
from pathlib import Path

END = bytes(1024)


def member(
    name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, to: str = ""
) -> bytes:
    """Return a header and the content, padded."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, to, len(content)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def symbolic(name: str, to: str) -> bytes:
    return member(name, kind=tarfile.SYMTYPE, to=to)


def hard(name: str, to: str) -> bytes:
    return member(name, kind=tarfile.LNKTYPE, to=to)


def sparse(name: str, content: bytes) -> bytes:
    """Return GNU's form of a file that begins with a hole of 512 zeros, which are not stored."""
    whole = bytearray(member(name, content, kind=tarfile.GNUTYPE_SPARSE))
    whole[386:410] = b"%011o\0%011o\0" % (512, len(content))
    whole[483:495] = b"%011o\0" % (512 + len(content))
    return bytes(with_sum(whole))


def with_sum(header: bytearray) -> bytearray:
    """Write the checksum into the header at the start of these bytes."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return header


def write(path: Path, *members: bytes) -> Path:
    """Write a tar of these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(members) + END)
    return path
