"""A suggested recipe as a file, and the source of each of its settings in words."""

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from largebatch.formatting import aligned
from largebatch.lab.planner.suggest import (
    IMAGENET,
    LARGEST,
    SETTINGS,
    SPANS,
    Suggestion,
    epoch_errors,
    fit_epochs,
    left_out,
    margin,
    place,
    reference_points,
)
from largebatch.recipe.installed import installed, origin
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Schedule
from largebatch.recipe.writing import dump_commented, recipe_name
from largebatch.rules import Numbers, Rule, find

FEW = 0.5
"""Share of the fewest updates of a reference point below which a run is warned of."""

LONGER = 1.5
"""Factor to the length of a step of the recipe that is kept from which one is warned of."""

ETA = 1e-3
"""Trust coefficient of MLPerf's reference points."""

UNSURE = 0.5
"""Median error of a setting from which its interpolation is called unsure."""

STATISTICS = 50_000
"""Clean images that the statistics pass measures, at most."""

KEPT = ("seed", "data", "model", "loss", "precision", "reduction", "execution", "evaluation")
"""Sections that a suggestion for a recipe keeps: what a batch does not decide."""

WITH_SPANS = {"batch.bn_span", "polish", "polish.clean"}
"""Keys with comments that a suggestion without BatchNorm does not have."""

SMALL = 64
"""Images up to this side, in pixels, are cropped less: 5 % of their area would be a few pixels."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A suggestion and what is drafted from it."""

    found: Suggestion
    has_warmup: bool = True
    """True if the warm-up is the points' too, and not that of a measured policy."""

    base: Recipe | None = None
    """The recipe whose images are kept."""

    @property
    def has_spans(self) -> bool:
        """True if the recipe has BatchNorm spans and polishing: unless the base has none."""
        return self.base is None or self.base.batch.bn_span is not None


def words(found: Suggestion, *, has_warmup: bool = True, base: Recipe | None = None) -> list[str]:
    """Return the sources of a suggestion, their errors, and what no point covers, line by line."""
    findings = find(RULES, Drafted(found, has_warmup, base))
    return [line for each in findings for line in each.figure.split("\n")]


def _few_updates(it: Drafted) -> Numbers | None:
    found = it.found
    updates = found.epochs * found.data.samples / found.batch
    fewest = min(
        point.schedule_epochs * IMAGENET.samples / point.batch for point in reference_points()
    )
    if updates >= FEW * fewest:
        return None
    return {
        "updates": updates, "fewest": fewest, "batch": found.batch * updates / (FEW * fewest),
        "epochs": FEW * fewest * found.batch / found.data.samples,
    }  # fmt: skip


def _longer_steps(it: Drafted) -> Numbers | None:
    found, base = it.found, it.base
    if base is None or base.optimizer.kind != "lars":
        return None
    own = base.schedule.peak_lr * base.optimizer.eta / (1 - base.optimizer.momentum)
    factor = found.peak_lr * ETA / (1 - found.momentum) / own
    return {"factor": factor, "base": base.name} if factor > LONGER else None


def _looked_up(it: Drafted) -> Numbers | None:
    found = it.found
    updates = found.data.samples / found.batch
    return {"found": found, "data": found.data, "updates": updates} if found.elsewhere else None


def _extrapolates(it: Drafted) -> Numbers | None:
    found = it.found
    if not found.extrapolated:
        return None
    return {"found": found, "factor": found.equivalent / found.upper.batch, "upper": found.upper}


def _between(it: Drafted) -> Numbers | None:
    found = it.found
    if found.extrapolated or found.a_point:
        return None
    share = 100 * place(found.equivalent, found.lower, found.upper)
    return {"lower": found.lower, "upper": found.upper, "share": share}


def _published(it: Drafted) -> Numbers | None:
    same = [
        f"{name} ({origin(text).after})"
        for name, text in installed().items()
        if name.startswith(f"resnet50_{it.found.batch}_")
    ]
    return {"recipes": ", ".join(same)} if same and not it.found.elsewhere else None


