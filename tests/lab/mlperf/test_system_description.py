"""A draft of a system description holds what is known, marks the rest, and passes once filled."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from mlperf_logging.system_desc_checker.system_desc_checker import check_system_desc
from mlperf_logs import finish, recipe, run_folders

from largebatch import accelerator
from largebatch.cli.main import DONE, FAILED, main
from largebatch.lab.mlperf.referee import MARK
from largebatch.lab.mlperf.system_description import describe
from largebatch.tracking.events import Finish

SUBMISSION = {"ORG": "Contoso", "PLATFORM": "2xNode", "STATUS": "cloud", "DIVISION": "open"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's folder with the log of a submission and a summary, of 16 workers."""
    for key, value in SUBMISSION.items():
        monkeypatch.setenv(f"MLPERF_SUBMISSION_{key}", value)
    (made,) = run_folders(tmp_path, [recipe("32768_mlperf")], [56.0])
    ended = finish()
    assert isinstance(ended, Finish)
    versions = {"python": "3.12.1", "largebatch": "1.2", "torch": "2.8.0", "torchvision": "0.23"}
    summary = replace(ended.summary, workers=16, commit="abc", versions=versions)
    summary.write(made / "summary.json")
    return made


def fill(draft: dict[str, str]) -> dict[str, str]:
    return {field: text.replace(MARK, "x") for field, text in draft.items()}


def test_the_packages_checker_passes_a_draft_whose_marks_are_filled(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, words = tmp_path / "system.json", ["report", "mlperf", str(folder), "--system"]
    assert main(["report", "mlperf", str(folder), "--describe"]) == DONE
    shown = capsys.readouterr()
    file.write_text(shown.out)
    draft = json.loads(shown.out)
    marked = [field for field, text in draft.items() if text.startswith(MARK)]
    assert f"{len(marked)} of {len(draft)} fields begin with" in shown.err
    assert main([*words, str(file)]) == FAILED
    assert f"to be filled in: {', '.join(marked)}" in capsys.readouterr().out
    file.write_text(json.dumps(fill(draft)))
    assert check_system_desc(file, "training", "4.0.0")[0]
    assert main([*words, str(file)]) == DONE
    for field in draft:  # each is one that the checker asks for
        lacking = {key: text for key, text in fill(draft).items() if key != field}
        file.write_text(json.dumps(lacking))
        assert not check_system_desc(file, "training", "4.0.0")[0]


def test_a_draft_holds_what_the_run_and_the_machine_know(folder: Path) -> None:
    draft = describe(folder)
    expected = {
        "submitter": "Contoso",
        "system_name": "2xNode",
        "status": "Available cloud",
        "division": "open",
        "framework": "torch 2.8.0, largebatch 1.2",
        "other_software_stack": "python 3.12.1, torchvision 0.23",
        "sw_notes": "backend serial, commit abc",
        "host_processor_vcpu_count": str(os.cpu_count()),
    }
    assert {field: draft[field] for field in expected} == expected
    kilobytes = Path("/proc/meminfo").read_text().split()[1]
    assert float(draft["host_memory_capacity"].removesuffix(" GiB")) == pytest.approx(
        int(kilobytes) / 2**20, abs=0.51
    )
    assert draft["cooling"].startswith(MARK)


@pytest.mark.parametrize(("gpus", "nodes"), [(8, "2"), (3, f"{MARK}: of the run")])
def test_gpus_of_the_machine_are_described_and_their_nodes_counted(
    gpus: int, nodes: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(accelerator, "names", lambda: [name] * gpus)
    monkeypatch.setattr(accelerator, "memory_bytes", lambda: 80 * 2**30)
    draft = describe(folder)
    assert draft["accelerators_per_node"] == str(gpus)
    assert draft["accelerator_model_name"] == name
    assert draft["accelerator_memory_capacity"] == "80 GiB"
    assert draft["number_of_nodes"] == nodes


def test_unknown_fields_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No names in the environment, no summary, no lscpu."""
    for key in SUBMISSION:
        monkeypatch.delenv(f"MLPERF_SUBMISSION_{key}", raising=False)
    (folder,) = run_folders(tmp_path, [recipe("32768_mlperf")], [56.0])
    monkeypatch.setenv("PATH", str(tmp_path))
    draft = describe(folder)
    for field in ("submitter", "system_name", "framework", "host_processor_model_name", "sw_notes"):
        assert draft[field].startswith(MARK)
