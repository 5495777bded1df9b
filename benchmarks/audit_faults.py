"""Run the audit on scripts with planted faults and on correct ones, and write what it finds.

    python benchmarks/audit_faults.py            runs them, writes results and docs/audit-faults.md
    python benchmarks/audit_faults.py --page     writes the page of the newest results again

The scripts are in tests/audit, and run on two Gloo workers.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from measuring import RESULTS, newest, write  # noqa: E402
from planted_audit import findings_of, load  # noqa: E402

from largebatch.audit import Findings  # noqa: E402
from largebatch.audit.findings import Check  # noqa: E402

PAGE = ROOT / "docs" / "audit-faults.md"

HEAD = """# What the audit finds

Scripts with one planted fault each run under [the audit](audit.md) on two workers. `{command}`
wrote this page and its [results](../benchmarks/results/{file}): the expected figures follow from
the scripts, the measured ones are the audit's. Where to look first: [Accuracy fell when I scaled
out](accuracy-fell.md).

"""

AT_FIRST_SIGHT = {
    "correct": 31,
    "false alarms": {
        "minimal_correct_no_set_epoch": "epoch order: set_epoch is called in the script's own loop",
        "l2_in_loss": "gradient direction: the squared weights are a term of the loss",
        "aux_only_in_step": "gradient direction: a second head is a term of the loss",
        "sam": "gradient direction: SAM moves the weights between two passes",
        "no_sync_ctx_two_optims": "gradient direction: one of two optimizers was not seen",
        "partial_clip": "gradient scale: clipping by a partial of clip_grad_norm_",
        "own_clip": "gradient scale: clipping by clip_grads_with_norm_",
        "eval_last_bit": "evaluation mean: figures that differ in the last bit",
        "oversampled_subset": "samples: a Subset that repeats some",
    },
    "ended by an error of the audit": 6,
    "not trainable after it": 1,
    "faulty": 4,
    "found": 2,
    "newest": {"faulty": 51, "found": 26, "misnamed": 16, "correct": 32, "false alarms": 1},
}
"""What the audit found in 35 loops of another author before anything was changed for them, and in
the newest ones, of others."""

PUBLISHED = """## Published scripts

Scripts of these projects, on two CPU workers with a small network and small images (`{command}`,
[results](../benchmarks/results/{file})). The second row is a real fault: on a CPU the script starts
a process group and never averages gradients, because it adds DistributedDataParallel on CUDA only.
The notes are right too: evaluation in torchvision's and timm's script counts a padded sample twice
(51 images on two workers), and Accelerate, Transformers and Lightning seed all workers alike.
"""

SINCE = """Since then it was changed for these. Those of the gradient's direction, which cannot be
told from a fault, and that of `set_epoch` are `unknown` now, the others have no false alarm. A
gradient that is doubled in one bias is named because two is the number of workers; another factor
would be `unknown`. A factor of 1.8 % stays below what the audit calls a fault.

