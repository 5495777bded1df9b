"""A suggested recipe as a file, and the source of each of its settings in words."""

import math
from collections.abc import Iterator
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


def words(found: Suggestion, *, has_warmup: bool = True, base: Recipe | None = None) -> list[str]:
    """Return the sources of a suggestion, their errors, and what no point covers.

    `has_warmup`: True if the warm-up is the points' too, and not that of a measured policy; `base`
    is the recipe whose images are kept.
    """
    polishing = (
        f"polishing: added, no reference point has it; the last {found.clean_epochs:g} epochs "
        "on clean images, the share of Fujitsu's entry, then statistics"
    )
    return [
        *_few_updates(found),
        *_longer_steps(found, base),
        *_between(found),
        *_settings(found, has_warmup=has_warmup, has_spans=_has_spans(base)),
        *_epochs(found),
        (
            "specific to LARS: learning rate, warm-up, momentum and weight decay; search for "
            "others with another optimizer.kind"
        ),
        *([polishing] if _has_spans(base) else []),
        *_elsewhere(found, has_warmup=has_warmup, base=base),
        f"range: batches up to {LARGEST:,} on ImageNet; no run with a larger one is known here",
    ]


def _has_spans(base: Recipe | None) -> bool:
    """Return True if the suggestion has BatchNorm spans and polishing: unless the base has none."""
    return base is None or base.batch.bn_span is not None


def _between(found: Suggestion) -> Iterator[str]:
    lower, upper = found.lower, found.upper
    if found.elsewhere:
        yield (
            f"{found.data.samples:,} images in batches of {found.batch:,} make as many updates an "
            f"epoch ({found.data.samples / found.batch:.1f}) as ImageNet in batches of "
            f"{found.alike:,.0f}, which is what is looked up"
        )
    if found.extrapolated:
        yield (
            f"extrapolates: {found.alike:,.0f} is {found.alike / upper.batch:.2f} times the "
            f"largest reference point, {upper.name}, whose learning rate, momentum, weight decay "
            "and share of warm-up it keeps; resnet50_86016_fujitsu has settings that were run"
        )
    elif found.a_point:
        yield f"it is a reference point: {lower.name}"
    else:
        yield (
            f"between {lower.name} and {upper.name}, MLPerf's reference convergence points with "
            f"LARS, {_percent(place(found.alike, lower, upper))} of the way on a logarithmic scale"
        )
    same = [] if found.elsewhere else _recipes_for(found.batch)
    if same:
        yield f"published recipes for this batch: {', '.join(same)}"


def _recipes_for(batch: int) -> list[str]:
    """Return the installed recipes for ImageNet in batches of this size, with their origin."""
    return [
        f"{name} ({origin(text).after})"
        for name, text in installed().items()
        if name.startswith(f"resnet50_{batch}_")
    ]


def _settings(found: Suggestion, *, has_warmup: bool, has_spans: bool) -> Iterator[str]:
    lower, upper = found.lower, found.upper
    warmup = {"warm-up, share of the run": found.warmup_epochs / found.epochs}
    settings = {
        "learning rate": found.peak_lr,
        **(warmup if has_warmup else {}),
        "1 - momentum": 1 - found.momentum,
        "weight decay": found.weight_decay,
        **({"BatchNorm span": found.bn_span} if has_spans else {}),
    }
    rows = [["", "here", "neighbours", "error of each point, from its own neighbours"]]
    for name, here in settings.items():
        points = dict.fromkeys(f"{SETTINGS[name](point):.4g}" for point in (lower, upper))
        rows.append([name, f"{here:.4g}", ", ".join(points), _missed(name)])
    yield from aligned(rows, right=[1]).split("\n")
    span = f"the span is a divisor of {found.batch:,} from {SPANS[0]} to {SPANS[-1]}; "
    yield (
        f"{span if has_spans else ''}what misses by {_percent(UNSURE)} or more is hardly a "
        "function of the batch: try others"
    )


def _missed(name: str) -> str:
    """Return the errors of the points that are left out, from their neighbours."""
    errors = sorted(map(abs, left_out(reference_points(), SETTINGS[name])))
    return f"{_percent(median(errors))} in the median, at most {_percent(errors[-1])}"


