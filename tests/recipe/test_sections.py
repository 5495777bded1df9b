"""What a recipe may say of its optimizer and of its protocol, and what is refused."""

import inspect
import re
from typing import get_args

import pytest
import torch
from short_runs import DIGITS

from largebatch import load_recipe, registry
from largebatch.errors import PlanError, RecipeError
from largebatch.optim import LARS
from largebatch.recipe import optimizers as sections
from largebatch.recipe.arithmetic.plan import describe_protocol, make_plan
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.schedule import Decay
from largebatch.recipe.section import Choice, alternatives

FREE = (
    *("optimizer.kind=schedule-free", "optimizer.statistics_samples=96"),
    "schedule.decay.kind=constant",
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (*FREE[:2], "schedule.decay.kind=cosine"),
            r"schedule.decay must be {kind: constant}, got cosine",
        ),
        ((*FREE, "polish.ema=0.9"), "polish.ema: "),
        (
            (*FREE, "polish.swa={over: {steps: 40}, every: {steps: 10}}"),
            "polish.swa: ",
        ),
        (
            (*FREE, "polish={clean: {steps: 2}, keep: better, held_out: 100}"),
            "polish.clean cannot be rolled back",
        ),
        ((FREE[0], FREE[2]), "optimizer.statistics_samples is for models with BatchNorm"),
        (
            (*FREE, "optimizer.statistics_samples=1438"),
            r"optimizer.statistics_samples \(1438\) must not exceed the training images \(1437\)",
        ),
        (
            (*FREE, "optimizer.momentum=0"),
            "optimizer.momentum: input should be greater than 0",
        ),
        (
            ("optimizer.kind=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"),
            "nesterov: true needs a momentum above 0",
        ),
        (("optimizer.kind=shampoo", "optimizer.block_size=1"), "optimizer.block_size: "),
        (("optimizer.kind=shampoo", "optimizer.graft=adam"), "optimizer.graft: "),
        (("optimizer.kind=lamb", "optimizer.max_grad_norm=0"), "optimizer.max_grad_norm: "),
        (
            ("optimizer={kind: muon, adjust_lr: original}",),
            "adjust_lr: original needs others.lr: schedule.peak_lr is Muon's",
        ),
        (("optimizer={kind: muon, others: {kind: sgd}}",), "optimizer.others.lr: missing"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(DIGITS, changes)


def test_the_convention_of_lars_is_that_of_python_unless_it_is_given() -> None:
    recipe = load_recipe("cifar10_resnet9_128", ["optimizer={kind: lars}"])
    assert isinstance(recipe.optimizer, sections.LARS)
    assert recipe.optimizer.convention == LARS([torch.zeros(1)]).param_groups[0]["convention"]


SOFTSYNC = "protocol={kind: softsync, learners: 4, n: 2, modulation: staleness}"
"""Updates of 2 gradients of 48 samples."""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["protocol={kind: softsync, learners: 4, n: 5, modulation: n}"],
         "n (5) must be at most learners (4): an update would take floor(4 / 5) = 0 gradients"),
        (["protocol={kind: softsync, learners: 4, n: 0, modulation: n}"], "protocol.n: input"),
        (["protocol={kind: asynchronous, learners: 4}"], "modulation: missing"),
        (["protocol={kind: hardsync, learners: 4, modulation: sqrt}"],
         "modulation: sqrt and reference_batch belong together"),
        (["protocol={kind: hardsync, learners: 5}"],
         "batch.global_batch (96) must be a multiple of the 5 gradients"),
        (["protocol={kind: hardsync, learners: 4}"],
         "batch.bn_span (48) must divide the 24 samples of a learner's mini-batch"),
        ([SOFTSYNC, "execution.device_batch=24"],
         "execution.device_batch (24) must be a learner's mini-batch with protocol, which is 48"),
        (["protocol={kind: hardsync, learners: 2, servers: {centralised: 0}}"], "centralised"),
        ([SOFTSYNC, "polish.ema=0.5"], "polish.ema has no meaning with protocol"),
        ([SOFTSYNC, "precision=fp16"], "precision: fp16 has no meaning with protocol"),
        ([SOFTSYNC, "monitor=noise_scale"], "monitor: noise_scale has no meaning with protocol"),
        ([SOFTSYNC, "nonfinite.action=skip"], "nonfinite.action: skip has no meaning"),
        ([SOFTSYNC, "batch.schedule=[{after: {epochs: 2}, global_batch: 192, lr_factor: 1}]"],
         "batch.schedule has no meaning with protocol"),
        ([SOFTSYNC, "optimizer={kind: lamb}"], "optimizer.kind: lamb has no meaning"),
    ],
)  # fmt: skip
def test_what_a_protocol_cannot_be_had_with_is_refused(changes: list[str], problem: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        load_recipe(DIGITS, changes)


def test_an_update_keeps_its_samples_whatever_the_protocol() -> None:
    """The batch is that of an update; its mini-batches follow from the gradients it takes."""
    core = make_plan(load_recipe(DIGITS), workers=2)
    for change, size in [
        (SOFTSYNC, 48),
        ("protocol={kind: hardsync, learners: 1}", 96),
        ("protocol={kind: asynchronous, learners: 9, modulation: n}", 96),
    ]:
        plan = make_plan(load_recipe(DIGITS, [change]), workers=2)
        assert (plan.device_batch, plan.accumulation) == (size, 1)
        assert (plan.steps, plan.clean_steps) == (core.steps, core.clean_steps)
        assert plan.evaluate_after == core.evaluate_after


def test_dedicated_servers_are_workers_too() -> None:
    recipe = load_recipe(DIGITS, [SOFTSYNC, "protocol.servers={centralised: 2}"])
    protocol = recipe.protocol
    assert protocol is not None
    protocol.require_workers(6)
    with pytest.raises(PlanError, match="protocol has 4 learners . 2 servers: start 6 workers"):
        protocol.require_workers(4)
    assert describe_protocol(protocol, global_batch=96) == (
        "softsync: 96 samples an update = 2 gradients x 48; 4 learners, 2 servers: 6 workers"
    )


@pytest.mark.parametrize("base", [sections.Optimizer, Decay, Protocol], ids=lambda it: it.group)
def test_every_section_names_a_builder_that_takes_it(base: type[Choice]) -> None:
    for kind, section in alternatives(base).items():
        builder = registry.resolve(section.builder)
        first = next(iter(inspect.signature(builder).parameters.values()))
        taken = get_args(first.annotation) or (first.annotation,)
        assert any(issubclass(section, it) for it in taken), kind


def test_every_name_of_ours_is_an_object() -> None:
    for group, targets in registry.OURS.items():
        for name, target in targets.items():
            assert callable(registry.resolve(target)), (group, name)
