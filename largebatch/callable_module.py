"""Packages that are functions too.

`largebatch.polish` is a package, so `from largebatch import polish` gives the package, whatever
`largebatch/__init__.py` defines: importing a subpackage binds it in its parent. Such a package gets
the class below: calling it calls the function of the same name inside; its help is the function's.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A package that can be called; `inspect.signature` shows the function's signature."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **words: Any) -> Any:  # noqa: ANN401 -- the function's
        """Call the function of the same name."""
        return self.__wrapped__(*args, **words)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return import_module, (self.__name__,)


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Make a package, named by its `__name__`, callable as a function."""
    module = sys.modules[package]
    module.__class__ = CallableModule
    module.__dict__["__wrapped__"] = function
    module.__doc__ = f"{function.__doc__}\n    {function.__name__}{signature(function)}"
