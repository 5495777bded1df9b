"""Run training scripts with planted faults, and correct ones, on two Gloo workers.

A script is a file in tests/audit/faults or correct with a function `script(audit)` that
returns what `audit` returned. Names of files are unique in all of tests/. Each script has a process
group of its own, which it finds open; it seeds its own generators. In faults/ it also has:

- ISSUE, a link to an issue in which somebody reports the fault, or the words of a document;
- EXPECTED, the check that must find it, and FIGURE, the number expected, to 5 % or TOLERANCE;
- LEVEL, if the level expected is not `fault`;
- ALSO, checks that must fail too, because the fault causes what they check.
"""

import contextlib
import gc
import importlib.util
import io
import os
import random
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.rendezvous import rendezvous

from largebatch.audit import Findings

FOLDER = Path(__file__).parents[1] / "audit"


def names_in(folder: str) -> list[str]:
    """Return the names of the scripts in faults or correct."""
    return sorted(path.stem for path in (FOLDER / folder).glob("*.py"))


def load(folder: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data workers find its classes by this name
    spec.loader.exec_module(module)
    return module


def findings_of(folder: str, names: Sequence[str] = ()) -> dict[str, Findings | str]:
    """Return what the audit found in each script, or in these, or a traceback."""
    return on_forked_workers(run_all, folder, names or names_in(folder), workers=2)


def run_all(folder: str, names: Sequence[str]) -> dict[str, Findings | str]:
    store, rank, world_size = next(iter(rendezvous("env://")))
    environment = dict(os.environ)
    results = {}
    for name in names:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        results[name] = run_one(folder, name)
        if dist.is_initialized():
            gc.collect()  # models must not outlive their process group
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
    return results


def run_one(folder: str, name: str) -> Findings | str:
    from largebatch.audit import audit

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            findings: Findings = load(folder, name).script(audit)
        prints = not dist.is_initialized() or dist.get_rank() == 0
        assert (findings.table() in printed.getvalue()) == prints, printed.getvalue()
        if dist.is_initialized():
            everyone: list[Findings] = [findings] * dist.get_world_size()
            dist.all_gather_object(everyone, findings)
            assert all(other == findings for other in everyone), everyone
    except Exception:
        return traceback.format_exc()
    return findings
