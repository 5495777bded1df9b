"""Python's garbage collector, which would stop every worker at another update."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Run the garbage collector only where gc.collect() is called, over what is made inside.

    What was made before is frozen, so that a call takes milliseconds. Afterwards the collector is
    as it was.
    """
    enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.collect()
    gc.disable()
    if freezes:  # else unfreeze() would free what somebody else froze
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()
