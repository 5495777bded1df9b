"""The table and the page of a study, drawn from its records."""

from pathlib import Path
from typing import cast

from largebatch.errors import StudyError
from largebatch.lab.studies import policies, scaling, servers, settings, staleness
from largebatch.lab.studies.runner import Runs
from largebatch.lab.studies.study import PAGE, Study
from largebatch.lab.studies.trained import TrainedCell, results_of
from largebatch.report.pages import Page


def make_page(study: Study, folder: Path, runs: Runs) -> Page:
    """Return the page of a study whose file is in `folder`.

    Raises StudyError if there is nothing to show, or if a record is damaged.
    """
    records = {cell.name: found for cell in runs.cells if (found := runs.records(cell))}
    simulates = study.servers is not None and study.servers.simulated is not None
    if not records and not simulates:
        raise StudyError(f"{runs.store.folder}: no run of the study has finished")
    match study.kind:
        case "policies" | "settings":
            cells = cast("list[TrainedCell]", list(runs.cells))
            some = [results_of(cell, records[cell.name]) for cell in cells if cell.name in records]
            if study.kind == "policies":
                return policies.make_page(study.name, some, targets=study.targets)
            some = [one for one in some if one.seeds]
            return settings.make_page(study.name, some, metrics=study.metrics)
        case "staleness":
            learners = cast("list[staleness.StalenessCell]", list(runs.cells))
            rows = [
                staleness.StalenessRow(cell, tuple(records[cell.name].values()))
                for cell in learners
                if cell.name in records
            ]
            return staleness.make_page(study.name, rows, staleness.speed_ups(study, folder))
        case "servers":
            layouts = cast("list[servers.ServersCell]", list(runs.cells))
            started = servers.rows_of(layouts, records)
            return servers.make_page(study, started, servers.sweeps(study, folder, started))
        case "scaling":
            workers = cast("list[scaling.ScalingCell]", list(runs.cells))
            return scaling.make_page(study, scaling.rows_of(workers, records))


def write_page(study: Study, folder: Path, runs: Runs) -> str:
    """Write the page into the folder of the records; return its table, findings and path."""
    page = make_page(study, folder, runs)
    path = page.write(runs.store.folder / PAGE)
    return f"{page.text()}\npage: {path}"
