"""What a user can cause, and therefore fix, and what messages about it have in common.

The command line prints these as one message without a traceback and exits with code 2. Everything
else is our mistake or the machine's and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence


class LargebatchError(Exception):
    """Base of every error whose message tells the user what to change."""


class RecipeError(LargebatchError):
    """A recipe, or an override of one, says something it may not say."""


class PlanError(LargebatchError):
    """A recipe cannot be divided over this many workers and this device batch."""


class DataError(LargebatchError):
    """A data folder is missing, incomplete, unreadable or not what the recipe describes."""


class CheckpointError(LargebatchError):
    """A checkpoint or run folder cannot be read, or belongs to something else."""


class BackendError(LargebatchError):
    """The workers cannot be connected as asked."""


class MismatchError(BackendError):
    """The workers were started with different commands, recipes, packages or types of device."""


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


class WorkerFailedError(Exception):
    """A local worker failed; the message holds its traceback, which is shown as it is."""


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return the hint of a message about an unknown name: the nearest known ones, if any is near.

    >>> did_you_mean("resnt18", ["resnet18", "resnet50", "vgg16"], otherwise="see list_models()")
    'did you mean resnet18, resnet50?'
    >>> did_you_mean("alexnet", ["vgg16"], otherwise="see list_models()")
    'see list_models()'
    """
    close = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {', '.join(close)}?" if close else otherwise


def shorten(words: Sequence[str], *, limit: int = 10) -> list[str]:
    """Return at most `limit` items of a list, with the number of those left out before the last.

    >>> ", ".join(shorten(["2", "4", "8", "16", "32"], limit=4))
    '2, 4, ... 2 more ..., 32'
    """
    if len(words) <= limit:
        return list(words)
    left_out = len(words) - (limit - 1)
    return [*words[: limit - 2], f"... {left_out} more ...", words[-1]]
