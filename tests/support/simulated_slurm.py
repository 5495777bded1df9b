"""A stand-in for Slurm on one machine: sbatch, srun and scontrol, with the variables that they set.

`python simulated_slurm.py sbatch JOB` runs a job with its directives; nodes are processes of this
machine. The names of variables and options are those of the man pages of Slurm 23.02, the
options --container-* those of pyxis. An option that is not known is refused, as Slurm does.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "scontrol")
REQUEUED = "requeued"
"""File in the folder of the job's output: scontrol was asked to start it again."""


def install(folder: Path) -> None:
    """Write the programs into a folder for PATH."""
    folder.mkdir(exist_ok=True)
    for name in PROGRAMS:
        command = shlex.join([sys.executable, str(Path(__file__).absolute()), name])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)


def sbatch(words: list[str]) -> int:
    """Run a job, and again as often as it is requeued; return its exit code."""
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    for option in ("job-name", "partition", "account", "mem", "time", "signal", "output"):
        parser.add_argument(f"--{option}", required=option in {"job-name", "time"})
    for option in ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node"):
        parser.add_argument(f"--{option}", type=int, default=1)
    for flag in ("exclusive", "requeue"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--open-mode", choices=["append", "truncate"])
    job, *arguments = words
    lines = Path(job).read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    before = lines[: lines.index(commands[0])]  # sbatch reads no directive after a command
    given = parser.parse_args([line[8:] for line in before if line.startswith("#SBATCH ")])
    tasks = given.nodes * given.ntasks_per_node
    hosts = ",".join(["localhost", *(f"node{number}" for number in range(1, given.nodes))])
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": given.job_name,
        "SLURM_JOB_NUM_NODES": str(given.nodes),
        "SLURM_NNODES": str(given.nodes),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(given.ntasks_per_node),
        "SLURM_TASKS_PER_NODE": _per_node(given.nodes, given.ntasks_per_node),
        "SLURM_CPUS_PER_TASK": str(given.cpus_per_task),
        "SLURM_GPUS_ON_NODE": str(given.gpus_per_node),
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0"),
    }
    output = (given.output or "slurm-%j.txt").replace("%x", given.job_name)
    output = output.replace("%j", variables["SLURM_JOB_ID"])
    for starts in range(3):
        own = variables | ({"SLURM_RESTART_COUNT": str(starts)} if starts else {})
        with Path(output).open("a") as file:
            batch = subprocess.Popen(
                ["bash", job, *arguments], env=os.environ | own, stdout=file, stderr=file
            )
            signal.signal(signal.SIGTERM, partial(_forward, [batch]))
            code = batch.wait()
        if not (given.requeue and Path(REQUEUED).exists()):
            break
        Path(REQUEUED).unlink()
    return code


def srun(words: list[str]) -> int:
    """Start a task for each of SLURM_NTASKS; return the largest exit code."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    for option in ("mpi", "kill-on-bad-exit", "cpus-per-task"):
        parser.add_argument(f"--{option}")
    for option in ("image", "mounts", "workdir"):
        parser.add_argument(f"--container-{option}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    command = parser.parse_args(words).command
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        own = {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": os.environ["SLURM_NTASKS"],
            "SLURM_STEP_NUM_NODES": os.environ["SLURM_NNODES"],
            "SLURM_STEP_NODELIST": os.environ["SLURM_NODELIST"],
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
            "SLURM_NODEID": str(rank // per_node),
        }
        tasks.append(subprocess.Popen(command, env=os.environ | own))
    signal.signal(signal.SIGUSR1, partial(_forward, tasks))
    return max(task.wait() for task in tasks)


def scontrol(words: list[str]) -> int:
    """Print the hosts of the job, one a line, or note that it is to be started again."""
    match words:
        case ["show", "hostnames"]:
            print(*os.environ["SLURM_NODELIST"].split(","), sep="\n")
        case ["requeue", job] if job == os.environ["SLURM_JOB_ID"]:
            Path(REQUEUED).touch()
        case _:
            sys.exit(f"scontrol: invalid: {words}")
    return 0


def _forward(processes: list[subprocess.Popen[bytes]], number: int, _: object) -> None:
    for process in processes:
        process.send_signal(number)


def _per_node(nodes: int, tasks: int) -> str:
    return f"{tasks}(x{nodes})" if nodes > 1 else str(tasks)


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
