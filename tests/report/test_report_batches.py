"""What a report shows of a run whose global batch and image size change."""

from pathlib import Path

from fake_runs import FakeRun

from largebatch.report import write_report


def test_a_report_names_batches_and_image_sizes_and_draws_a_line_where_they_change(
    tmp_path: Path,
) -> None:
    change = {"step": 300, "position": 300 * 96, "global_batch": 192, "lr_factor": 1.0}
    run = FakeRun(tmp_path / "run", clean_steps=0)
    sizes = [{"end": 200, "image_size": 96}, {"end": 600, "image_size": 128}]
    run.plan |= {"batch_changes": [change], "sizes": sizes}
    run.curve(600, best=0.97)
    run.end("train", 600, 0.9667)
    page = write_report(run.write()).read_text(encoding="utf-8")
    assert "; 192 from step 300" in page
    assert "60.1 epochs" in page  # 300 updates of 96 and 300 of 192 images, of 1,437
    assert "1, then 2" in page  # accumulation
    for text in ("batch 192", "128 px"):
        assert page.count(text) >= 2  # beside the losses and the speed
    assert "96 px" not in page
