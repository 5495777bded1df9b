"""pydantic's errors -> one message about a recipe, by the keys its author wrote."""

import json
import re
import shlex
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from largebatch import registry
from largebatch.errors import LONGEST_NAME, SHOWN, clip, nearest, shorten
from largebatch.formatting import plural
from largebatch.recipe.section import (
    Duration,
    Section,
    every_field,
    group_of,
    kinds_of,
    sections_of,
)

SYNONYMS = {
    name: key
    for key, names in {
        "schedule.peak_lr": "lr learning_rate base_lr init_lr initial_lr max_lr",
        "schedule.decay.end_lr": "min_lr final_lr",
        "schedule.decay.kind": "lr_schedule lr_scheduler scheduler schedule",
        "schedule.warmup.epochs": "warmup warmup_epochs",
        "schedule.warmup.steps": "warmup_steps",
        "batch.global_batch": "batch_size bs batchsize global_batch_size total_batch_size",
        "execution.device_batch": "micro_batch_size per_device_batch_size per_gpu_batch_size",
        "duration.epochs": "epoch num_epochs n_epochs max_epochs train_epochs",
        "duration.steps": "max_steps num_steps train_steps iterations",
        "model.name": "arch architecture model model_name network",
        "optimizer.kind": "opt optimizer optimizer_name",
        "optimizer.weight_decay": "wd",
        "optimizer.clip_norm": "clip_grad clip_grad_norm grad_clip gradient_clip_val",
        "loss.kind": "bce_loss",
        "loss.label_smoothing": "smoothing",
        "loss.target_threshold": "bce_target_thresh",
        "loss.classes": "bce_sum sum_classes",
        "precision": "amp mixed_precision",
        "data.classes": "num_classes n_classes",
        "data.augment.kind": "aa auto_augment color_jitter rand_augment trivial_augment",
        "data.augment.operations": "num_ops",
        "data.augment.magnitude": "ra_magnitude",
        "data.augment.std": "magnitude_std",
        "data.erase.probability": "reprob random_erase random_erasing",
        "data.erase.fill": "remode",
        "data.erase.count": "recount",
        "data.repeats": "aug_repeats ra_reps repeated_aug",
        "data.mix.mixup": "mixup mixup_alpha",
        "data.mix.cutmix": "cutmix cutmix_alpha",
        "data.mix.probability": "mixup_prob",
        "data.mix.switch": "mixup_switch_prob",
        "data.mix.until": "mixup_off_epoch",
        "data.image_size": "img_size input_size resolution",
        "polish.ema": "ema_decay model_ema_decay",
        "seed": "random_seed manual_seed",
        "tracking": "logger tracker report_to",
    }.items()
    for name in names.split()
}
"""Names in other programs, and the keys of a recipe that they mean."""

_CHOICES = {
    "binary_cross_entropy": "bce",
    "ra": "rand_augment",
    "ta_wide": "trivial_augment",
    "pixel": "noise",
    "random": "noise",
    "const": "constant",
}
"""Values in other programs, and the choices of a recipe that they mean."""

_MOVED = {"optimizer": "schedule.", "model": "data.", "data": "batch."}
"""Sections in which other programs have keys that are in another section of a recipe."""


def meant_key(word: str, root: type[Section]) -> str | None:
    """Return the key of `root` that a word means; None if there is none.

    The word is a synonym, or the last part of a key: of several, of the one with the fewest parts;
    None if two have as few. A word in a section of `root` means a key of another one only where
    other programs have it there.

    >>> from largebatch.recipe.recipe import Recipe
    >>> [meant_key(word, Recipe) for word in ("batch-size", "train.lr", "momentum", "optimizer")]
    ['batch.global_batch', 'schedule.peak_lr', 'optimizer.momentum', 'optimizer.kind']
    >>> [meant_key(word, Recipe) for word in ("optimizer.lr", "polish.lr", "polish.epochs")]
    ['schedule.peak_lr', None, None]
    """
    keys = {key for key, _, _ in every_field(root)}
    parent, _, last = word.rpartition(".")
    last = _plain(last)
    meant = SYNONYMS.get(_plain(word)) or SYNONYMS.get(last)
    near = f"{parent}.", _MOVED.get(parent, f"{parent}.")
    if meant is not None and meant in keys and (parent not in keys or meant.startswith(near)):
        return meant
    if parent in keys:  # what belongs to the machine is in one section
        return f"execution.{last}" if f"execution.{last}" in keys else None
    same = sorted((key for key in keys if key.split(".")[-1] == last), key=_depth)
    return same[0] if same and _depth(same[0]) < min(map(_depth, same[1:]), default=99) else None


def _plain(word: str) -> str:
    return re.sub(r"[-.]", "_", word.lower())


def _depth(key: str) -> int:
    return key.count(".")


def meant_words(key: str, value: str, root: type[Section]) -> str:
    """Return the option that sets a key of `root`; epochs or steps replace whichever was given."""
    owners = {name: owner for name, owner, _ in every_field(root)}
    section, _, unit = key.rpartition(".")
    change = f"{section}={{{unit}: {value}}}" if owners[key] is Duration else f"{key}={value}"
    return f"--set {shlex.quote(change)}"


def explain_problems(error: ValidationError, root: type[Section], *, source: str) -> str:
    """Return a message with every error in a section and those below it, each by its path."""
    problems = error.errors(include_url=False)
    shown = problems[: SHOWN + 1]
    lines = [_of_package(problem, root) or _explain(problem, root) for problem in shown]
    head = f"{source}: {plural(len(problems), 'problem')}"
    return "\n  ".join([head, shorten(lines, between="\n  ")])


