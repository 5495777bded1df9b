"""Watches a run on several workers, and names the worker that a hanging one waits for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from largebatch.distributed.flight_recorder import HangWatch
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.errors import PeerLostError
from largebatch.formatting import ranges
from largebatch.report.hangs import DUMPS, SILENT, hang_line
from largebatch.storage import write_whole
from largebatch.training.session import Session


@contextmanager
def hangs_named(session: Session, folder: Path) -> Iterator[None]:
    """Write dumps of the collectives before a timeout, and add what they show to PeerLostError.

    Horovod has no such recorder, and a process group that other code has opened is left alone.
    """
    backend = session.backend
    if not isinstance(backend, TorchDistributed) or backend.world_size == 1:
        yield
        return

    def describe() -> dict[str, Any]:
        return {
            "update": session.state.progress.step,
            "gradients": session.state.updater.reducer.sent_sizes,
            "groups": {name: ranges(ranks) for name, ranks in backend.members().items()},
        }

    def explain(dumps: Path, silent: dict[int, str]) -> str:
        with suppress(OSError):  # the line matters more
            write_whole(dumps / SILENT, json.dumps(silent).encode())
        return hang_line(dumps)

    watch = HangWatch(
        backend.store,
        folder / DUMPS,
        timeout=backend.seconds_allowed,
        describe=describe,
        explain=explain,
    )
    watch.start()
    try:
        yield
    except PeerLostError as error:
        if line := watch.line():
            raise PeerLostError(f"{line}; {error}") from error
        raise
    finally:
        watch.stop()
