"""Audit loops with planted faults, and correct ones, on two Gloo workers.

A loop is a function without arguments in faulty_loops.py or correct_loops.py that returns the
arguments of `audit`. Each has a process group of its own, which it finds open.
"""

import contextlib
import gc
import importlib
import io
import os
import random
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.rendezvous import rendezvous

from largebatch.audit import Findings


def findings_of(module: str, names: Sequence[str]) -> dict[str, Findings | str]:
    """Return what the audit found in loops of a module, or a traceback."""
    return on_forked_workers(run_all, module, names, workers=2)


def run_all(module: str, names: Sequence[str]) -> dict[str, Findings | str]:
    store, rank, world_size = next(iter(rendezvous("env://")))
    environment, loops = dict(os.environ), importlib.import_module(module)
    results = {}
    for name in names:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        results[name] = run_one(getattr(loops, name))
        if dist.is_initialized():
            gc.collect()  # models must not outlive their process group
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
    return results


def run_one(loop: Callable[[], dict[str, Any]]) -> Findings | str:
    from largebatch.audit import audit

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            findings = audit(**loop())
        prints = not dist.is_initialized() or dist.get_rank() == 0
        assert (findings.table() in printed.getvalue()) == prints, printed.getvalue()
        if dist.is_initialized():
            everyone: list[Any] = [findings] * dist.get_world_size()
            dist.all_gather_object(everyone, findings)
            assert all(other == findings for other in everyone), everyone
    except Exception:
        return traceback.format_exc()
    return findings
