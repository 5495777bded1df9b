"""Disturb runs at random until they end, and measure what is lost.

    python -m benchmarks.studies.soak.soak [--faults 200] [--seed 0] [--only serial torch horovod]

A run of 40 updates on the digits, polished at its end, on 1 to 4 workers, is started by one command
with `--resume auto`, again and again, until it has finished. Meanwhile faults come at random times:

    kill      SIGKILL of any one of its processes
    suspend   SIGSTOP of any one of them for two seconds
    signal    SIGTERM, SIGINT, SIGUSR1 or SIGHUP to the first process or to all of them
    no room   no file can grow any more (a limit on the size of files)
    tracker   Weights & Biases is asked for, with a key, and cannot be reached
    damage    one bit of the newest checkpoint is flipped, or its end is missing
    vanished  the newest checkpoint is gone

At the end weights, statistics and every record of an update must be those of a run with as many
workers that nothing disturbed, bit by bit. The result holds the faults by kind, the updates that
were computed again, and the effective training time ratio (arXiv:2410.21680): the time of the
updates that counted over all the time. A start takes seconds here and an update a twentieth of
one, so that ratio is far below that of a real run; what it is good for is comparison.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speed.measuring import circumstances, today, write
from largebatch.cli.main import main as largebatch_main
from largebatch.report.style import COLOURS, INK, MUTED, save_png
from largebatch.runs.run import run
from largebatch.training.checkpoint import load_checkpoint

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart" / "digits_96.yaml"
CHANGES = (
    *("model={name: cifar_resnet8}", "data.image_size=16", "duration={steps: 40}"),
    *(
        "schedule.warmup={steps: 5}",
        "evaluation.every_epochs=1",
        *("execution.checkpoints.every_steps=4", "execution.cache=memory"),
    ),
    "polish={clean: {steps: 5}, ema: 0.5, statistics: {samples: 480}}",
)
LATER = ("kill", "suspend", "signal", "no room")
"""Faults that occur during a run."""

BETWEEN = ("damage", "vanished")
"""Faults that occur while no process runs."""

KINDS = (*LATER, "tracker", *BETWEEN)

CHECKPOINT = "step-*.safetensors"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
HANG_SECONDS = 300
LEAVE_SECONDS = 20
"""Seconds that processes have to exit after the first one has."""


class Setting(NamedTuple):
    """Command that starts a run."""

    backend: str
    workers: int


SETTINGS = (
    *[Setting("serial", 1)] * 5,
    *[Setting("torch", workers) for workers in (2, 3, 4)],
    Setting("horovod", 2),
)


@dataclass
class Round:
    """One run from its first start to its end."""

    setting: Setting
    faults: list[tuple[str, float]] = field(default_factory=list)
    """Faults, each with the seconds since the run started."""

    attempts: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, end and exit code of each process."""

    recomputed: int = 0
    productive_seconds: float = 0.0
    orphans: int = 0
    problem: str | None = None


