"""The Horovod backend in two real processes on this machine."""

import os
import random
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest
import torch
from on_workers import on_workers

import largebatch
from largebatch.distributed.connection import connect

pytest.importorskip(
    "horovod.torch", reason="horovod is not installed; run launch/install_horovod.sh"
)


def horovodrun(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in two workers; warnings are errors there too."""
    path = folder / "script.py"
    path.write_text("from largebatch.distributed.horovod import open_horovod\n")
    with path.open("a") as file:
        file.write(textwrap.dedent(script))
    launcher = Path(sysconfig.get_path("scripts"), "horovodrun")
    here = str(Path(largebatch.__file__).parents[1])
    return subprocess.run(
        [launcher, "-np", "2", "--gloo", sys.executable, "-W", "error", str(path)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.long
def test_two_real_workers_agree(tmp_path: Path) -> None:
    done = horovodrun(
        """
        import torch

        backend = open_horovod()
        rank = backend.rank
        assert (backend.world_size, backend.local_size, backend.local_rank) == (2, 2, rank)

        for _ in range(3):
            for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                summed = torch.tensor([1, 2 + rank], dtype=dtype)
                backend.all_reduce(summed).wait()
                assert summed.dtype == dtype and summed.tolist() == [2, 5], summed

                received = torch.tensor([rank, 3 + rank], dtype=dtype)
                backend.broadcast(received)
                assert received.tolist() == [0, 3], received

                gathered = backend.all_gather(torch.tensor([rank, 9], dtype=dtype))
                assert gathered.dtype == dtype and gathered.tolist() == [[0, 9], [1, 9]], gathered

            large = torch.tensor([2**53 + rank], dtype=torch.int64)
            backend.all_reduce(large).wait()
            assert large.item() == 2**54 + 1, large

            scalar = torch.tensor(rank)
            backend.broadcast(scalar)
            assert scalar.item() == 0
            assert backend.all_gather(torch.tensor(rank)).tolist() == [0, 1]
            assert backend.all_gather(torch.tensor(rank > 0)).tolist() == [False, True]

            tensors = [torch.full((1000,), float(number + rank)) for number in range(8)]
            works = [backend.all_reduce(tensor) for tensor in tensors]
            for work in works:
                work.wait()
            assert [t.unique().item() for t in tensors] == [2 * n + 1 for n in range(8)]
            backend.barrier()

        backend.close()
        backend.close()
        print("agreed", rank)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split()[-1] for line in done.stdout.splitlines() if "agreed" in line) == [
        "0",
        "1",
    ]


def sum_again_and_again() -> int:
    """Sum the same gradients many times, at other moments each; return how many results differ."""
    backend = connect("horovod")
    gradients = torch.randn(12, 1001, generator=torch.Generator().manual_seed(backend.rank))
    results = set()
    for _ in range(40):
        sums = [gradient.clone() for gradient in gradients]
        works = []
        for each in sums:
            time.sleep(random.random() * 2e-3)
            works.append(backend.all_reduce(each))
        for work in works:
            work.wait()
        results.add(torch.stack(sums).numpy().tobytes())
    backend.close()
    return len(results)


@pytest.mark.long
def test_three_workers_are_reproducible_bit_by_bit() -> None:
    """Horovod's fusion would depend on the time at which gradients are ready."""
    assert on_workers(sum_again_and_again, workers=3, horovod=True) == 1


@pytest.mark.long
def test_a_worker_detects_a_lost_peer(tmp_path: Path) -> None:
    done = horovodrun(
        """
        import os
        import signal
        import torch
        from largebatch.errors import PeerLostError

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # horovodrun ends it, and would be faster
        backend = open_horovod()
        backend.barrier()
        if backend.rank == 1:
            os._exit(3)
        else:
            try:
                while True:
                    backend.all_reduce(torch.ones(2)).wait()
            except PeerLostError as error:
                print("told:", error)
        """,
        tmp_path,
    )
    assert "told: worker 0 " in done.stdout, done.stderr
    assert done.returncode == 1, done.stderr
