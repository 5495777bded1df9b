"""What reading an archive raises, and the error that says which file it is about.

A file that cannot be read and one that was read and is damaged need different remedies; Python's
modules for archives raise OSError for both, with an error number only where the system gave one.
"""

import lzma
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

from largebatch.errors import DataError

DAMAGED = (
    OSError,
    EOFError,
    RuntimeError,  # zipfile's, of passwords and methods it does not know
    ValueError,
    OverflowError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""What the modules for archives raise over files that cannot be read or are damaged."""


def fault(path: Path, error: Exception, *, expected: str) -> DataError:
    """Say that a file cannot be read, or that it is not whole or not what was expected."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{error.filename or path}: cannot be read ({error.strerror})")
    return DataError(f"{path}: not a whole {expected} ({reason(error)}); fetch it again")


def reason(error: Exception) -> str:
    """Return an error's message, or its name where it has none."""
    return str(error) or type(error).__name__
