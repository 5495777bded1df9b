"""Errors that a user can cause and fix.

The command line prints these as one message without a traceback and exits with code 2. All other
errors are bugs or machine failures and keep their traceback.
"""

import difflib
from collections.abc import Iterable, Sequence

SHOWN = 10
"""Maximum number of names or lines in a message."""

LONGEST_NAME = 100
"""Maximum length in characters of a name or value in a message."""


def shorten(words: Sequence[str], *, most: int = SHOWN, between: str = ", ") -> str:
    """Join the first `most` words of a list for a message.

    >>> shorten(["cat", "dog", "yak"], most=2), shorten([])
    ('cat, dog, ...', 'nothing')
    """
    return between.join([*words[:most], *["..."] * (len(words) > most)]) or "nothing"


def clip(text: str, most: int) -> str:
    """Truncate a text to `most` characters and append its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def printable(text: str) -> str:
    r"""Escape control and unprintable characters, except line breaks.

    >>> print(printable("\x1b[31mred\n\u202egnp"))
    \x1b[31mred
    \u202egnp
    """
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def nearest(
    name: str, known: Iterable[str], *, otherwise: str, most: int = 3, cutoff: float = 0.6
) -> str:
    """Return a "did you mean" question with the closest known names, or `otherwise` if none is.

    `cutoff` is the minimum similarity, from 0 to 1, of a close name.
    """
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), n=most, cutoff=cutoff)
    return f"did you mean {', '.join(map(repr, close))}?" if close else otherwise


class LargebatchError(Exception):
    """Base class of errors that a user can fix; the message says what to change."""


class RecipeError(LargebatchError):
    """A recipe or an override of one is invalid."""


class StudyError(LargebatchError):
    """A study cannot run, or the database holds a different study."""


class PlanError(LargebatchError):
    """A recipe cannot be divided over this number of workers and device batch."""


class DataError(LargebatchError):
    """A data folder is missing, incomplete, unreadable or not what the recipe describes."""


class CheckpointError(LargebatchError):
    """A checkpoint or run folder cannot be read, or belongs to another recipe."""


class LogError(CheckpointError):
    """The log of a run cannot be written; records are missing from here on."""


class BackendError(LargebatchError):
    """The workers cannot be connected as requested."""


class MismatchError(BackendError):
    """The workers were started with different commands, recipes, packages or device types."""


class AuditError(LargebatchError):
    """The audit found faults in the training that it was given."""


class DesynchronizedError(LargebatchError):
    """The workers' weights are not bit-identical, as they must be."""


class WrongCardError(LargebatchError):
    """A worker computes other numbers than the others do from the same weights and samples."""


class DivergedError(LargebatchError):
    """The training loss is not a finite number."""


class DeviceMemoryError(LargebatchError):
    """A device batch does not fit the memory of an accelerator."""


class SmallerBatchError(DeviceMemoryError):
    """A device batch did not fit; the run continues from its folder, which holds a smaller one."""

    alone = False
    """True if no other worker is lost, so that this process can continue."""


class UnusedParametersError(LargebatchError, ValueError):
    """A model has parameters that its loss does not depend on."""


class MissingPackageError(LargebatchError):
    """An optional package is required but not installed."""

    def __init__(self, package: str, *, purpose: str, install: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed; install it with: {install}"
        )


class PeerLostError(Exception):
    """Another worker exited during a collective operation; its traceback shows the cause."""


class RequestedStopError(LargebatchError):
    """Workers were requested to stop, and had nothing to save."""


class WorkerFailedError(Exception):
    """A local worker failed; the message is that worker's traceback."""