def _settings(it: Drafted) -> Numbers:
    found = it.found
    settings = {
        "learning rate": found.peak_lr,
        "warm-up, share of the run": found.warmup_epochs / found.epochs,
        "1 - momentum": 1 - found.momentum,
        "weight decay": found.weight_decay,
        "BatchNorm span": found.bn_span,
    }
    left = {"warm-up, share of the run": it.has_warmup, "BatchNorm span": it.has_spans}
    rows = [["", "here", "neighbours", "error of each point, from its own neighbours"]]
    for name, here in settings.items():
        if left.get(name, True):
            errors = sorted(map(abs, left_out(reference_points(), SETTINGS[name])))
            near = dict.fromkeys(f"{SETTINGS[name](it):.4g}" for it in (found.lower, found.upper))
            missed = f"{_percent(median(errors))} in the median, at most {_percent(errors[-1])}"
            rows.append([name, f"{here:.4g}", ", ".join(near), missed])
    return {"table": aligned(rows, right=[1])}


def _law(it: Drafted) -> Numbers:
    points, epochs = reference_points(), it.found.law_epochs
    errors = sorted(map(abs, epoch_errors(points)))
    return {
        "where": " on ImageNet" if it.found.elsewhere else "", "epochs": epochs,
        "low": epochs * (1 - errors[-1]), "high": epochs * (1 + errors[-1]),
        "law": fit_epochs(points), "median": 100 * median(errors), "most": 100 * errors[-1],
        "beyond": ", which may be too narrow beyond the points" if it.found.extrapolated else "",
    }  # fmt: skip


def _schedule(it: Drafted) -> Numbers:
    found = it.found
    reason = f"theirs are {margin(reference_points()):.2f} times in the median"
    if found.given_epochs:
        reason = f"as given; {reason}"
    elif found.a_point:
        reason = f"that of the point, which reached 75.9 % after {found.lower.mean_epochs:g}"
    return {"epochs": found.epochs, "ratio": found.epochs / found.law_epochs, "reason": reason}


def _transferred(it: Drafted) -> Numbers | None:
    found = it.found
    if not found.elsewhere:
        return None
    parts = {"warm-up": it.has_warmup, "polishing": it.has_spans}
    updates = math.ceil(found.epochs * found.data.samples / found.batch)
    return {"parts": "".join(f", {name}" for name, has in parts.items() if has), "updates": updates}


def _other_network(it: Drafted) -> Numbers | None:
    needs = "; without BatchNorm it needs bn_span: null and no polish"
    if it.found.model == "resnet50":
        return None
    return {"model": it.found.model, "needs": needs if it.base is None else ""}