def _epochs(found: Suggestion) -> Iterator[str]:
    points = reference_points()
    law, errors = fit_epochs(points), sorted(map(abs, epoch_errors(points)))
    low, high = (found.law_epochs * (1 + sign * errors[-1]) for sign in (-1, 1))
    beyond = ", which may be too narrow beyond the points" if found.extrapolated else ""
    yield (
        f"epochs to 75.9 % top-1{' on ImageNet' if found.elsewhere else ''}: "
        f"{found.law_epochs:.1f} ({low:.1f} to {high:.1f}), from epochs(B) = {law.shortest:.1f} "
        f"(1 + B / {law.critical:,.0f}), fitted to the ten points; fits to nine miss the tenth by "
        f"{100 * median(errors):.1f} % in the median, at most {100 * errors[-1]:.1f} %, which is "
        f"the interval{beyond}"
    )
    ratio = found.epochs / found.law_epochs
    if found.given_epochs and found.elsewhere:
        reason = "as given; how many these images take, no reference point says"
    elif found.given_epochs and ratio < 1:
        reason = f"as given: {_percent(ratio)} of the law's, so 75.9 % is not to be expected"
    elif found.given_epochs:
        reason = f"as given: {ratio:.2f} times the law's; theirs are {margin(points):.2f} times"
    elif found.a_point:
        reason = f"that of the point, which reached 75.9 % after {found.lower.mean_epochs:g}"
    else:
        reason = f"{margin(points):.2f} times the law's, as theirs are in the median"
    yield f"schedule: {found.epochs:g} epochs, {reason}"


def _few_updates(found: Suggestion) -> Iterator[str]:
    """Yield a warning where a run has far fewer updates than that of any reference point."""
    updates = found.epochs * found.data.samples / found.batch
    fewest = min(
        point.schedule_epochs * IMAGENET.samples / point.batch for point in reference_points()
    )
    if updates < FEW * fewest:
        ratio = found.batch * updates / (FEW * fewest)
        yield (
            f"warning: {updates:,.0f} updates in all, and the reference points make {fewest:,.0f} "
            f"or more: expect the network not to be trained to its end; with these epochs a batch "
            f"of {ratio:,.0f} makes half as many as they do, with this batch "
            f"{FEW * fewest * found.batch / found.data.samples:,.0f} epochs"
        )


def _longer_steps(found: Suggestion, base: Recipe | None) -> Iterator[str]:
    """Yield a warning where steps are much longer than those of the recipe that is kept."""
    if base is None or base.optimizer.kind != "lars":
        return
    own = base.schedule.peak_lr * base.optimizer.eta / (1 - base.optimizer.momentum)
    factor = found.peak_lr * ETA / (1 - found.momentum) / own
    if factor > LONGER:
        yield (
            f"warning: rate x eta / (1 - momentum) is {factor:.2g} times that of {base.name}, and "
            "training may diverge: look for the edge with `largebatch lab range` first"
        )


def _elsewhere(found: Suggestion, *, has_warmup: bool, base: Recipe | None) -> Iterator[str]:
    unknown = "crops, flips, mean and std, label smoothing"
    if base is not None:
        yield f"kept from {base.name}: images with their crops, flips, mean and std, network, loss"
        unknown = "whether these optimizer settings suit the network"
    parts = {"warm-up": has_warmup, "polishing": _has_spans(base)}
    shares = " and ".join(name for name, is_there in parts.items() if is_there)
    form = "shares" if all(parts.values()) else "a share"
    if found.elsewhere:
        updates = math.ceil(found.epochs * found.data.samples / found.batch)
        yield (
            "taken over: learning rate, eta, momentum and weight decay, which act in every "
            "update" + (f", and {shares} as {form} of the run" if shares else "")
        )
        yield (
            f"not taken over, so try it out: how many epochs (these make {updates:,} updates; both "
            "numbers of the law are ImageNet's, ResNet-50's and 75.9 %'s; --epochs E), "
            f"{unknown}"
        )
    if found.model != "resnet50":
        needs = "; without BatchNorm it needs bn_span: null and no polish" if base is None else ""
        yield f"all points are ResNet-50: none was measured with {found.model}{needs}"


def draft(
    found: Suggestion, *, schedule: Schedule | None = None, base: Recipe | None = None
) -> str:
    """Return the text of the suggested recipe, with the rule beside each number.

    `schedule` is the section with a measured policy, if there is one; `base` is a recipe whose
    images, network and other sections are kept.
    """
    name = suggested_name(found)
    tree = _tree(found, name)
    comments = _comments(found)
    if not _has_spans(base):
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
    """Return the sections of the suggested recipe."""
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
    """Return the source of each setting by its key."""
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
    """Return the points that a suggestion is from, and the rule, for the head of the recipe."""
    lower, upper = found.lower.name, found.upper.name
    where = f" (at {found.alike:,.0f} by updates in an epoch)" if found.elsewhere else ""
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
