"""The closed division's rules on recipes, against mlperf-logging's own and the written rules."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logs import IMAGENET, POINTS, finish, lines, recipe, start, write
from ruamel.yaml import YAML

from largebatch.cli.main import DONE, FAILED, USER, main
from largebatch.lab.mlperf.rules import RULES, TARGET, broken_rules

BY_THE_RULES = "32768_mlperf"
OF_THE_PACKAGE = {
    "lars_opt_end_learning_rate": "schedule.decay.end_lr",
    "lars_opt_learning_rate_decay_poly_power": "schedule.decay.power",
    "lars_epsilon": "optimizer.eps",
    "lars_opt_weight_decay": "optimizer.weight_decay",
    "sgd_opt_base_learning_rate": "schedule.peak_lr",
    "sgd_opt_end_learning_rate": "schedule.decay.end_lr",
    "sgd_opt_weight_decay": "optimizer.weight_decay",
    "opt_name": "optimizer.kind",
}
"""What the package's rules test in a log, and the setting that it comes from."""


FREE = {
    *("name", "seed", "duration", "batch.global_batch", "batch.bn_span", "precision", "reduction"),
    *(
        "data.mean",
        "data.std",
        "data.interpolation",
        "data.order",
        "schedule.decay.over",
        "loss.off_target",
    ),
    *("nonfinite", "monitor", "tracking", "execution", "polish"),
}
"""Keys that no rule fixes; of polish and execution only some are."""


def settings(name: str, *changes: str) -> list[str]:
    return [rule.check for rule in broken_rules(recipe(name, *changes))]


