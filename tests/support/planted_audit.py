"""Audit loops with planted faults, and correct ones, on two Gloo workers.

Each loop has a process group of its own, which it finds open.
"""

import contextlib
import gc
import io
import os
import random
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from planted_parts import Loop
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.rendezvous import rendezvous

from largebatch.audit import Finding, Findings


def findings_of(loops: Sequence[Loop]) -> dict[str, Findings | str]:
    """Return what the audit found in each loop, or a traceback, by the name of the loop."""
    return on_forked_workers(run_all, loops, workers=2)


def not_known(findings: Findings) -> list[Finding]:
    """Return the checks that could not be made, without those for which an argument is missing."""
    return [it for it in findings if it.level == "unknown" and not it.remedy.startswith("give ")]


def run_all(loops: Sequence[Loop]) -> dict[str, Findings | str]:
    store, rank, world_size = next(iter(rendezvous("env://")))
    environment = dict(os.environ)
    results = {}
    for loop in loops:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(loop.__name__, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        results[loop.__name__] = run_one(loop)
        if dist.is_initialized():
            gc.collect()  # models must not outlive their process group
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
    return results


def run_one(loop: Loop) -> Findings | str:
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