def main() -> None:
    """Disturb runs until enough faults have happened; write the result and its figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=["serial", "torch", "horovod"])
    parser.add_argument("--out", type=Path, help="write the result to this file alone")
    args = parser.parse_args()
    assert callable(run)  # and so all of PyTorch is loaded before the first fork
    torch.set_num_threads(1)  # whose threads a fork would miss
    settings = [setting for setting in SETTINGS if setting.backend in args.only]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        rounds = soak(settings, args.faults, random.Random(args.seed), Path(name))
    result = summarize(rounds)
    if args.out is not None:
        args.out.write_text(json.dumps({**circumstances("soak"), **result}), encoding="utf-8")
    else:
        path = write("soak", result)
        save_png(
            path.with_suffix(".png"),
            lambda figure: draw(figure, result),
            size=(640, 60 + 11 * len(rounds)),
            pixels=1600,
        )
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=2))
    sys.exit(any(each.problem for each in rounds))


def soak(
    settings: list[Setting], num_faults: int, draw_from: random.Random, folder: Path
) -> list[Round]:
    """Disturb one run after another."""
    expected = {}
    for setting in dict.fromkeys(settings):
        own = folder / f"{setting.backend}-{setting.workers}"
        run_start = time.monotonic()
        code = start(own, setting, tracker=False).wait(HANG_SECONDS)
        assert code == 0, f"the undisturbed run on {setting} ended with {code}"
        expected[setting] = (own, time.monotonic() - run_start)
    rounds: list[Round] = []
    done = 0
    while done < num_faults:
        setting = draw_from.choice(settings)
        most = min(num_faults - done, 12)
        kinds = draw_from.choices(KINDS, k=most)
        out = folder / f"round-{len(rounds)}"
        rounds.append(disturb(out, setting, kinds, draw_from, seconds=expected[setting][1]))
        rounds[-1].problem = rounds[-1].problem or difference(out, expected[setting][0])
        rounds[-1].recomputed, rounds[-1].productive_seconds = cost(out)
        done += len(rounds[-1].faults)
        shutil.rmtree(out)
        print(f"{done} of {num_faults} faults: {rounds[-1]}", flush=True)
    return rounds


def disturb(
    out: Path, setting: Setting, kinds: list[str], draw_from: random.Random, *, seconds: float
) -> Round:
    """Restart a run, with faults each time, until it has finished."""
    found = Round(setting)
    run_start = time.monotonic()
    left = list(kinds)
    while len(found.attempts) < 3 * len(kinds) + 3:
        started = time.monotonic()
        process = disturb_once(out, found, left, draw_from, run_start=run_start, seconds=seconds)
        try:
            code = process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            found.problem = f"hung after {found.faults[-1:]}"
            code = -signal.SIGKILL
        found.orphans += end_session(process.pid, hung=found.problem is not None)
        found.attempts.append((started - run_start, time.monotonic() - run_start, code))
        if code == 0 or found.problem:
            return found
    found.problem = "never finished"
    return found


def disturb_once(
    out: Path,
    found: Round,
    left: list[str],
    draw_from: random.Random,
    *,
    run_start: float,
    seconds: float,
) -> "Process":
    """Apply faults that need a stopped run, start the run, and apply the others."""
    kind = take(left, BETWEEN)
    if kind and spoil(out, kind, draw_from):
        found.faults.append((kind, time.monotonic() - run_start))
    tracker = take(left, ("tracker",))
    process = start(out, found.setting, tracker=tracker is not None)
    if tracker:  # it is there from the start
        found.faults.append((tracker, time.monotonic() - run_start))
    while kind := take(left, LATER):
        delay = draw_from.uniform(0.1, 0.7) * seconds
        if not inject_later(kind, process, draw_from, delay=delay):
            break
        found.faults.append((kind, time.monotonic() - run_start))
    return process


def take(left: list[str], kinds: Sequence[str]) -> str | None:
    """Remove the first of these kinds from what is left and return it; None if there is none."""
    kind = next((each for each in left if each in kinds), None)
    if kind is not None:
        left.remove(kind)
    return kind


class Forked:
    """A run in a fork of this process, which starts immediately because everything is loaded."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                nowhere = os.open(os.devnull, os.O_RDWR)
                for stream in range(3):
                    os.dup2(nowhere, stream)
                os.environ.update(environment)
                code = largebatch_main(words)
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, minus a signal's number, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code; raise TimeoutExpired if it runs for longer."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked run", timeout)
            time.sleep(0.02)
        return code


Process = Forked | subprocess.Popen[bytes]