def test_the_settings_above_are_all_that_the_package_tests() -> None:
    root = files("mlperf_logging.compliance_checker")
    tested = set()
    for name in ("4.0.0/closed_resnet", "3.1.0/closed_resnet_lars", "3.1.0/closed_resnet_sgd"):
        content = YAML(typ="safe").load((root / f"training_{name}.yaml").read_text())
        tested |= {each["KEY"]["NAME"] for each in content if "CHECK" in each["KEY"]}
        for each in content:
            if each["KEY"]["NAME"] == "eval_accuracy":
                assert f">= {TARGET:.4f}" in each["KEY"]["ATLEAST_ONE_CHECK"]
    assert tested - {"global_batch_size", "eval_accuracy"} == OF_THE_PACKAGE.keys()


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(IMAGENET.glob("resnet50_*.yaml")) if "schedule_free" not in path.name],
    ids=lambda path: path.stem.removeprefix("resnet50_"),
)
def test_the_package_finds_the_same_of_what_a_log_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every recipe of ResNet-50, logged as of the closed division, by the rules of the package."""
    monkeypatch.setenv("MLPERF_SUBMISSION_DIVISION", "closed")
    of = recipe(path.stem.removeprefix("resnet50_"))
    found = [rule.check for rule in broken_rules(of)]
    log = write(tmp_path, of, [start(of), finish("paused")])
    keys = {each["key"] for each in lines(log)}
    checker = mlp_compliance.make_checker("training", "4.0.0", quiet=True, werror=False)
    if of.optimizer.kind not in {"lars", "sgd"}:
        with pytest.raises(FileNotFoundError, match=f"closed_resnet_{of.optimizer.kind}"):
            checker.check_file(log, "training_4.0.0/common.yaml")
        assert "optimizer.kind" in found
        return
    checker.check_file(log, "training_4.0.0/common.yaml")
    theirs = {OF_THE_PACKAGE[key] for key in checker.overwritable if key in OF_THE_PACKAGE}
    ours = {OF_THE_PACKAGE[key] for key in OF_THE_PACKAGE.keys() & keys} & set(found)
    missing = {"schedule.decay.power", "schedule.decay.end_lr"} & theirs
    if "schedule.decay.kind" in found:  # nothing of a polynomial is in the log
        theirs -= missing
    assert ours == theirs


def without_rule(section: dict[str, Any], above: str = "") -> list[str]:
    """Return the keys of a recipe that neither have a rule nor are free."""
    of_rules = {rule.check for rule in RULES}
    found = []
    for name, value in section.items():
        key = f"{above}{name}"
        if key in FREE | of_rules:
            continue
        has_keys = isinstance(value, dict) and value
        found += without_rule(value, f"{key}.") if has_keys else [key]
    return found


@pytest.mark.parametrize("optimizer", ["{kind: lars}", "{kind: sgd}"])
def test_every_key_has_a_rule_or_is_free(optimizer: str) -> None:
    tree = recipe(BY_THE_RULES, f"optimizer={optimizer}").model_dump(mode="json")
    assert without_rule(tree) == []


@pytest.mark.parametrize("batch", [point["BS"] for point in POINTS.values()])
def test_the_points_of_the_reference_break_no_rule(batch: int) -> None:
    assert settings(f"{batch}_mlperf") == []


def test_nvidias_and_googles_entries_break_none_and_fujitsus_breaks_these() -> None:
    """NVIDIA's and Google's were published in the closed division, Fujitsu's in the open one."""
    for name in ("57344_nvidia", "8192_google", "32768_google", "55296_google", "65536_google"):
        assert settings(name) == [], name
    assert settings("86016_fujitsu") == [
        *("data.crop_area", "data.crop_aspect", "model.head_std", "optimizer.convention"),
        *("optimizer.eta", "optimizer.eps", "schedule.decay.power"),
        *("schedule.decay.end_lr", "polish.clean", "polish.statistics"),
    ]


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ("batch.global_batch=32640", "optimizer.momentum"),  # 0.94 is free from 32,768 on
        ("batch.global_batch=65536", None),
        ("optimizer.momentum=0.9", None),
        ("optimizer.weight_decay=0.0002", None),
        ("optimizer.weight_decay=0.0004", None),
        ("optimizer.weight_decay=0.0003", "optimizer.weight_decay"),
        ("optimizer.weight_decay=0", "optimizer.weight_decay"),
        ("optimizer.eps=1e-9", "optimizer.eps"),
        ("optimizer.convention=scaled-momentum", None),
        ("optimizer.convention=outside", "optimizer.convention"),
        ("optimizer.clip_ratio=50", "optimizer.clip_ratio"),
        ("schedule.peak_lr=19.405", None),
        ("schedule.warmup={steps: 77}", None),
        ("schedule.decay.power=1.5", "schedule.decay.power"),
        ("schedule.decay={kind: cosine}", "schedule.decay.kind"),
        ("schedule.start_lr=0.1", "schedule.start_lr"),
        ("loss.label_smoothing=0", None),
        ("loss.label_smoothing=0.15", "loss.label_smoothing"),
        ("loss.off_target=others", None),
        ("data.augment={kind: trivial_augment}", "data.augment"),
        ("model.early={names: [conv1.weight], until: {epochs: 1}}", "model.early"),
        ("model.backbone={lr_factor: 0.1}", "model.backbone"),
        ("loss={kind: bce}", "loss.kind"),
        ("loss.class_weights=balanced", "loss.class_weights"),
        ("optimizer.clip_norm=1", "optimizer.clip_norm"),
        ("optimizer.layer_decay=0.9", "optimizer.layer_decay"),
        ("batch.bn_span=256", None),
        ("batch.bn_span=null", None),
        ("precision=bf16", None),
        ("data.crop_area=[0.08, 1.0]", "data.crop_area"),
        ("data.crop_area=null", "data.crop_area"),
        ("data.val_samples=49999", "data.val_samples"),
        ("data.source=synthetic", "data.source"),
        ("data.held_out={samples: 50000}", "data.held_out"),
        ("model.name=resnet50d", "model.name"),
        ("model.arguments={drop_rate: 0.1}", "model.arguments"),
        ("model.weights=others.pth", "model.weights"),
        ("polish={ema: 0.99}", "polish.ema"),
        ("evaluation.offset_epochs=0", None),
        ("evaluation.offset_epochs=3.5", "evaluation.offset_epochs"),
        ("evaluation.every_epochs=1", "evaluation.every_epochs"),
        ("evaluation.views=6", "evaluation.views"),
        ("execution={cache: memory}", "execution.cache"),
        ("execution.device_batch=64", None),
    ],
)
def test_a_change_breaks_the_rule_of_its_setting_alone(change: str, broken: str | None) -> None:
    """By the table for ResNet in MLPerf's training_rules.adoc, round 4.0."""
    assert settings(BY_THE_RULES, change) == ([broken] if broken else [])


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ("schedule.peak_lr=7.35", None),
        ("schedule.peak_lr=7.3505", "schedule.peak_lr"),
        ("schedule.warmup={epochs: 2.5}", "schedule.warmup"),
        ("schedule.warmup=null", None),
        ("optimizer={kind: sgd, momentum: 0.95, weight_decay: 1e-4}", "optimizer.momentum"),
        ("optimizer={kind: sgd, weight_decay: 1e-4, nesterov: true}", "optimizer.nesterov"),
        ("optimizer.bias_lr=1", "optimizer.bias_lr"),
        ("optimizer.bias_weight_decay=1e-4", "optimizer.bias_weight_decay"),
    ],
)
def test_sgd_has_rules_of_its_own(change: str, broken: str | None) -> None:
    sgd = "optimizer={kind: sgd, weight_decay: 5e-5}"
    assert settings(BY_THE_RULES, sgd) == []
    assert settings(BY_THE_RULES, sgd, change) == ([broken] if broken else [])


def test_the_command_lists_each_rule_with_what_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--mlperf-closed", "resnet50_57344_nvidia"]) == DONE
    assert "resnet50_57344_nvidia: keeps the rules" in capsys.readouterr().out
    two = ["resnet50_86016_fujitsu", "resnet50_32768_mlperf"]
    assert main(["check", "--mlperf-closed", *two]) == FAILED
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("resnet50_86016_fujitsu: breaks 10 rules of MLPerf's closed")
    assert shown[6].split()[:2] == ["optimizer.eps", "1e-09"]
    assert "resnet50_32768_mlperf: keeps" in shown[11]
    assert main(["check", "resnet50_86016_fujitsu"]) == DONE
    assert capsys.readouterr().out == "resnet50_86016_fujitsu: ok\n"
    assert main(["check", "--mlperf-closed", "no-such-recipe"]) == USER
