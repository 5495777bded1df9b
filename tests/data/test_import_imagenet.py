from pathlib import Path

import pytest
import tars
from importing import contents, imported, png

from largebatch.errors import DataError


def test_imagenets_archives_are_imported_unchanged(tmp_path: Path) -> None:
    """Train is a tar with a tar per class; val has no folders, and its classes are in a list."""
    inner = {
        name: b"".join(
            tars.member(f"{name}_{n}.JPEG", png(n + 10 * place)) for n in range(3 - place)
        )
        for place, name in enumerate(("n01440764", "n01443537"))
    }
    tars.write(
        tmp_path / "ILSVRC2012_img_train.tar",
        *(tars.member(f"{name}.tar", content + tars.END) for name, content in inner.items()),
    )
    val = [tars.member(f"ILSVRC2012_val_{n:08d}.JPEG", png(100 + n)) for n in (3, 1, 2)]
    tars.write(tmp_path / "ILSVRC2012_img_val.tar", *val)
    with pytest.raises(DataError) as caught:
        imported(tmp_path, tmp_path / "out")
    message = str(caught.value)
    assert f"expected {tmp_path}/val_labels.txt with the classes of the 3 images of" in message
    assert "imagenet_2012_validation_synset_labels.txt" in message
    (tmp_path / "val_labels.txt").write_text("n01443537\nn01440764\nn01440764\n")
    out = imported(tmp_path, tmp_path / "out")
    assert contents(out) == {
        "n01440764": [png(0), png(1), png(2)],
        "n01443537": [png(10), png(11)],
    }
    assert contents(out, "val") == {"n01440764": [png(102), png(103)], "n01443537": [png(101)]}


@pytest.mark.parametrize("text", ["cat\ndog\n", "cat\n\ndog\n", "cat\ndog\ncat\ndog\n"])
def test_a_list_of_classes_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    tars.write(
        tmp_path / "train.tar", tars.member("cat/a.png", png(0)), tars.member("dog/a.png", png(1))
    )
    tars.write(tmp_path / "val.tar", *(tars.member(f"{n}.png", png(n)) for n in range(3)))
    (tmp_path / "val_labels.txt").write_text(text)
    with pytest.raises(DataError, match=r"val_labels.txt: has \d classes; expected .* 3 images"):
        imported(tmp_path, tmp_path / "out")
