"""Another value of an attribute within a block, where code of others is observed or changed."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object, class or module this value within the block."""
    # From the owner's own dictionary: getattr would bind a method, and find one of a base class.
    own = vars(owner)
    has_own = name in own
    before = own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
