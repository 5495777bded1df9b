"""The runs of `make measure`: equal searches, resumption and pages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from largebatch import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import measure  # noqa: E402
import measure_pages  # noqa: E402
from measure import ARMS, FACTORS, SEEDS, TRIALS, Arm, Job, Measurement, Search  # noqa: E402

SMALL, LARGE, NESTEROV, LONGER = (arm for arm in ARMS if arm.data == "cifar10")


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.key)
@pytest.mark.parametrize("searching", [True, False])
def test_every_arm_can_be_planned_and_has_no_polishing_of_its_own(
    arm: Arm, searching: bool, tmp_path: Path
) -> None:
    job = Job(arm=arm, seed=2, rate=0.25, work=tmp_path, searching=searching)
    plan = make_plan(job.recipe, workers=1)
    assert job.recipe.polish is None
    assert (job.recipe.seed, job.recipe.schedule.peak_lr) == (2, 0.25)
    whole = make_plan(load_recipe(arm.recipe), workers=1)
    share = arm.longer * (measure.SEARCH_PART if searching else 1)
    assert plan.epoch(plan.steps) == pytest.approx(share * whole.epoch(whole.steps), rel=0.02)
    assert plan.warmup_steps / plan.steps == pytest.approx(
        whole.warmup_steps / whole.steps, rel=0.05
    )
    held_out = measure.TUNING_IMAGES if searching else 0
    assert plan.train_samples == measure.IMAGES[arm.data] - held_out


def reach(work: Measurement, top1: float) -> Job:
    found = work.next()
    assert found is not None
    trial, job = found
    work.take(trial, job, {"arms": {"control": {"top1": top1, "loss": 1.0}}, "seconds": 60.0})
    return job


def test_every_arm_is_searched_with_as_many_trials_before_its_seeds(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    work = Measurement(path, tmp_path, ["cifar10"])
    searched = [reach(work, 0.5 + 0.01 * number) for number in range(3 * TRIALS)]
    assert all(job.searching for job in searched)
    for arm in (SMALL, LARGE, NESTEROV):
        rates = [job.rate for job in searched if job.arm == arm]
        assert len(rates) == TRIALS
        start = work.searches[arm.key].start
        assert rates == pytest.approx([start * factor for factor in FACTORS], rel=1e-3)
    best = {arm.key: work.searches[arm.key].best for arm in (SMALL, LARGE, NESTEROV)}
    trained = [reach(work, 0.9) for _ in range(4)]
    again = Measurement(path, tmp_path, ["cifar10"])  # stopped and restarted
    trained += [reach(again, 0.9) for _ in range(SEEDS * 4 - 4)]
    assert again.next() is None
    assert [job.seed for job in trained] == [1] * 4 + [2] * 4 + [3] * 4
    assert len({job.key for job in trained}) == SEEDS * 4
    for job in trained:
        assert job.rate == best[LARGE.key if job.arm.rate_of else job.arm.key]
    assert set(json.loads(path.read_text())["runs"]) == {job.key for job in trained}


def test_an_interrupted_trial_is_repeated_at_its_rate(tmp_path: Path) -> None:
    first = Search(LARGE, tmp_path).ask()
    assert first is not None
    again = Search(LARGE, tmp_path)
    found = again.ask()
    assert found is not None
    rates = [found[1].rate]
    again.study.tell(found[0], 0.5)
    while found := again.ask():
        rates.append(found[1].rate)
        again.study.tell(found[0], 0.4)
    assert first[1].rate in rates
    assert len(again.done) == TRIALS
    assert again.study.best_value == 0.5


def test_a_machine_without_trials_continues_from_the_results(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "results.json", (tmp_path / "a", tmp_path / "b")
    first.mkdir()
    second.mkdir()
    work = Measurement(path, first, ["cifar10"])
    trials = [reach(work, 0.5).key for _ in range(3 * TRIALS - 4)]
    other = Measurement(path, second, ["cifar10"])
    assert [other.searches[key].done for key in work.searches] == [
        pytest.approx(search.done) for search in work.searches.values()
    ]
    trials += [reach(other, 0.5).key for _ in range(4)]
    assert len(trials) == len(set(trials)) == 3 * TRIALS
    assert not reach(other, 0.9).searching
    partly = Measurement(path, second, ["cifar10", "small"])
    reach(partly, 0.9)
    assert json.loads(path.read_text())["search"].keys() == work.searches.keys()


def test_runs_at_another_rate_than_the_best_are_not_mixed_in(
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.json"
    search = {
        arm.key: {str(rate): 0.5 + 0.01 * rate for rate in (0.3, 0.4, 0.45, 0.48, 0.5)}
        for arm in (SMALL, LARGE, NESTEROV)
    }
    runs = {f"{SMALL.key}, seed 1": fake(SMALL, 1, 0.9)}
    earlier: dict[str, Any] = {"other crops": {"search": {}}}
    path.write_text(json.dumps({"search": search, "runs": runs, "earlier": earlier}))
    work = Measurement(path, tmp_path, ["cifar10"])
    with pytest.raises(SystemExit, match="was trained at a rate of 0.2, .* has found 0.5"):
        work.next()
    work.write()
    assert json.loads(path.read_text())["earlier"] == earlier


def fake(arm: Arm, seed: int, top1: float) -> dict[str, Any]:
    ends = {"control": top1}
    if arm.longer == 1:
        ends |= {"clean": top1 + 0.01, "clean + statistics": top1 + 0.01 + 0.001 * seed}
    return {
        "data": arm.data, "arm": arm.name, "seed": seed, "rate": 0.2, "seconds": 3000.0,
        "arms": {end: {"top1": value, "loss": 0.3} for end, value in ends.items()},
        "curve": [[1.0, 0.5], [2.0, top1]],
    }  # fmt: skip


def test_a_page_has_the_differences_and_names_missing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Any] = {}
    for seed in (1, 2, 3):
        runs |= {f"s{seed}": fake(SMALL, seed, 0.92), f"l{seed}": fake(LARGE, seed, 0.89)}
        runs[f"n{seed}"] = fake(LONGER, seed, 0.905 + 0.002 * seed)
    results = tmp_path / "recipes_x_2026-01-01.json"
    results.write_text(json.dumps({"runs": runs, "machine": "m, 2 cores", "search": {}}))
    monkeypatch.setattr(measure_pages, "newest", lambda *_: results)
    monkeypatch.setattr(measure_pages, "PAGES", tmp_path / "pages")
    measure_pages.main()
    names = {path.name for path in (tmp_path / "pages").iterdir()}
    pages = {f"cifar10_resnet9_{n}.{end}" for n in (128, 1600) for end in ("md", "png")}
    assert names == pages | {"pairs.md"}
    text = (tmp_path / "pages" / "cifar10_resnet9_1600.md").read_text()
    assert "| 90.20 (89.95 to 90.45, n = 3) | +1.20 (+0.95 to +1.45, n = 3) |" in text
    text = (tmp_path / "pages" / "pairs.md").read_text()
    assert "at the small one | -3.00 (-3.00 to -3.00, n = 3) † |" in text
    assert "polished, against small | -1.80 (" in text
    assert "polished, against a quarter more epochs | -0.70 (-0.95 to -0.45, n = 3) |" in text
    assert "Polishing gains more at the large batch, LARS, than at the small one | +0.00 (" in text
    # 1.1 of 1.7, 1.2 of 1.9 and 1.3 of 2.1 times 25 %
    assert "Epochs that polishing saves, % of the schedule, LARS | 16 (" in text
    assert "Nesterov SGD against LARS, large batch | not measured yet |" in text