def _of_package(problem: ErrorDetails, root: type[Section]) -> str | None:
    """Return why a part of an installed package cannot be used; None if that is not the problem.

    The choices are left out: the word is right, and the package is not.
    """
    keys, _ = _locate(problem["loc"], root)
    group = _group_at(keys, root)
    is_section = problem["type"] == "union_tag_invalid"
    name = problem["ctx"]["tag"] if is_section else problem["input"]
    if group is None or not isinstance(name, str):
        return None
    reason = registry.trouble(group, name)
    where = clip(".".join([*keys, "kind"] if is_section else keys), LONGEST_NAME)
    return None if reason is None else f"{where}: {reason}"


def _explain(problem: ErrorDetails, root: type[Section]) -> str:
    keys, known = _locate(problem["loc"], root)
    where = clip(".".join(keys), LONGEST_NAME)
    context = problem.get("ctx", {})
    chooser = f"{where}.kind"  # of every union of a recipe
    match problem["type"]:
        case "missing":
            return f"{where}: missing"
        case "extra_forbidden":
            return f"{where}: unknown key; {_hint(keys, known, root)}"
        case "value_error":
            return f"{where}: {context['error']}" if where else str(context["error"])
        case "union_tag_not_found":
            kinds = _kinds_with(chooser, root)
            return f"{chooser}: missing; give one of: {', '.join(kinds)}"
        case "union_tag_invalid":
            given = clip(repr(context["tag"]), LONGEST_NAME)
            expected = context["expected_tags"] or "the kinds of installed packages"
            wrong = f"{chooser}: expected one of {expected}, got {given}"
            meant = _meant(context["tag"], context["expected_tags"])
            return "; ".join(filter(None, [wrong, _or_missing(keys, context["tag"], root, meant)]))
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            message = message.replace("False, True", "false, true")  # as YAML has them
            if "le" in context:  # pydantic prints all of its digits
                message = f"input should be less than or equal to {context['le']:.10g}"
            given = clip(json.dumps(problem["input"]), LONGEST_NAME)
            meant = _meant(problem["input"], context.get("expected", ""))
            if problem["type"] == "literal_error":
                meant = _or_missing(keys, problem["input"], root, meant)
            if problem["type"] in {"model_type", "dict_type"}:  # one word in place of a section
                meant = _instead(where, root) or f"see `largebatch explain {where}`"
            return "; ".join(filter(None, [f"{where}: {message}, got {given}", meant]))


def _or_missing(keys: Sequence[str], name: object, root: type[Section], meant: str) -> str:
    """Return `meant`; if it is empty, what to install where a package may add the name."""
    group = _group_at(keys, root)
    if meant or group is None or not isinstance(name, str):
        return meant
    return registry.missing(group, clip(name, LONGEST_NAME))


def _group_at(keys: Sequence[str], root: type[Section]) -> registry.Group | None:
    where = ".".join(key for key in keys if not key.isdigit())
    return next((group_of(field) for key, _, field in every_field(root) if key == where), None)


def _hint(keys: Sequence[str], known: Sequence[str], root: type[Section]) -> str:
    where = ".".join(keys)
    instead = _instead(where, root)
    in_list = any(key.isdigit() for key in keys)
    if instead and not in_list and {_plain(where), _plain(keys[-1])} & SYNONYMS.keys():
        return instead
    others = _kinds_with(where, root)
    if others and not in_list:
        return f"it is a key of kind: {', '.join(others)}; known keys: {', '.join(known)}"
    otherwise = instead or f"known keys: {', '.join(known)}"
    if not in_list and (meant_key(keys[-1], root) or "").startswith("duration."):
        return otherwise  # `epochs` is no misspelling of `eps`
    return nearest(keys[-1], known, otherwise=otherwise, most=1)


def _kinds_with(key: str, root: type[Section]) -> list[str]:
    """Return the kinds of the sections that have a key; none if that is in no union."""
    owners = [owner for name, owner, _ in every_field(root) if name == re.sub(r"\.\d+", "", key)]
    return list(dict.fromkeys(kind for owner in owners for kind in kinds_of(owner)))


def _instead(where: str, root: type[Section]) -> str | None:
    """Suggest a key in place of one of another program; None where that is unknown."""
    meant = meant_key(where, root)
    return None if meant in {None, where} else f"did you mean {meant!r}?"


def _meant(value: object, expected: str) -> str:
    choices = re.findall("'([^']*)'", expected)
    meant = _CHOICES.get(_plain(str(value)))
    if meant in choices:
        return f"did you mean {meant!r}?"
    return nearest(str(value), choices, otherwise="", most=1)


def _locate(location: tuple[int | str, ...], root: type[Section]) -> tuple[list[str], list[str]]:
    """Return the path an author would write, without members of unions, and its known keys."""
    path: list[str] = []
    sections: list[type[Section]] = [root]
    fields = root.model_fields
    is_choice = False
    for key in location:
        if is_choice and (chosen := [section for section in sections if key in kinds_of(section)]):
            sections = chosen  # pydantic puts the kind into the location, which an author does not
            fields = sections[0].model_fields
            is_choice = False
            continue
        path.append(str(key))
        known = list(fields)
        if key in fields:
            field = fields[str(key)]
            sections = sections_of(field.annotation)
            is_choice = len(sections) > 1 or group_of(field) is not None
            fields = sections[0].model_fields if len(sections) == 1 else {}
    return path, known if path else []
