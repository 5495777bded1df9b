"""Write what the study of servers simulates, held against its starts, and draw it.

    python benchmarks/servers_simulated.py

Nothing is started. What an update takes besides its gradient, and the times that the simulated ones
are held against, are those of the newest starts (studies_on_hosts.py servers jaeger). The figure
has a panel for each model: lines are simulated, points measured, with Student's interval of 95 %.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import RESULTS, newest, write
from studies_on_hosts import as_interval

from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.servers.rows import Row, row_of, slower
from largebatch.lab.studies.servers.simulated import findings, sweeps
from largebatch.lab.studies.servers.study import ALONE, Cell, cells_of, load_study
from largebatch.report.style import COLOURS, INK, MUTED, save_png

if TYPE_CHECKING:
    from largebatch.report.style import Figure

NAME = "servers_simulated"
DASHED = {"central-2": (4, 2), "central-4": (2, 2), "central-4-split": (6, 2, 1, 2)}


def main() -> None:
    """Simulate, write the result and draw it."""
    study, folder = load_study("jaeger"), Path()
    starts = newest("servers", RESULTS)
    if starts is None:
        raise SystemExit("the starts are those of benchmarks/studies_on_hosts.py: write them first")
    started = recorded(starts, cells_of(study, folder))
    simulated = sweeps(study, folder, started)
    by_name = {row.cell.name: row for row in simulated["workers"]}
    measured = [row for row in started if row.cell.name in by_name]  # Horovod is not simulated
    words = [
        *slower(measured, "measured"),
        *slower(simulated["workers"], "simulated"),
        *findings(simulated, measured),
    ]
    print("\n".join(words))
    result = {
        "starts": starts.name,
        "findings": words,
        "held against starts": [
            {
                "cell": row.cell.name,
                "measured seconds": as_interval(row.seconds),
                "simulated seconds": as_interval(by_name[row.cell.name].seconds),
            }
            for row in measured
            if row.cell.workers > 1
        ],
        "simulated": {sweep: [_row(row) for row in rows] for sweep, rows in simulated.items()},
    }
    print(write(NAME, f"python benchmarks/{NAME}.py", result))
    path = RESULTS / f"{NAME}.png"
    save_png(
        path,
        lambda figure: draw(figure, simulated["workers"], measured),
        size=(600, 520),
        pixels=1200,
    )


def recorded(starts: Path, cells: Sequence[Cell]) -> list[Row]:
    """Return the rows of the starts, with their seconds alone."""
    rows = {row["cell"]: row for row in json.loads(starts.read_text(encoding="utf-8"))["rows"]}
    found = {
        name: {
            seed: Found(
                seconds=seconds, sent={}, received={}, shards=[row["model_bytes"]], late=0.0,
                rates=[], device_batch=0,
            )
            for seed, seconds in enumerate(row["seconds"], start=1)
        }
        for name, row in rows.items()
    }  # fmt: skip
    return [
        row_of(cell, found[cell.name], found[f"{cell.configuration}-{ALONE}-1"])
        for cell in cells
        if cell.name in found
    ]


def _row(row: Row) -> dict[str, Any]:
    return {
        "cell": row.cell.name,
        "workers": row.cell.workers,
        "megabits": row.cell.placement.megabits,
        "mini_batch": row.cell.samples,
        "seconds": row.seconds.mean,
        "batches_per_second": as_interval(row.throughput),
        "speed_up": as_interval(row.speed_up),
    }


def draw(figure: "Figure", simulated: Sequence[Row], measured: Sequence[Row]) -> None:
    """Draw the speed-up by workers of each model."""
    recipes = list(dict.fromkeys(row.cell.configuration for row in simulated))
    layouts = list(dict.fromkeys(row.cell.layout for row in simulated if row.cell.layout != ALONE))
    colours = dict(zip(layouts, COLOURS.values(), strict=True))
    panels = figure.subplots(2, 2, sharex=True).flatten()
    for axes, recipe in zip(panels, recipes, strict=True):
        for layout in layouts:
            line = [
                row for row in simulated
                if row.cell.configuration == recipe and row.cell.layout in {layout, ALONE}
                and (row.cell.workers > 1 or layout in {row.cell.layout, "ring"})
            ]  # fmt: skip
            axes.plot(
                [row.cell.workers for row in line],
                [row.speed_up.mean for row in line if row.speed_up],
                label=layout, color=colours[layout], linewidth=1.4,
                dashes=DASHED.get(layout, (None, None)),
            )  # fmt: skip
        for row in measured:
            if row.cell.configuration == recipe and row.cell.workers > 1 and row.speed_up:
                reach = row.speed_up.reach or 0.0
                axes.errorbar(
                    row.cell.workers, row.speed_up.mean, yerr=reach, fmt="o", markersize=4,
                    color=colours[row.cell.layout], elinewidth=1,
                )  # fmt: skip
        axes.axhline(1.0, color=MUTED, linewidth=0.8)
        axes.set_title(recipe, color=INK)
        axes.set_ylim(0, 5)
        axes.set_ylabel("speed-up")
        axes.set_xlabel("workers")
    panels[0].legend(frameon=False, fontsize=7, loc="upper left")


if __name__ == "__main__":
    main()
