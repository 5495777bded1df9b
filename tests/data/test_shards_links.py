import tarfile
from pathlib import Path

import pytest
import tars
from importing import png

from largebatch.data.index.index import BadImagesError, read_folder

NOT_WHOLE = {
    "a symbolic link": (tars.symbolic("b.png", "a.png"), "b.png: it is a link to a.png"),
    "a hard link": (tars.hard("b.png", "a.png"), "b.png: it is a link to a.png"),
    "a sparse file": (tars.sparse("b.png", png(0)), "b.png: it is a sparse file"),
    "a device": (tars.member("b.png", kind=tarfile.CHRTYPE), "b.png: it is a special"),
    "a linked label": (
        tars.member("b.png", png(0)) + tars.hard("b.cls", "a.cls"),
        "b.cls: it is a link to a.cls, expected a whole file; create the tar with: tar",
    ),
    "nothing but links": (
        tars.hard("b.cls", "a.cls") + tars.hard("b.png", "a.png"),
        "b.png: it is a link to a.png",
    ),
}


@pytest.mark.parametrize(
    ("members", "reason"), [pytest.param(*each, id=name) for name, each in NOT_WHOLE.items()]
)
def test_a_sample_without_bytes_in_the_tar_is_named(
    tmp_path: Path, members: bytes, reason: str
) -> None:
    before = tars.member("a.png", png(0)) + tars.member("a.cls", b"0")
    after = tars.member("c.png", png(0)) + tars.member("c.cls", b"1")
    label = tars.member("b.cls", b"0") if b"b.cls" not in members else b""
    folder, link = tars.member("b", kind=tarfile.DIRTYPE), tars.symbolic("b.json", "a.json")
    tars.write(tmp_path / "train/a.tar", before, folder, members, label, link, after)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    with pytest.raises(BadImagesError) as caught:
        read_folder(tmp_path, "train")
    assert "1 of 3 images in train cannot be used" in str(caught.value)
    assert f"train/a.tar/{reason}" in str(caught.value)
