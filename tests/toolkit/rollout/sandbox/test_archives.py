"""Files on their way into and out of containers: nothing lands where it should not."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.archives import UID, pack, unpack

MOST = 1 << 20


def member(name: str, kind: bytes = tarfile.REGTYPE, *, leads_to: str = "", size: int = 0, mode: int = 0o644):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, leads_to, size, mode
    return info


def archive(*members: tarfile.TarInfo) -> list[bytes]:
    """As the engine sends it: in pieces."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for each in members:
            tar.addfile(each, io.BytesIO(b"x" * each.size))
    data = buffer.getvalue()
    return [data[at : at + 700] for at in range(0, len(data), 700)]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_what_is_packed_is_the_agents(tmp_path: Path):
    """Below a name, with the folders on the way; a pipe is left out."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("text")
    (tmp_path / "a" / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "a" / "pipe")
    into = io.BytesIO()
    pack(tmp_path / "a", "deep/er", into, MOST)
    with tarfile.open(fileobj=into) as tar:
        found = {each.name: (each.type, each.uid) for each in tar}
    assert {uid for _, uid in found.values()} == {UID}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "deep": tarfile.DIRTYPE, "deep/er": tarfile.DIRTYPE, "deep/er/file": tarfile.REGTYPE,
        "deep/er/link": tarfile.SYMTYPE,
    }  # fmt: skip


def test_too_much_is_not_packed(tmp_path: Path):
    """A file that is nothing but a hole counts as large as it says."""
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(MOST + 1)
    with pytest.raises(SandboxError, match="holds more than"):
        pack(tmp_path, "", io.BytesIO(), MOST)


def test_a_folders_contents_come_out(tmp_path: Path):
    """Without the folder's own name; links of both kinds stay links, modes lose what is dangerous."""
    unpack(
        archive(
            member("work", tarfile.DIRTYPE), member("work/a", size=3, mode=0o4755),
            member("work/hard", tarfile.LNKTYPE, leads_to="work/a"),
            member("work/soft", tarfile.SYMTYPE, leads_to="/etc/passwd"),
            member("work/pipe", tarfile.FIFOTYPE), member("work/device", tarfile.CHRTYPE),
        ),
        tmp_path / "out", MOST,
    )  # fmt: skip
    out = tmp_path / "out"
    assert names(out) == ["a", "hard", "soft"]
    assert (out / "a").stat().st_ino == (out / "hard").stat().st_ino
    assert (out / "a").stat().st_mode & 0o7777 == 0o755
    assert str((out / "soft").readlink()) == "/etc/passwd"


def test_a_single_file_comes_out_under_the_targets_name(tmp_path: Path):
    """Whatever it is called inside."""
    unpack(archive(member("report.json", size=3)), tmp_path / "out", MOST)
    assert (tmp_path / "out").read_bytes() == b"xxx"


@pytest.mark.parametrize(
    "hostile",
    [
        (member("work/link", tarfile.SYMTYPE, leads_to="{outside}"), member("work/link/new", size=3)),
        (member("work/../../new", size=3),),
        (member("work/hard", tarfile.LNKTYPE, leads_to="work/../../secret"), member("work/hard", size=3)),
        (member("work/link", tarfile.SYMTYPE, leads_to="../outside/secret"), member("work/link", size=3)),
        (
            member("work/link", tarfile.SYMTYPE, leads_to="{outside}"),
            member("work/link/new", tarfile.SYMTYPE, leads_to="x"),
        ),
    ],
    ids=["through a link", "upwards", "hard link", "over a link", "link through a link"],
)
def test_nothing_is_written_outside_of_the_target(tmp_path: Path, hostile: tuple[tarfile.TarInfo, ...]):
    """What tries is refused, or lands inside."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    for each in hostile:
        each.linkname = each.linkname.replace("{outside}", str(outside))
    with suppress(SandboxError):  # refused: as good
        unpack(archive(member("work", tarfile.DIRTYPE), *hostile), tmp_path / "out", MOST)
    assert names(outside) == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert set(names(tmp_path)) - {"outside", "outside/secret", "out"} <= {
        "out/link", "out/link/new", "out/hard", "out/new",
    }  # fmt: skip


def test_links_that_lie_in_the_target_are_not_followed(tmp_path: Path):
    """A second take replaces what the first brought."""
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").symlink_to(outside)
    unpack(archive(member("work", tarfile.DIRTYPE), member("work/a", size=3)), tmp_path / "out", MOST)
    assert outside.read_text() == "secret"
    assert (tmp_path / "out" / "a").read_bytes() == b"xxx"


def test_too_much_does_not_come_out(tmp_path: Path):
    """The stream is cut where the bound is."""
    with pytest.raises(SandboxError, match="larger than its disk"):
        unpack(archive(member("file", size=MOST)), tmp_path / "out", MOST)
