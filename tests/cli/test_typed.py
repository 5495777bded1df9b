"""What people type who know other programs: one sentence answers, with what was meant."""

import re
import shlex

import pytest

from largebatch.cli.main import COMMANDS, DONE, USER, main, parse

PLAN = "plan resnet50_86016_fujitsu"


def typed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message that a mistake in a command is answered with."""
    code = main(shlex.split(command))
    captured = capsys.readouterr()
    assert (code, captured.out) == (USER, "")
    return captured.err


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("train digits_96 --epochs 3", "--epochs: write --set 'duration={epochs: 3}'"),
        ("train digits_96 --lr=0.1", "--lr: write --set schedule.peak_lr=0.1"),
        ("plan digits_96 --batch-size 64", "--batch-size: write --set batch.global_batch=64"),
        ("train digits_96 --weight_decay 0", "write --set optimizer.weight_decay=0"),
        ("train digits_96 --seed -1", "--seed: write --set seed=-1"),
        ("train digits_96 --lr", "--lr: write --set schedule.peak_lr=VALUE"),
        ("train digits_96 --model 'my net'", "write --set 'model.name=my net'"),
        ("train digits_96 lr=0.1", "'lr': write --set schedule.peak_lr=0.1"),
        ("evaluate run --lr 1", "--lr; `largebatch evaluate --help`"),
        ("lab suggest --batch 9 --batch-size 64", "--batch-size; did you mean '--batch'?"),
        ("train digits_96 --wrkers 2", "--wrkers; did you mean '--workers'?"),
        ("report run --lr 1", "--lr; `largebatch report --help`"),
        ("evaluate run --qqq 1", "--qqq; `largebatch evaluate --help`"),
        ("train digits_96 other", "unexpected argument 'other'"),
        ("train digits_96 --resume maybe", "'maybe'"),
        ("resume run --out other", "--out"),
        ("audit --backend serial train.py", "--backend"),
        ("trian", "no command 'trian'; did you mean 'train'?"),
        ("data improt", "no command 'data improt'; did you mean 'import'?"),
        ("help", "no command 'help'; `largebatch --help` lists them"),
        ("diagnose", "did you mean `largebatch report diagnose`?"),
        ("check digits_96 --set execution.device_batch=7", "execution.device_batch: 7"),
        ("train digits_96 --backend horovd", 'Did you mean "horovod"?'),
        ("train", "train: missing RECIPE"),
        ("check", "check: missing RECIPE"),
        ("export RUN", "export: missing --out"),
        ("data import mnist a", "data import: missing --out"),
        ("data import mnist a --out b --label x", "--label"),
        ("lab suggest digits_96", "lab suggest: missing --batch"),
        ("launch slrm digits_96 --nodes 2", "did you mean 'slurm'?"),
        ("compare a b", "largebatch report A B"),
        ("report diagnose nowhere", "nowhere"),
        ("report diagnose a b c", "'c'"),
        ("lab study rudr", "rudra"),
        ("lab study lrbench --data /images", "/images would not be read"),
        ("lab study jaeger --data no=x --out a", "--data no="),
        (f"{PLAN} --cluster abci", "'abci-v100'"),
        (f"{PLAN} --cluster abci-v100 --workers 6144", "4,352"),
        (f"{PLAN} --cluster abci-v100 --workers 2000", "2,000"),
        (f"{PLAN} --json", "--cluster"),
        (f"{PLAN} --out a.yaml", "--calibrate"),
        (f"{PLAN} --calibrate", "--out"),
        (f"{PLAN} --calibrate --out a.txt", ".yaml"),
        (f"{PLAN} --calibrate --out a.yaml --set 'optimizer={{kind: muon}}'", "optimizer.kind"),
        (f"{PLAN} --data there", "--calibrate"),
        (f"{PLAN} --calibrate --cluster dgx-a100", "--cluster"),
        *(
            (f"train digits_96 {words}", words.split()[0])
            for words in ("--workers 0", "--workers x", "--max-steps 0", "--timeout 5x",
                          "--profile 3", "--profile 5:3", "--time-limit -1")
        ),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_sentence_with_what_was_meant(
    command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = typed(command, capsys)
    assert answer in shown
    assert shown.startswith("largebatch: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("lr=0.1", "lr: unknown key; did you mean 'schedule.peak_lr'?"),
        ("batch.size=64", "batch.size: unknown key; did you mean 'batch.global_batch'?"),
        ("optimizer.lr=0.1", "optimizer.lr: unknown key; did you mean 'schedule.peak_lr'?"),
        ("batch={size: 64}", "batch.size: unknown key; did you mean 'batch.global_batch'?"),
        ("model=resnet50", "did you mean 'model.name'?"),
        ("optimizer=sgd", "did you mean 'optimizer.kind'?"),
        ("loss=3", "loss: input should be an object, got 3; see `largebatch explain loss`"),
        ("bach.global_batch=64", "bach: unknown key; did you mean 'batch'?"),
        ("optimizer.epochs=1", "optimizer.epochs: unknown key; known keys: kind, "),
        ("polish.swa.epochs=1", "polish.swa.epochs: unknown key; known keys: over, every"),
        ("polish.epochs=1", "polish.epochs: unknown key; known keys: clean, ema, swa"),
        ("schedule.epochs=9", "schedule.epochs: unknown key; known keys: peak_lr, warmup"),
        ("schedule.lr=1", "schedule.lr: unknown key; did you mean 'schedule.peak_lr'?"),
        ("schedule.warmup_epochs=4", "did you mean 'schedule.warmup.epochs'?"),
        ("data.batch_size=8", "data.batch_size: unknown key; did you mean 'batch.global_batch'?"),
        ("model.num_classes=8", "model.num_classes: unknown key; did you mean 'data.classes'?"),
    ],
)
def test_a_key_of_another_program_is_answered_with_that_of_recipes(
    key: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in typed(f"train digits_96 --set '{key}'", capsys)


def test_a_shortened_run_names_all_that_has_to_be_shorter_and_the_words_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = typed("check digits_96 --set duration.epochs=3", capsys)
    assert "schedule.warmup (75 steps)" in shown
    assert "polish.clean (75 steps)" in shown
    words = shown.partition(" add ")[2]
    assert main(shlex.split(f"check digits_96 --set duration.epochs=3 {words}")) == DONE


def test_no_arguments_print_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == DONE
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    (calls,) = re.findall("Examples:\n(.*)", shown, re.DOTALL)
    for call in calls.splitlines():
        parse(call.split()[1:])
