"""Whether the setting that is best for one recipe is good for another one: the transfer matrix.

GTDLBench (arXiv:1810.12210) carried the settings that are best for one data set over to others.
Here, row A and column B have what B reaches with the setting that is best for A, beside what it
reaches with its own best one, over pairs of seeds.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from largebatch.lab.studies.metrics import Interval, difference, interval, ratio

Values = Mapping[str, Mapping[str, Mapping[int, float]]]
"""By recipe, setting and seed; what is missing there has no value."""


class Transfer(NamedTuple):
    """What a recipe has with the best setting of a recipe, which may be itself."""

    best_of: str
    used_on: str
    setting: str | None
    """The best one of `best_of`; None where none has a value for every seed."""

    value: Interval | None
    """Value of `used_on` with this setting."""

    own: Interval | None
    """Value of `used_on` with its own best setting."""

    gap: Interval | None
    """`value` minus `own` by seed; of costs how many times as much. None where seeds are missing,
    and for a cost of 0. Its interval holds for the own best one against all other settings
    together, for it was chosen among them."""

    @property
    def share(self) -> float:
        """How much of its own best `used_on` keeps: at most 1 for means of the same seeds."""
        if self.value is None or self.own is None:
            return 0.0
        low, high = sorted((abs(self.value.mean), abs(self.own.mean)))
        return low / high if high else 1.0


def best_setting(settings: Mapping[str, Mapping[int, float]], *, higher: bool) -> str | None:
    """Return the setting with the best mean, of those with a value for every seed; None without.

    >>> best_setting({"a": {1: 0.9, 2: 0.7}, "b": {1: 0.8, 2: 0.9}, "c": {1: 1.0}}, higher=True)
    'b'
    """
    seeds = {seed for found in settings.values() for seed in found}
    means = {
        name: interval(found.values()).mean
        for name, found in settings.items()
        if found and found.keys() == seeds
    }
    if not means:
        return None
    return (max if higher else min)(means, key=lambda name: means[name])


def transfer_matrix(values: Values, *, higher: bool) -> list[list[Transfer]]:
    """Return a row for each recipe whose best setting is used, a column for each it is used on.

    `higher`: the best value is the highest, as of an accuracy; else the lowest, as of a cost.
    """
    best = {recipe: best_setting(settings, higher=higher) for recipe, settings in values.items()}
    return [
        [_transfer(values, best, (best_of, used_on), higher=higher) for used_on in values]
        for best_of in values
    ]


def _transfer(
    values: Values, best: Mapping[str, str | None], pair: tuple[str, str], *, higher: bool
) -> Transfer:
    best_of, used_on = pair
    setting = best[best_of]
    value, own = (
        values[used_on].get(name, {}) if name is not None else {}
        for name in (setting, best[used_on])
    )
    return Transfer(
        best_of=best_of,
        used_on=used_on,
        setting=setting,
        value=interval(value.values()) if value else None,
        own=interval(own.values()) if own else None,
        gap=gap(value, own, higher=higher, together=max(1, len(values[used_on]) - 1)),
    )


def gap(
    value: Mapping[int, float], own: Mapping[int, float], *, higher: bool, together: int
) -> Interval | None:
    """Return a value minus the own best one by seed, or of costs how many times it is.

    One of `together` gaps. None if seeds are missing, and for a cost of 0.
    """
    if not own or value.keys() != own.keys():
        return None
    if higher:
        return difference(value, own, together=together)
    if min(*value.values(), *own.values()) <= 0:
        return None
    return ratio(value, own, together=together).interval


def lost(matrix: Sequence[Sequence[Transfer]], *, higher: bool) -> list[Transfer]:
    """Return where the best setting of another recipe is worse than the own one, beyond the noise.

    That is where the interval of the gap excludes none; a gap of one seed has no interval.
    """
    return [
        one
        for row in matrix
        for one in row
        if one.gap is not None
        and one.best_of != one.used_on
        and (one.gap.high < 0 if higher else one.gap.low > 1)
    ]
