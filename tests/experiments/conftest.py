"""An experiment of one's own, before it has run and after."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from own_experiment import start, write_own


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of an experiment of one's own, in the folder that is current."""
    monkeypatch.chdir(tmp_path)
    return write_own()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A folder in which it has run."""
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        start(write_own())
    return folder


@pytest.fixture
def done(own, finished):
    """The name of an experiment of one's own, which has run, in the folder that is current."""
    shutil.copytree(finished, ".", dirs_exist_ok=True)
    return own
