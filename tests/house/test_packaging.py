"""The two symlinked packages, the wheel, and what importing attnzoo costs and brings along."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import attnzoo

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("kernels", "recurrences")
HEAVY = ("triton", "transformers", "matplotlib", "accelerate", "omegaconf", "typer", "fla", "rich", "tensorboard")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str, folder: Path, *paths: Path, isolated: bool = False) -> str:
    """What a fresh interpreter prints, started in ``folder`` with ``paths`` on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    flags = ["-I"] if isolated else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.split()


# the symlinks


@pytest.mark.parametrize("name", LINKS)
def test_link_is_relative_and_resolves(name: str) -> None:
    link = ROOT / "attnzoo" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert any(link.rglob("*.py"))


@pytest.mark.parametrize("name", LINKS)
def test_link_is_committed_as_a_link(name: str) -> None:
    done = subprocess.run(["git", "ls-files", "-s", f"attnzoo/{name}"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    assert done.stdout.startswith("120000 "), "the mode of a symbolic link"
    assert len(done.stdout.splitlines()) == 1


def test_no_committed_link_is_broken() -> None:
    assert [name for name in tracked() if (ROOT / name).is_symlink() and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", LINKS)
def test_root_folder_is_no_regular_package(name: str) -> None:
    """An importable top-level ``kernels`` would shadow Hugging Face's package, which transformers imports."""
    assert not (ROOT / name / "__init__.py").exists()


def test_root_kernels_does_not_shadow_hugging_faces(tmp_path: Path) -> None:
    """From the repository root, its path first: an installed ``kernels`` still wins over our folder."""
    installed = tmp_path / "kernels"
    installed.mkdir()
    (installed / "__init__.py").write_text("OWNER = 'Hugging Face'\n")
    assert python("import kernels; print(kernels.OWNER)", ROOT, ROOT, tmp_path) == "Hugging Face"


@pytest.mark.parametrize("name", LINKS)
def test_root_folder_is_at_most_a_namespace(name: str) -> None:
    code = f"import importlib.util as u; spec = u.find_spec('{name}'); print(spec is None or spec.origin is None)"
    assert python(code, ROOT, ROOT) == "True"


def test_modules_are_known_by_one_name_and_transformers_imports_from_the_root() -> None:
    code = (
        "import sys, attnzoo; [attnzoo.get(name) for name in attnzoo.list_variants()];"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('kernels', 'recurrences')));"
        "from transformers import PretrainedConfig; print('ok')"
    )
    assert python(code, ROOT, ROOT).splitlines() == ["[]", "ok"]


# the package


def packages() -> set[str]:
    """Every folder of Python files under attnzoo, symbolic links followed."""
    found = set()
    for folder, _, files in os.walk(ROOT / "attnzoo", followlinks=True):
        if any(name.endswith(".py") for name in files) or os.path.islink(folder):
            found.add(".".join(Path(folder).relative_to(ROOT).parts))
    return found


def test_every_package_is_discovered() -> None:
    """Those behind the links too."""
    code = "import json, setuptools; print(json.dumps(setuptools.find_namespace_packages('.', **{})))"
    found = python(code.format(PROJECT["tool"]["setuptools"]["packages"]["find"]), ROOT)
    assert set(json.loads(found)) == packages()


def test_versions_agree() -> None:
    assert attnzoo.__version__ == PROJECT["project"]["version"] == version("attnzoo")


def test_torch_is_a_range() -> None:
    """The library declares ranges; the tested versions are in constraints.txt."""
    assert "torch>=2.7" in PROJECT["project"]["dependencies"]
    every = PROJECT["project"]["dependencies"] + [
        line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra
    ]
    assert not [line for line in every if "==" in line.split(";")[0]]  # a marker may compare


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source distribution of what is tracked, without the network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked(":!docs"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = "from setuptools.build_meta import build_{0}; build_{0}({1!r})"
    python(build.format("sdist", str(target)), source)
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
    python(build.format("wheel", str(target)), archive.with_name(archive.name.removesuffix(".tar.gz")))
    (built,) = target.glob("*.whl")
    return built


def test_wheel_holds_every_tracked_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = set(tracked("attnzoo/*.py"))
    expected |= {f"attnzoo/{name}" for name in tracked("kernels/*.py", "recurrences/*.py")}
    assert expected <= names
    assert any(re.fullmatch(r"attnzoo/kernels/fox/\w+\.py", name) for name in names)
    assert not [name for name in names if name.startswith(("kernels/", "recurrences/", "tests/"))]


def test_wheel_holds_the_data_files_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    data = [name for name in tracked("attnzoo") if not name.endswith(".py") and not (ROOT / name).is_symlink()]
    assert {"attnzoo/py.typed", *data} <= names


def test_source_distribution_holds_the_package_and_its_papers_alone(wheel: Path) -> None:
    (folder,) = (path for path in wheel.parent.iterdir() if path.is_dir())
    about = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "attnzoo"}
    assert about == {path.name for path in folder.iterdir()} - {"PKG-INFO", "setup.cfg", "attnzoo.egg-info", "build"}


INSTALLED = """
import attnzoo, attnzoo.kernels.fox
from attnzoo.config import load_config
from attnzoo.experiments.builtin import find_config
from attnzoo.samples import random_inputs
[attnzoo.get(name).forms["parallel"](*random_inputs(name)) for name in ("fox", "mamba2", "nope")]
assert load_config(find_config("tiny", "train")).output_dir == "runs/tiny"
"""
FIRST_TUTORIAL = """
import re, shlex, sys
from importlib.metadata import entry_points
from pathlib import Path
from click.testing import CliRunner
(script,) = entry_points(group="console_scripts", name="attnzoo")
assert script.load().__module__ == "attnzoo.cli"
page = Path(sys.argv[1]).read_text()
Path("first.yaml").write_text(re.search("```yaml\\n(.*?)```", page, re.DOTALL)[1])
short = ["steps=2", "eval_every=2", "eval_tokens=512", "checkpoint_every=2", "optimizer.warmup_steps=1", "batch_size=2"]
for block in re.findall("```bash\\n(.*?)```", page, re.DOTALL):
    words = shlex.split(block)
    ran = CliRunner().invoke(script.load().__globals__["app"], words[1:] + short * (words[1] == "train"))
    assert ran.exit_code == 0, (words, ran.output, ran.exception)
    print(words[1])
print(Path("first.html").stat().st_size > 10_000, attnzoo.__file__)
"""


def test_an_installed_wheel_works_and_runs_the_first_tutorial(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True)
    page = ROOT / "docs" / "tutorials" / "first_fox.md"
    code = f"import sys; sys.argv.append({str(page)!r})\n{INSTALLED}{FIRST_TUTORIAL}"
    printed = python(code, tmp_path, site).splitlines()
    assert printed == ["train", "report", "generate", f"True {site / 'attnzoo' / '__init__.py'}"]


def test_works_uninstalled(tmp_path: Path) -> None:
    """From a checkout on the path alone, reached by another name, so that an installed attnzoo cannot help."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("attnzoo", *LINKS):
        (checkout / name).symlink_to(ROOT / name)
    code = "import attnzoo; [attnzoo.get(n) for n in attnzoo.list_variants()]; print(attnzoo.__file__)"
    assert python(code, tmp_path, checkout) == str(checkout / "attnzoo" / "__init__.py")


# importing


def test_import_is_quick_and_light_and_a_layer_runs_without_the_compiler(tmp_path: Path) -> None:
    """On top of torch, less than a third of the processor time that torch takes, and none of the heavy packages.

    Importing the compiler takes as long as importing torch.
    """
    code = (
        "import sys, time, json\n"
        "times = [time.process_time()]\n"
        "import torch\n"
        "before, times = set(sys.modules), [*times, time.process_time()]\n"
        "import attnzoo\n"
        "attnzoo.Gate, attnzoo.Prune, attnzoo.get\n"
        "times.append(time.process_time())\n"
        "print(json.dumps([times, sorted({m.split('.')[0] for m in set(sys.modules) - before})]))\n"
        "with torch.no_grad():\n"
        "    attnzoo.build_attention('fox', hidden_size=16, num_heads=2)(torch.randn(1, 4, 16))\n"
        "from attnzoo.models.swap import Unfilled\n"
        "with torch.device('meta'), Unfilled():\n"
        "    [attnzoo.build_attention(name, hidden_size=16, num_heads=2) for name in ('fox_rope', 'gated_deltanet')]\n"
        "print({'sympy', 'torch._dynamo'} & {*sys.modules})"
    )
    for _ in range(2):  # the first import of a changed file compiles it
        imported, compiler = python(code, tmp_path, ROOT).splitlines()
        (start, between, end), modules = json.loads(imported)
        if end - between < (between - start) / 3:
            break
    assert end - between < (between - start) / 3
    assert not set(HEAVY) & set(modules)
    assert compiler == "set()"
