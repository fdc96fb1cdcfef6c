"""Files and folders that appear whole or not at all, whoever else writes them."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from attnzoo.files import given_by, part_of, scratch_folder, whole_folder, write_whole


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


def killed_while(work: Callable[[], object]) -> None:
    """Run ``work`` in a process that is killed before it ends."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_takes_the_place_of_what_a_kill_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        killed_while(lambda: write_whole(tmp_path / "file", "a long text that was cut"))
    assert [path.name for path in tmp_path.iterdir()] == [".file.part"]
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
    def fill_and_die() -> None:
        with whole_folder(tmp_path / "tokens") as part:
            (part / "inner").mkdir()
            (part / "inner" / "old").write_text("old")
            die()

    killed_while(fill_and_die)
    assert [path.name for path in tmp_path.iterdir()] == [".tokens.part"]
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


OTHERS = {  # what somebody else may have where a file or folder is to be made, before it takes its place
    "a file": lambda place, home: place.write_text("mine"),
    "a folder": lambda place, home: [place.mkdir(), (place / "mine.txt").write_text("mine")],
    "a link to a folder": lambda place, home: place.symlink_to(home),
    "a link to an empty folder": lambda place, home: place.symlink_to(home / "empty"),
    "a link to a file": lambda place, home: place.symlink_to(home / "thesis.txt"),
    "a link to nothing": lambda place, home: place.symlink_to("nowhere"),
    "a folder whose mark is a link": lambda place, home: [
        place.mkdir(), (place / "made-by-attnzoo").symlink_to(home / "thesis.txt"),
    ],
}  # fmt: skip


def everything(folder: Path) -> dict[str, object]:
    """What is below a folder: the contents of files, the targets of links."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_dir() or path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("made", ["a file", "a folder", "a scratch folder"])
def test_what_others_have_where_something_is_made_is_left_alone_and_named(made: str, kind: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "empty").mkdir(parents=True)
    (home / "thesis.txt").write_text("years of work")
    OTHERS[kind](tmp_path / ".out.part", home)
    before = everything(tmp_path)

    def make() -> None:
        if made == "a file":
            write_whole(tmp_path / "out", "new")
        else:
            with whole_folder(tmp_path / "out") if made == "a folder" else scratch_folder(part_of(tmp_path / "out")):
                raise AssertionError("made in what others have")

    with pytest.raises(FileExistsError, match=r"\.out\.part'.*leaves it alone: rename it"):
        make()
    assert everything(tmp_path) == before


def test_what_a_killed_run_left_goes_without_following_its_links(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")

    def fill_and_die() -> None:
        with whole_folder(tmp_path / "out") as part:
            (part / "link").symlink_to(home)
            die()

    killed_while(fill_and_die)
    (tmp_path / ".out.part" / "out" / "thesis.txt").symlink_to(home / "thesis.txt")
    with whole_folder(tmp_path / "out") as part:
        (part / "new").write_text("new")
    assert everything(tmp_path) == {
        "home": True, "home/thesis.txt": b"years of work", "out": True, "out/new": b"new",
    }  # fmt: skip


def test_a_folder_appears_where_a_link_to_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/out")
    with whole_folder(tmp_path / "out") as part:
        (part / "new").write_text("new")
    assert everything(tmp_path) == {"disk": True, "disk/out": True, "disk/out/new": b"new", "out": "disk/out"}


def test_a_python_file_is_read_anew_though_its_size_and_second_are_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "mine.py"
    for answer in (1, 2):
        path.write_text(f"ANSWER = {answer}")
        os.utime(path, (0, 0))
        assert given_by(path, "ANSWER") == answer
    assert os.listdir(tmp_path) == ["mine.py"]
    with pytest.raises(ValueError, match="expected a Python file"):
        given_by(tmp_path / "mine.txt", "ANSWER")
