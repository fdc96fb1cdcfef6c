"""Files and folders that appear whole or not at all, whoever else writes them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from attnzoo.files import whole_folder, write_whole


def test_a_file_that_several_write_is_whole_at_every_moment(tmp_path: Path) -> None:
    path, failed = tmp_path / "digests.json", list[BaseException]()
    contents = [letter * size for letter, size in (("a", 3_000_000), ("b", 10), ("c", 1_000_000))]
    write_whole(path, contents[0])

    def write(content: str) -> None:
        try:
            for _ in range(15):
                write_whole(path, content)
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = path.read_text()
        assert found in contents, (len(found), found[:1])
    assert not failed
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", "text")
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


@pytest.mark.parametrize("several", [False, True])
def test_a_full_disk_is_named(several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the system says it, without a path

    monkeypatch.setattr(os, "fsync", full)

    def write() -> None:
        if several:
            with whole_folder(tmp_path / "there") as part:
                (part / "new").write_text("new")
        else:
            write_whole(tmp_path / "there", "text")

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'there'}'"):
        write()
    assert not [*tmp_path.iterdir()]


def test_a_file_takes_the_place_of_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".file.part").write_text("a long text that was cut")
    write_whole(tmp_path / "file", b"short")
    assert (tmp_path / "file").read_bytes() == b"short"
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_folder_that_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    with whole_folder(folder) as part:
        (part / "first").write_text("1")
        with pytest.raises(FileExistsError, match="tokens.*another process does"), whole_folder(folder):
            raise AssertionError("two write one folder")
        (part / "second").write_text("2")
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second"]
    assert [*tmp_path.iterdir()] == [folder]


def test_a_folder_does_not_keep_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".tokens.part" / "inner").mkdir(parents=True)
    (tmp_path / ".tokens.part" / "inner" / "old").write_text("old")
    with whole_folder(tmp_path / "tokens") as part:
        (part / "new").write_text("new")
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == ["new"]
    assert [*tmp_path.iterdir()] == [tmp_path / "tokens"]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with whole_folder(tmp_path / "tokens") as part:
            (part / "new").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fill()
    assert not [*tmp_path.iterdir()]