A second reader tried 31 correct loops and 16 faulty ones more. Six correct loops had a false alarm
(fused optimizers under a GradScaler, accuracy logged in training mode, a sampler of a part, buffers
that are broadcast, two passes over each sample), three ended with an error of the audit, fifteen
did not go on bit for bit as without it, and six faults were missed or named wrongly. These are
mended, and the tables above have such scripts; of the fifteen nine go on alike now, two are
refused, and four change what is [not restored](audit.md#what-it-leaves-behind).
"""


def main() -> None:
    """Run all scripts and write the results and the page, or only the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page of the newest results")
    if not parser.parse_args().page:
        faults, correct = (rows_of(folder) for folder in ("faults", "correct"))
        result = {"faults": faults, "correct": correct, "at first sight": AT_FIRST_SIGHT}
        print(write("audit_faults", "python benchmarks/audit_faults.py", result))
    PAGE.write_text(page(), encoding="utf-8")


def rows_of(folder: str) -> dict[str, dict[str, Any]]:
    """Return what the audit finds in each script of a folder."""
    return {name: _row(load(folder, name), it) for name, it in findings_of(folder).items()}


def _row(script: ModuleType, findings: Findings | str) -> dict[str, Any]:
    """Return the expected finding of a script with its figure, and all false alarms."""
    assert isinstance(findings, Findings), findings
    check: Check | None = getattr(script, "EXPECTED", None)
    level = getattr(script, "LEVEL", "fault")
    hits = [it for it in findings.named(check) if it.level == level] if check else []
    caused = {check, *getattr(script, "ALSO", ())}
    return {
        "check": check,
        "level": level if check else None,
        "figure": hits[0].figure if hits else None,
        "false alarms": [it.check for it in findings.faults if it.check not in caused],
        "unknown": [it.check for it in findings if it.level == "unknown"],
    }


def newest_result(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the file name and the content of the newest results of a benchmark."""
    path = newest(name, RESULTS, machine="*")
    return None if path is None else (path.name, json.loads(path.read_text(encoding="utf-8")))


def page() -> str:
    """Return the page of the newest results."""
    found = newest_result("audit_faults")
    assert found is not None, "no results: run python benchmarks/audit_faults.py"
    file, result = found
    first = result["at first sight"]
    faults, correct = _planted(result["faults"], first["newest"]), _correct(result["correct"])
    tables = (faults, correct, _published(), _first_sight(result))
    head = HEAD.format(command=result["command"], file=file)
    return head + "\n".join("\n".join(lines) + "\n" for lines in tables)


def _planted(rows: dict[str, dict[str, Any]], newest: dict[str, int]) -> Iterator[str]:
    found = sum(row["figure"] is not None for row in rows.values())
    alarms = sum(bool(row["false alarms"]) for row in rows.values())
    yield (
        f"{found} of {len(rows)} planted faults are found; in {alarms} of these scripts something "
        "else is called a fault too. The audit was adjusted to them: of new scripts it finds fewer "
        f"[at first sight](#at-first-sight), {newest['found']} of {newest['faulty']} the last time."
    )
    yield ""
    yield "| planted fault, and a report of it | check | level | expected | measured |"
    yield "|---|---|---|---|---|"
    checks = get_args(Check)
    for name in sorted(rows, key=lambda name: checks.index(rows[name]["check"])):
        row, script = rows[name], load("faults", name)
        fault = f"[{_summary(script)}]({script.ISSUE})"
        if not script.ISSUE.startswith("https://"):
            fault = f"{_summary(script)}: {script.ISSUE}"
        figure = "not found" if row["figure"] is None else f"{row['figure']:.4g}"
        yield f"| {fault} | {row['check']} | {row['level']} | {script.FIGURE:.4g} | {figure} |"


def _correct(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| correct script | false alarms |"
    yield "|---|---|"
    for name, row in rows.items():
        alarms = ", ".join(row["false alarms"]) or "0"
        yield f"| {_summary(load('correct', name))} | {alarms} |"


def _published() -> Iterator[str]:
    """Yield the table of the newest audit of published scripts (audit_published.py)."""
    found = newest_result("audit_published")
    assert found is not None, "no results: run python benchmarks/audit_published.py CHECKOUTS"
    file, result = found
    yield PUBLISHED.format(command=result["command"], file=file)
    yield "| published script | faults | notes | changes |"
    yield "|---|---|---|---|"
    for name, row in result["scripts"].items():
        place = f"https://github.com/{row['repository']}/blob/{row['commit']}/{row['path']}"
        cells = [f"[{name}]({place})"]
        for level in ("fault", "note"):
            checks = [it["check"] for it in row["findings"] if it["level"] == level]
            cells.append(", ".join(checks) or "none")
        yield f"| {' | '.join([*cells, row['changes']])} |"


def _first_sight(result: dict[str, Any]) -> Iterator[str]:
    """Yield how often the audit was wrong on loops that it had not been adjusted to."""
    first = result["at first sight"]
    yield "## At first sight"
    yield ""
    yield (
        "The audit was adjusted until it had no false alarm above, so these tables do not say how "
        "often it is wrong on a new script. Another author wrote "
        f"{first['correct'] + first['faulty']} unusual loops. At first sight, "
        f"{len(first['false alarms'])} of {first['correct']} correct ones had a false alarm, "
        f"{first['ended by an error of the audit']} were ended by an error in the audit, "
        f"{first['not trainable after it']} could not train after it, and {first['found']} of "
        f"{first['faulty']} faulty ones were found."
    )
    yield ""
    yield SINCE
    new = first["newest"]
    yield (
        f"Others then wrote {new['faulty']} faulty and {new['correct']} correct loops. At first "
        f"sight {new['found']} of the faulty ones were found with their right name, "
        f"{new['misnamed']} were misnamed or `unknown`, and "
        f"{new['faulty'] - new['found'] - new['misnamed']} had no fault; "
        f"{new['correct'] - new['false alarms']} of the correct ones had no false alarm. The "
        "tables above have them now."
    )
    yield ""
    yield "| correct loop | false alarm at first sight |"
    yield "|---|---|"
    for name, text in first["false alarms"].items():
        check, _, why = text.partition(": ")
        yield f"| {why} (`{name}`) | {check} |"


def _summary(script: ModuleType) -> str:
    assert script.__doc__
    return " ".join(script.__doc__.split("\n\n")[0].split()).rstrip(".")


if __name__ == "__main__":
    main()
