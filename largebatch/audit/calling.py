"""What the script that calls an audit does elsewhere, as its source says."""

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, ModuleType

_SETS_EPOCH = re.compile(r"_?set_(\w+_)?epoch")


def may_set_epoch() -> bool:
    """Return True if the calling script names `set_epoch`, or if its source cannot be read.

    Searched are the calling module, those on the call stack, such as a framework's loop, and those
    that the calling module imports from, without installed packages.
    """
    frames = [it for it in _stack() if not _is_own(it.f_globals.get("__name__"))]
    files = [it.f_code.co_filename for it in frames]
    if not files or not linecache.getlines(files[0]):
        return True
    return any(map(_names_it, {*files, *_imported(frames[0].f_globals.values())}))


def _stack() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _imported(values: Iterable[object]) -> Iterator[str]:
    """Yield the files that a module's global objects are from, without installed packages."""
    for value in values:
        own = value.__name__ if isinstance(value, ModuleType) else ""
        name = own or getattr(value, "__module__", "")
        file = getattr(sys.modules.get(str(name)), "__file__", None)
        if file and "-packages" not in file and not _is_own(name):
            yield file


def _is_own(name: object) -> bool:
    return str(name).split(".")[0] == "largebatch"


def _names_it(file: str) -> bool:
    """Return True if code, not only its comments, names a function that sets the epoch."""
    source = "".join(linecache.getlines(file))
    if not _SETS_EPOCH.search(source):
        return False
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a notebook's cell
        return True
    names = [getattr(node, key, None) for node in nodes for key in ("attr", "id", "value")]
    return any(isinstance(name, str) and _SETS_EPOCH.fullmatch(name) for name in names)
