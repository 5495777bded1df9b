"""What a user can cause, and therefore fix.

The command line prints these as one message without a traceback and exits with code 2. Everything
else is our mistake or the machine's and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence

SHOWN = 10
"""How many names or lines a message lists."""

LONGEST_NAME = 100
"""How much of a name or value that was found stands in a message, in characters."""


def shorten(words: Sequence[str], *, most: int = SHOWN, between: str = ", ") -> str:
    """Return the first few words of a list that may be long, for a message.

    >>> shorten(["cat", "dog", "yak"], most=2)
    'cat, dog, ...'
    >>> shorten([])
    'nothing'
    """
    return between.join([*words[:most], *["..."] * (len(words) > most)]) or "nothing"


def clip(text: str, most: int) -> str:
    """Return a text, or so much of it with its length: what was found may be of any size.

    >>> clip("conv" * 5_000, 16)
    'convconvconvconv... (20,000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    r"""Escape what a terminal obeys or cannot show; lines stay lines.

    >>> print(printable("\x1b[31mred\n\u202egnp"))
    \x1b[31mred
    \u202egnp
    """
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def nearest(
    name: str, known: Iterable[str], *, otherwise: str, most: int = 3, cutoff: float = 0.6
) -> str:
    """Return the question which known names may have been meant, `otherwise` if none is near.

    `cutoff` is the least similarity, from 0 to 1, of a name that is near.

    >>> nearest("momentun", ["eta", "momentum"], otherwise="`largebatch explain` lists them")
    "did you mean 'momentum'?"
    """
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), n=most, cutoff=cutoff)
    return f"did you mean {', '.join(map(repr, close))}?" if close else otherwise


class LargebatchError(Exception):
    """Base of every error whose message tells the user what to change."""


class RecipeError(LargebatchError):
    """A recipe, or an override of one, says something it may not say."""


class StudyError(LargebatchError):
    """A study cannot be carried out, or the database of studies holds another one."""


class PlanError(LargebatchError):
    """A recipe cannot be divided over this many workers and this device batch."""


class DataError(LargebatchError):
    """A data folder is missing, incomplete, unreadable or not what the recipe describes."""


class CheckpointError(LargebatchError):
    """A checkpoint or run folder cannot be read, or belongs to something else."""


class LogError(CheckpointError):
    """The log of a run cannot be written, so a record is missing from here on."""


class BackendError(LargebatchError):
    """The workers cannot be connected as asked."""


class MismatchError(BackendError):
    """The workers were started with different commands, recipes, packages or types of device."""


class DesynchronizedError(LargebatchError):
    """The workers' weights, which must be the same bits, are not."""


class TrackerError(LargebatchError):
    """A tracker cannot be reached, or not used as it is set up."""


class DivergedError(LargebatchError):
    """The training loss stopped being a number."""


class UnusedParametersError(LargebatchError, ValueError):
    """A model has parameters that its loss does not depend on.

    In a recipe that is the choice of a model, from Python a wrong argument.
    """


class MissingPackageError(LargebatchError):
    """An optional package is needed and not installed.

    >>> print(MissingPackageError("wandb", purpose="tracking", install="pip install wandb"))
    tracking needs wandb, which is not installed; install it with: pip install wandb
    """

    def __init__(self, package: str, *, purpose: str, install: str) -> None:
        super().__init__(
            f"{purpose} needs {package}, which is not installed; install it with: {install}"
        )


class PeerLostError(Exception):
    """Another worker went away in the middle of a collective operation.

    Its own traceback says why; this one is only the echo, so the command line prints one line.
    """


class PeerSilentError(PeerLostError):
    """Another worker is not known to be gone, but did nothing for the whole of --timeout."""


class WorkerFailedError(Exception):
    """A local worker failed; the message holds its traceback, which is shown as it is."""
