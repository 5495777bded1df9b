"""Members of a tar as bytes."""

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


def write(path: Path, *members: bytes) -> Path:
    """Write a tar of these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(members) + END)
    return path