# fmt: off
RULES: tuple[Rule[Drafted], ...] = (
    Rule(kind="warning", holds=_few_updates,
         text="warning: {updates:,.0f} updates in all, and the reference points make {fewest:,.0f} "
         "or more: expect the network not to be trained to its end; with these epochs a batch of "
         "{batch:,.0f} makes half as many as they do, with this batch {epochs:,.0f} epochs"),
    Rule(kind="warning", holds=_longer_steps,
         text="warning: rate x eta / (1 - momentum) is {factor:.2g} times that of {base}, and "
         "training may diverge: look for the edge with `largebatch lab range` first"),
    Rule(kind="batch", holds=_looked_up,
         text="{data.samples:,} images in batches of {found.batch:,} make as many updates an epoch "
         "({updates:.1f}) as ImageNet in batches of {found.equivalent:,.0f}, which is looked up"),
    Rule(kind="points", holds=_extrapolates,
         text="extrapolates: {found.equivalent:,.0f} is {factor:.2f} times the largest point, "
         "{upper.name}, whose learning rate, momentum, weight decay and share of warm-up it keeps; "
         "resnet50_86016_fujitsu has settings that were run"),
    Rule(kind="points",
         holds=lambda it: {"lower": it.found.lower} if it.found.a_point else None,
         text="it is a reference point: {lower.name}"),
    Rule(kind="points", holds=_between,
         text="between {lower.name} and {upper.name}, MLPerf's reference convergence points with "
         "LARS, {share:.0f} % of the way on a logarithmic scale"),
    Rule(kind="points", holds=_published, text="published recipes for this batch: {recipes}"),
    Rule(kind="settings", holds=_settings, text="{table}"),
    Rule(kind="settings",
         holds=lambda it: {"batch": it.found.batch} if it.has_spans else None,
         text=f"the span is a divisor of {{batch:,}} from {SPANS[0]} to {SPANS[-1]}"),
    Rule(kind="settings", holds=lambda _: {},
         text=f"settings with an error of {100 * UNSURE:.0f} % or more do not scale with the "
         "batch; tune them"),
    Rule(kind="epochs", holds=_law,
         text="epochs to 75.9 % top-1{where}: {epochs:.1f} ({low:.1f} to {high:.1f}), from "
         "epochs(B) = {law.shortest:.1f} (1 + B / {law.critical:,.0f}), fitted to the ten points; "
         "fits to nine miss the tenth by {median:.1f} % in the median, at most {most:.1f} %, which "
         "is the interval{beyond}"),
    Rule(kind="epochs", holds=_schedule,
         text="schedule: {epochs:g} epochs, {ratio:.2f} times the law's; {reason}"),
    Rule(kind="optimizer", holds=lambda _: {},
         text="specific to LARS: learning rate, warm-up, momentum and weight decay; search for "
         "others with another optimizer.kind"),
    Rule(kind="polishing",
         holds=lambda it: {"clean": it.found.clean_epochs} if it.has_spans else None,
         text="polishing: added, no reference point has it; the last {clean:g} epochs on clean "
         "images, the share of Fujitsu's entry, then statistics"),
    Rule(kind="kept", holds=lambda it: {"base": it.base.name} if it.base else None,
         text="kept from {base}: images with their crops, flips, mean and std, network, loss"),
    Rule(kind="transferred", holds=_transferred,
         text="from ImageNet: learning rate, eta, momentum, weight decay{parts}; to be tried out: "
         "the number of epochs (these make {updates:,} updates; --epochs E) and the rest"),
    Rule(kind="network", holds=_other_network,
         text="all points are ResNet-50: none was measured with {model}{needs}"),
    Rule(kind="range", holds=lambda _: {},
         text=f"range: batches up to {LARGEST:,} on ImageNet; no run with a larger one is known "
         "here"),
)
"""The sources of a suggestion, in the order in which they are printed."""
# fmt: on


def draft(
    found: Suggestion, *, schedule: Schedule | None = None, base: Recipe | None = None
) -> str:
    """Return the text of the suggested recipe, with the rule of each number.

    `schedule` is the section with a measured policy, if there is one; `base` is a recipe whose
    images, network and other sections are kept.
    """
    name = suggested_name(found)
    tree = _tree(found, name)
    comments = _comments(found)
    if not Drafted(found, base=base).has_spans:
        comments = {key: text for key, text in comments.items() if key not in WITH_SPANS}
    if base is not None:
        tree |= _kept(base, tree)
        comments = {key: text for key, text in comments.items() if key.split(".")[0] not in KEPT}
        comments["data"] = f"as in {base.name}, with network, loss and execution"
    if schedule is not None:
        tree["schedule"] = schedule.model_dump(mode="json")
        comments = {key: text for key, text in comments.items() if not key.startswith("schedule.")}
        comments["optimizer.eta"] = "MLPerf's, as eps"
        comments["schedule"] = "its shape was measured, its peak is from the points and for LARS"
    header = (
        f"{name}: written by `largebatch lab suggest`.",
        f"After: {_source(found)}.",
        "Where to begin, not a result. Measured here: not yet.",
    )
    return dump_commented(validate_tree(Recipe, tree, source=name), comments, header=header)


