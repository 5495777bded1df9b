"""The command `launch`: print the script or manifest that starts a run on a cluster. It prints.

The templates are the files of launch/, each of which also runs by itself; their settings stand
on lines of their own. The plan is made first, so that a batch which cannot be divided is never
submitted.
"""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Literal

from largebatch.errors import PlanError, RecipeError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.runs.options import Count, Overrides, RecipeFile

Kind = Literal[
    "slurm", "slurm-horovod", "pbs", "mpijob", "pytorchjob", "indexedjob", "torchrun",
    "horovodrun", "mpirun",
]  # fmt: skip

KINDS: dict[str, str] = {
    "slurm": "slurm.sh",
    "slurm-horovod": "slurm_horovod.sh",
    "pbs": "pbs.sh",
    "mpijob": "mpijob.yaml",
    "pytorchjob": "pytorchjob.yaml",
    "indexedjob": "indexedjob.yaml",
    "torchrun": "torchrun.sh",
    "horovodrun": "horovodrun.sh",
    "mpirun": "mpirun.sh",
}
"""Templates in launch/, by kind of job."""

BY_TORCH = ("slurm", "pytorchjob", "indexedjob", "torchrun")
"""Kinds of jobs whose workers torch.distributed connects; Horovod connects the others."""


def launch(
    kind: Kind,
    recipe: RecipeFile,
    /,
    *,
    nodes: Count,
    gpus_per_node: Count = 8,
    data: Path | None = None,
    overrides: Overrides = (),
) -> None:
    """Print the job that trains a recipe on a cluster.

    Args:
        kind: Kind of job.
        nodes: Number of hosts.
        gpus_per_node: Workers of each host.
        data: Passed on to `train`.
    """
    loaded = load_recipe(recipe, overrides)
    if kind not in BY_TORCH:
        use = f"launch {', '.join(BY_TORCH[:-1])} or {BY_TORCH[-1]}"
        try:
            loaded.require_backend("horovod", use=use)
        except RecipeError as error:
            raise RecipeError(f"launch {kind}: {error}") from None
    try:
        make_plan(loaded, workers=nodes * gpus_per_node, backend="torch")
    except PlanError as error:
        raise PlanError(f"--nodes {nodes} with {gpus_per_node} GPUs each: {error}") from None
    if data is None and loaded.data.source == "folder":
        print(
            "largebatch: the job has no --data DIR, and this recipe reads its data from a folder",
            file=sys.stderr,
        )
    options = ["--resume", "auto"]
    options += [word for override in overrides for word in ("--set", override)]
    if data is not None:
        options += ["--data", str(data)]
    template = files("largebatch") / "launch" / KINDS[kind]
    fill = fill_manifest if template.name.endswith(".yaml") else fill_script
    job = fill(
        template.read_text(encoding="utf-8"),
        name=loaded.name,
        recipe=str(recipe),
        options=options,
        nodes=nodes,
        gpus=gpus_per_node,
    )
    sys.stdout.write(job)


def fill_script(
    text: str, *, name: str, recipe: str, options: Sequence[str], nodes: int, gpus: int
) -> str:
    """Return a script with its settings filled in; each key is the start of a line."""
    settings = {
        "RECIPE=": f"${{RECIPE:-{shlex.quote(recipe)}}}",
        "OUT=": f"${{OUT:-runs/{name}}}",
        "OPTIONS=": f"({shlex.join(options)})",
        "WORKERS=": f"${{WORKERS:-{nodes * gpus}}}",
        "NODES=": f"${{NODES:-{nodes}}}",
        "GPUS=": f"${{GPUS:-{gpus}}}",
        "#SBATCH --job-name=": name,
        "#SBATCH --nodes=": str(nodes),
        "#SBATCH --gpus-per-node=": str(gpus),
        "#SBATCH --ntasks-per-node=": str(gpus),
        "#PBS -N ": name,
        "#PBS -l select=": f"{nodes}:ncpus={8 * gpus}:ngpus={gpus}:mpiprocs={gpus}",
    }
    starts = "|".join(map(re.escape, settings))
    return re.sub(
        rf"^({starts}).*$", lambda line: line[1] + settings[line[1]], text, flags=re.MULTILINE
    )


def fill_manifest(
    text: str, *, name: str, recipe: str, options: Sequence[str], nodes: int, gpus: int
) -> str:
    """Return a Kubernetes manifest with its variables filled in; runs are mounted at /runs."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")
    return Template(text).substitute(
        NAME=label,
        RECIPE=_quoted(recipe),
        OUT=_quoted(f"/runs/{name}"),
        OPTIONS=", ".join(map(_quoted, options)),
        NODES=nodes,
        GPUS=gpus,
        WORKERS=nodes * gpus,
        IMAGE="largebatch",
    )


def _quoted(word: str) -> str:
    """Quote a word for YAML, and double each $, because Kubernetes expands variables.

    >>> _quoted("$(HOME)/a$$b")
    '"$$(HOME)/a$$$$b"'
    """
    return json.dumps(word.replace("$", "$$"), ensure_ascii=False)
