"""Addresses of storage, such as s3://bucket/imagenet, which options have in place of a folder."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from largebatch.errors import DataError, clip

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
"""Kinds of storage that an address can begin with."""

WEB = ("https", "http")
"""Kinds of a web server, which neither lists objects nor takes new ones."""


@dataclass(frozen=True, order=True)
class Address:
    """The address of an object, or of all objects whose names begin with it and a slash."""

    url: str
    """Address such as s3://bucket/imagenet, without a slash at its end."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self.url}/{name}")

    @property
    def scheme(self) -> str:
        """Kind of the storage, one of SCHEMES."""
        return self.url.partition(":")[0]

    @property
    def folder(self) -> Path:
        """Folder of an address that begins with file://."""
        assert self.scheme == "file"
        return Path(unquote(urlsplit(self.url).path))

    @property
    def name(self) -> str:
        """Last part of the address."""
        return self.url.rpartition("/")[2]


Place = Path | Address
"""A folder of this machine, or an address."""


def place_of(text: str | Place) -> Place:
    """Return the folder or the address that a text names.

    Raises DataError for an address of an unknown kind, or with credentials in it, which a log or
    a list of processes would show.

    >>> place_of("images"), place_of("s3://photos/birds/")
    (PosixPath('images'), Address(url='s3://photos/birds'))
    """
    if isinstance(text, (Path, Address)):
        return text
    if "://" not in text:
        return Path(text)
    # Not shown whole in messages: it may hold a secret.
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        kinds = ", ".join(f"{kind}://" for kind in SCHEMES)
        raise DataError(f"{clip(scheme, 20)}://: unknown kind of storage; possible: {kinds}")
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise DataError(
            f"{scheme}://: the address contains credentials or a query, which logs would show; "
            "give it without them, and set the storage's environment variables"
        )
    if not (parts.netloc or scheme == "file") or (scheme == "file" and parts.netloc):
        expected = "file:///folder" if scheme == "file" else f"{scheme}://bucket/folder"
        raise DataError(f"{text}: expected an address such as {expected}")
    return Address(text.rstrip("/"))
