"""Where something listens, by Linux's own tables."""

import socket
import struct
from pathlib import Path


def listeners(tables: str | None = None) -> set[tuple[str, int]]:
    """Return (address, port) of all sockets that listen, by the content of /proc/net/tcp*.

    `0.0.0.0` and `::` are all interfaces.
    """
    if tables is None:
        tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    found = (line.split() for line in tables.splitlines())
    places = (fields[1].split(":") for fields in found if len(fields) > 3 and fields[3] == "0A")
    return {(_address(address), int(port, 16)) for address, port in places}


def _address(text: str) -> str:
    """Return an address that is written as words in the order of the machine.

    >>> _address("0100007F")
    '127.0.0.1'
    """
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    content = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, content)
