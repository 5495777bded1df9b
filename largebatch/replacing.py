"""Other attributes or items within a block, where code of others is observed or changed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object, class or module this value within the block."""
    # From the owner's own dictionary: getattr would bind a method, and find one of a base class.
    attributes = vars(owner)
    is_its_own = name in attributes
    before = attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_its_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def replaced_items(container: dict[Any, Any], items: Mapping[Any, Any]) -> Iterator[None]:
    """Give a dict other items within the block; it keeps its identity, to which others refer."""
    before = dict(container)
    container.clear()
    container.update(items)
    try:
        yield
    finally:
        container.clear()
        container.update(before)
