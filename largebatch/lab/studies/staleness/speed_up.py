"""Speed-up by learners: the times of a study alone, simulated without gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from largebatch.distributed.serial import Serial
from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.studies.metrics import Interval, ratio
from largebatch.lab.studies.staleness.study import Cell, StalenessStudy, speed_up_cells
from largebatch.models.of_recipe import build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """A number of learners under a protocol, against one learner alone."""

    protocol: str
    cell: Cell
    seconds: Mapping[int, float]
    """Simulated seconds per sample, by seed."""

    alone: Mapping[int, float]
    """The same of one learner alone."""

    @property
    def panel(self) -> str:
        """Times and mini-batch, in which protocols are compared."""
        return f"{self.cell.times}, mu {self.cell.mu:,}"

    @property
    def over_alone(self) -> Interval:
        """Samples per second over those of one learner alone, by pairs of a seed."""
        found = ratio(self.alone, self.seconds).interval
        assert found is not None  # both have the same seeds
        return found


def speed_ups(study: StalenessStudy, folder: Path) -> list[SpeedUp]:
    """Simulate the speed-up of a study whose file lies in `folder`; empty if it wants none.

    Raises LargebatchError as cells_of does.
    """
    lines = speed_up_cells(study, folder)
    if not lines or study.speed_up is None:
        return []
    (cell, *_) = next(iter(lines.values()))
    model = build_model(cell.recipe, Serial().device)
    size = float(sum(weight.nbytes for weight in model.parameters()))
    found = []
    for protocol, cells in lines.items():
        seconds = {
            cell.name: {
                seed: _seconds(
                    cell, model_bytes=size, gradients=study.speed_up.gradients, seed=seed
                )
                for seed in range(1, study.seeds + 1)
            }
            for cell in cells
        }
        alone = {(one.times, one.mu): seconds[one.name] for one in cells if one.learners == 1}
        found += [
            SpeedUp(
                protocol=protocol,
                cell=one,
                seconds=seconds[one.name],
                alone=alone[one.times, one.mu],
            )
            for one in cells
        ]
    return found


def lines_of(found: Sequence[SpeedUp]) -> dict[str, dict[str, list[SpeedUp]]]:
    """Return the speed-ups by panel and protocol, in the order of learners."""
    panels: dict[str, dict[str, list[SpeedUp]]] = {}
    for one in found:
        panels.setdefault(one.panel, {}).setdefault(one.protocol, []).append(one)
    return panels


def _seconds(cell: Cell, *, model_bytes: float, gradients: int, seed: int) -> float:
    """Return the simulated seconds per sample."""
    rule = cell.rule
    updates = max(1, gradients // rule.gradients)
    cluster = cell.cluster.model_copy(update={"model_bytes": model_bytes})
    found = simulate(rule, cluster, servers=1, updates=updates, seed=seed)
    return float(found.ends[-1]) / (updates * rule.gradients * cell.mu)