def _kept(base: Recipe, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe that a suggestion keeps.

    Without BatchNorm there are no spans and no polishing.
    """
    own = base.model_dump(mode="json", exclude_unset=True)
    kept = {key: own[key] for key in KEPT if key in own}
    if "execution" in kept:
        kept["execution"] = {k: v for k, v in kept["execution"].items() if k != "device_batch"}
    if base.batch.bn_span is None:
        kept |= {"batch": {**tree["batch"], "bn_span": None}, "polish": None}
    return kept


def _tree(found: Suggestion, name: str) -> dict[str, Any]:
    data, model, small = found.data, {"name": found.model}, _is_small(found)
    return {
        "name": name,
        "seed": 1,
        "duration": {"epochs": found.epochs},
        "data": {
            "source": "folder",
            "classes": data.classes,
            "train_samples": data.samples,
            "val_samples": data.val_samples,
            "image_size": data.image_size,
            "crop_area": [0.35 if small else 0.05, 1.0],
            "crop_aspect": [0.75, 1.3333333],
            "flip": True,
            "eval_resize": data.image_size if small else round(data.image_size * 256 / 224),
        },
        "model": {**model, "head_std": 0.01} if found.model == "resnet50" else model,
        "batch": {"global_batch": found.batch, "bn_span": found.bn_span},
        "optimizer": {
            "kind": "lars",
            "convention": "reference",
            "momentum": found.momentum,
            "weight_decay": found.weight_decay,
            "eta": ETA,
            "eps": 0.0,
        },
        "schedule": {
            "peak_lr": found.peak_lr,
            "warmup": {"epochs": found.warmup_epochs},
            "decay": {"kind": "polynomial", "power": 2.0, "end_lr": 1e-4},
            "first_step": 1,
        },
        "loss": {"label_smoothing": 0.1},
        "polish": {
            "clean": {"epochs": found.clean_epochs},
            "statistics": {"samples": min(STATISTICS, data.samples)},
        },
        "evaluation": {"every_epochs": 4},
    }


def _comments(found: Suggestion) -> dict[str, str]:
    return {
        "duration": f"{found.law_epochs:.1f} to 75.9 % on ImageNet, by the law",
        "data.crop_area": "for small images" if _is_small(found) else "MLPerf's",
        "data.flip": "false where left and right mean something",
        "model.head_std": "MLPerf's ResNet-50",
        "batch.bn_span": f"the nearest divisor; {_points_have(found, 'bn_span')}",
        "optimizer.momentum": f"for LARS; {_points_have(found, 'momentum')}",
        "optimizer.weight_decay": f"for LARS; {_points_have(found, 'weight_decay')}",
        "optimizer.eta": "MLPerf's, as eps, power and end_lr",
        "schedule.peak_lr": f"for LARS; {_points_have(found, 'peak_lr')}",
        "schedule.warmup": f"for LARS; {_percent(found.warmup_epochs / found.epochs)} of the run",
        "loss": "MLPerf's",
        "polish": "no reference point has it",
        "polish.clean": "the share of Fujitsu's entry",
    }


def _is_small(found: Suggestion) -> bool:
    return found.data.image_size <= SMALL


def _source(found: Suggestion) -> str:
    lower, upper = found.lower.name, found.upper.name
    where = f" (at {found.equivalent:,.0f} by updates in an epoch)" if found.elsewhere else ""
    if found.extrapolated:
        return f"{upper}, whose settings are kept beyond it{where}"
    if found.a_point:
        return f"{lower}{where}"
    return f"{lower} and {upper}, power laws of the batch between them{where}"


def _points_have(found: Suggestion, key: str) -> str:
    lower, upper = getattr(found.lower, key), getattr(found.upper, key)
    if found.lower is found.upper:
        return f"the point has {lower:g}"
    return f"the points have {lower:g} and {upper:g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def suggested_name(found: Suggestion) -> str:
    """Return the name of a suggested recipe, and of its file."""
    model = recipe_name(found.model, otherwise="model")
    return f"{model[:60]}-{found.batch}-suggested"