def start(out: Path, setting: Setting, *, tracker: bool) -> Process:
    """Start the command of a run in its own session."""
    words = [*("--workers", str(setting.workers)), *("--timeout", "60")]
    if setting.workers > 1:
        words += ["--backend", setting.backend]
    changes = [*CHANGES, *["tracking=[wandb]"] * tracker]
    sets = [word for change in changes for word in ("--set", change)]
    words = ["train", str(RECIPE), *sets, *words, *("--out", str(out), "--resume", "auto")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if tracker:
        environment |= {
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": "http://127.0.0.1:9",
            "WANDB_INIT_TIMEOUT": "5",
        }
    if setting.workers == 1:
        return Forked(words, environment)
    return subprocess.Popen(
        [sys.executable, "-m", "largebatch", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
        start_new_session=True,
    )


def members(session: int) -> list[int]:
    """Return the processes of a session that are still running."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append(int(path.parent.name))
    return sorted(found)


def inject_later(kind: str, process: Process, draw_from: random.Random, *, delay: float) -> bool:
    """Apply a fault to a run after some time, unless it has ended; return True if applied."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    return process.poll() is None and inject(kind, process.pid, draw_from)


def inject(kind: str, session: int, draw_from: random.Random) -> bool:
    """Apply a fault to a run; return False if it has no target."""
    processes = members(session)
    if not processes:
        return False
    victim = draw_from.choice(processes)
    number = draw_from.choice(SIGNALS)
    everyone = draw_from.random() < 0.5
    with suppress(ProcessLookupError):
        match kind:
            case "kill":
                os.kill(victim, signal.SIGKILL)
            case "suspend":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(2)
                os.kill(victim, signal.SIGCONT)
            case "signal":
                os.killpg(session, number) if everyone else os.kill(session, number)
            case "no room":
                for process in processes:
                    with suppress(ProcessLookupError):
                        resource.prlimit(process, resource.RLIMIT_FSIZE, (20_000, 20_000))
    return True


def spoil(out: Path, kind: str, draw_from: random.Random) -> bool:
    """Damage or remove the newest checkpoint; return False if there is none."""
    newest = max((out / "checkpoints").glob(CHECKPOINT), default=None)
    if newest is None:
        return False
    if kind == "vanished":
        newest.unlink()
        return True
    content = bytearray(newest.read_bytes())
    if draw_from.random() < 0.5:
        content[draw_from.randrange(len(content))] ^= 1 << draw_from.randrange(8)
    else:
        del content[draw_from.randrange(len(content)) :]
    newest.write_bytes(content)
    return True


def end_session(session: int, *, hung: bool) -> int:
    """Wait until all processes of a run have exited; kill and count the others."""
    deadline = time.monotonic() + (0 if hung else LEAVE_SECONDS)
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = members(session)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return 0 if hung else len(left)


def difference(ours: Path, expected: Path) -> str | None:
    """Describe the difference from the undisturbed run; None if there is none."""
    states = [
        load_checkpoint(max((f / "checkpoints").glob(CHECKPOINT))).state for f in (ours, expected)
    ]
    for name, tensor in states[1]["model"].items():
        if not torch.equal(states[0]["model"][name], tensor):
            return f"{name} differs"
    if updates(ours)[0] != updates(expected)[0]:
        return "the record of the updates differs"
    summaries = [json.loads((f / "summary.json").read_text()) for f in (ours, expected)]
    for key in ("status", "steps", "samples", "top1", "top5", "loss"):
        if summaries[0][key] != summaries[1][key]:
            return f"summary.json: {key} differs"
    return None


def updates(out: Path) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """Return the loss of each update by its step, and all records of updates."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    return {record["step"]: record["loss"] for record in steps}, steps


def cost(out: Path) -> tuple[int, float]:
    """Return the number of repeated updates, and the seconds of those that counted."""
    losses, steps = updates(out)
    seconds = {record["step"]: record["step_seconds"] for record in steps}
    return len(steps) - len(losses), sum(seconds.values())


def summarize(rounds: list[Round]) -> dict[str, Any]:
    """Return the result as numbers."""
    total = sum(each.attempts[-1][1] for each in rounds)
    return {
        "date": today(),
        "faults": sum(len(each.faults) for each in rounds),
        "by_kind": dict(Counter(kind for each in rounds for kind, _ in each.faults)),
        "runs": len(rounds),
        "starts": sum(len(each.attempts) for each in rounds),
        "exit_codes": dict(Counter(str(code) for each in rounds for *_, code in each.attempts)),
        "lost": [each.problem for each in rounds if each.problem],
        "orphans": sum(each.orphans for each in rounds),
        "updates_computed_again": sum(each.recomputed for each in rounds),
        "effective_training_time_ratio": sum(r.productive_seconds for r in rounds) / total,
        "seconds": total,
        "rounds": [asdict(each) for each in rounds],
    }


def draw(figure: Any, result: dict[str, Any]) -> None:  # noqa: ANN401 -- matplotlib's
    """Draw every run as a line of its starts, with its faults."""
    axes = figure.subplots()
    colours = dict(zip(KINDS, [*COLOURS.values(), "#7b4ab5", INK], strict=True))
    for row, each in enumerate(result["rounds"]):
        for begin, end, code in each["attempts"]:
            depth = 0.2 if code else 0.45
            axes.barh(row, end - begin, left=begin, height=0.5, color=MUTED, alpha=depth)
        for kind, at in each["faults"]:
            axes.plot(at, row, "o", color=colours[kind], markersize=3.5)
    for kind, number in result["by_kind"].items():
        axes.plot([], [], "o", color=colours[kind], markersize=3.5, label=f"{kind}: {number}")
    axes.set_yticks(
        range(len(result["rounds"])),
        [f"{each['setting'][0]} x {each['setting'][1]}" for each in result["rounds"]],
        fontsize=6,
    )
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel("seconds since the start of the run; dark: the start that finished", fontsize=8)
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1.0), fontsize=7, frameon=False)
    axes.set_title(
        f"{result['faults']} faults in {result['runs']} runs, {len(result['lost'])} lost; "
        f"effective training time ratio {result['effective_training_time_ratio']:.2f}",
        loc="left",
        pad=34,
        fontsize=9,
        color=INK,
    )


if __name__ == "__main__":
    main()
