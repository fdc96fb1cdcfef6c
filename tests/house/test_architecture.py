"""Imports run downwards only, from the command line to the algebra, and never in a circle."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import attnzoo

ROOT = Path(attnzoo.__file__).resolve().parent

# From the ground up. A module may use its own package and every floor below it, not the other rooms of its floor.
FLOORS = (
    ("errors", "files", "lazy", "precision", "settings", "terminal"),
    ("models.config", "data.config"),
    ("data",),
    ("algebra",),
    ("kernels.common",),
    ("kernels.levels",),
    (
        "kernels.convolution",
        "kernels.decode",
        "kernels.fox",
        "kernels.linear",
        "kernels.norms",
        "kernels.path",
        "kernels.retention",
        "kernels.rotation",
    ),
    ("kernels.wall",),
    ("forms",),
    ("forgetting",),
    ("recurrences",),
    ("encodings", "readouts"),
    ("parallel",),
    ("registry",),
    ("samples",),
    ("layer",),
    ("testing",),
    ("verify",),
    ("equations", "doctor"),
    ("models", "evaluation"),
    ("training",),
    ("config",),
    ("trained",),
    ("experiments",),
    ("benchmarks", "verify_command"),
    ("cli",),
    ("__main__",),
)
REFUSED = {
    ("recurrences", "kernels"): "the two sides' code knows nothing of the kernels",
    ("training", "models.hf"): "a run is trained without Hugging Face's classes",
}
# What is imported inside a function to break a circle: (importer, imported) -> why.
LAZY: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Import:
    """``importer`` line ``line`` imports ``name`` (empty: the module itself) of ``imported``; both without attnzoo."""

    importer: str
    line: int
    imported: str
    name: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}{f'.{self.name}' if self.name else ''}"


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name without `attnzoo.`, symbolic links followed."""
    found = {}
    for folder, _, files in os.walk(ROOT, followlinks=True):
        for path in (Path(folder) / name for name in files if name.endswith(".py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """The code of every module."""
    return {module: ast.parse(path.read_text()) for module, path in modules().items()}


@cache
def imports() -> list[Import]:
    """Every import of the package's own modules, wherever in the code it stands."""
    return [
        one
        for module, tree in trees().items()
        for one in imports_of(module, tree, modules(), modules()[module].name == "__init__.py")
    ]


def imports_of(module: str, code: ast.Module, known: Collection[str], is_package: bool = False) -> Iterator[Import]:
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "attnzoo":
                    yield Import(module, node.lineno, alias.name.removeprefix("attnzoo").removeprefix("."), "")
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:  # from .op import x: one dot is the module's own package
                inside = module.split(".") if is_package else module.split(".")[:-1]
                source = ".".join(["attnzoo", *inside[: len(inside) - node.level + 1], *source.split(".")]).rstrip(".")
            if source.split(".")[0] != "attnzoo":
                continue
            source = source.removeprefix("attnzoo").removeprefix(".")
            for alias in node.names:
                inner = f"{source}.{alias.name}".removeprefix(".")
                if inner in known:
                    yield Import(module, node.lineno, inner, "")
                elif source:
                    yield Import(module, node.lineno, source, alias.name)
                else:  # the package's own exports are loaded from where they are defined
                    home = attnzoo._HOMES.get(alias.name, "registry") if alias.name in attnzoo.__all__ else ""
                    yield Import(module, node.lineno, home, alias.name)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def room(module: str) -> str:
    """The entry of FLOORS that a module belongs to: the longest that fits."""
    return max((name for floor in FLOORS for name in floor if within(module, name)), key=len, default="")


@cache
def floor(module: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if room(module) in names)


def complaint(one: Import) -> str:
    """Why an import is not in order; empty if it is."""
    for (above, below), reason in REFUSED.items():
        if within(one.importer, above) and within(one.imported, below):
            return reason
    if room(one.importer) == room(one.imported) or not one.importer or not one.imported:
        return ""  # the package's __init__ is the front door
    if floor(one.importer) > floor(one.imported):
        return ""
    side = "beside" if floor(one.importer) == floor(one.imported) else "above"
    return f"{room(one.imported)} is {side} {room(one.importer)}"


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    after: dict[str, set[str]] = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for node in after.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return seen

    reach = {node: reached(node) for node in after}
    groups = {tuple(sorted(x for x in reach[node] if node in reach.get(x, ()))) for node in after}
    return [list(group) for group in sorted(groups) if group]


def test_every_module_has_its_floor() -> None:
    """A folder that the order does not know must be put into it."""
    assert [module for module in modules() if module and module != "kernels" and not room(module)] == []


def test_imports_run_downwards() -> None:
    bad = [f"{one}: {complaint(one)}" for one in imports() if complaint(one)]
    assert not bad, "\n".join(["imports out of order:", *bad])


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = {(one.importer, one.imported) for one in imports() if one.importer != one.imported}
    found = circles(edges - set(LAZY))
    lines = [str(one) for group in found for one in imports() if {one.importer, one.imported} <= {*group}]
    assert not found, "\n".join(["circles:", *(" <-> ".join(group) for group in found), *lines])


def test_no_module_imports_a_private_name_of_another() -> None:
    bad = [str(one) for one in imports() if one.name.startswith("_") and not one.name.startswith("__")]
    assert not bad, "\n".join(bad)


def test_no_class_name_stands_in_two_files() -> None:
    files: dict[str, list[str]] = {}
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(module)
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice, "\n".join(f"class {name}: {', '.join(where)}" for name, where in twice.items())


def test_no_two_files_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not [name for name, files in names.items() if files > 1], "pytest collects one of each name"


def test_files_have_about_four_hundred_lines_at_most() -> None:
    long = {module: n for module, path in modules().items() if (n := len(path.read_text().splitlines())) > 410}
    assert not long, long


ARCHITECTURES = {"hopper", "blackwell"}


def names_of_architectures(module: str, code: ast.Module) -> list[str]:
    """Lines of kernels that name an architecture and are neither made for one, nor a plan or what defines its name."""
    told = {*ARCHITECTURES, "plan", "plans", "device"}
    if not within(module, "kernels") or told & {*module.split(".")}:
        return []
    return [f"{module}:{node.lineno}" for node in ast.walk(code)
            if isinstance(node, ast.Constant) and node.value in ARCHITECTURES]  # fmt: skip


def test_plans_alone_say_where_a_family_has_kernels_of_its_own() -> None:
    bad = [line for module, tree in trees().items() for line in names_of_architectures(module, tree)]
    assert not bad, "\n".join(bad)
    told = ast.parse('kernel = table["portable"] if forward != "hopper" else own')
    assert names_of_architectures("kernels.fox.op", told) == ["kernels.fox.op:1"]
    assert not names_of_architectures("kernels.fox.plan", told)


def heights(edges: set[tuple[str, str]]) -> dict[str, int]:
    """The floor of each node of a drawing without circles: 1 without arrows down, else above all that it leads to."""
    found: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in found:
            found[node] = 1 + max((height(b) for a, b in edges if a == node), default=0)
        return found[node]

    return {node: height(node) for edge in edges for node in edge}


def test_forms_have_five_floors_at_most() -> None:
    """Their modules, with each package inside as one room."""
    inside = {(one.importer.split(".")[1], one.imported.split(".")[1]) for one in imports()
              if one.importer.startswith("forms.") and one.imported.startswith("forms.")}  # fmt: skip
    assert heights({("a", "b"), ("b", "c"), ("a", "c")}) == {"a": 3, "b": 2, "c": 1}
    assert max(heights({(a, b) for a, b in inside if a != b}).values()) <= 5


def parameters(function: ast.FunctionDef) -> list[str]:
    of = function.args
    every = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, (of.vararg, of.kwarg))]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def test_what_travels_together_is_handed_on_whole() -> None:
    """Kernels apart, few functions have ten parameters or more, none has twenty, and few know of one option alone."""
    functions = {
        f"{module}:{node.lineno} {node.name}": parameters(node)
        for module, tree in trees().items() for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(by) for by in node.decorator_list)
    }  # fmt: skip
    many = [name for name, given in functions.items() if len(given) >= 10]
    assert len(many) <= 15, "\n".join(many)
    assert not [name for name, given in functions.items() if len(given) >= 20]
    told = [name for name, given in functions.items() if "sink" in given]
    assert len(told) <= 20, "\n".join(told)


def test_the_exceptions_are_needed() -> None:
    """An entry that no import uses any more must go."""
    assert set(LAZY) <= {(one.importer, one.imported) for one in imports()}


def cache_classes() -> set[str]:
    """Classes of the caches' own: what a form remembers, and what that is made of."""
    own = (tree for module, tree in trees().items() if within(module, "forms.caches"))
    return {node.name for tree in own for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def told_apart(code: ast.Module, classes: Collection[str]) -> list[int]:
    """Lines of code that ask whether something is one of ``classes``."""

    def named(node: ast.AST) -> bool:
        return any(getattr(x, "id", getattr(x, "attr", "")) in classes for x in ast.walk(node))

    def is_type(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "type"

    found = []
    for node in ast.walk(code):
        asks = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        if asks and any(map(named, node.args[1:])):  # type: ignore[attr-defined]
            found.append(node.lineno)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Compare) and any(map(is_type, [node.left, *node.comparators])) and named(node):
            found.append(node.lineno)
    return sorted(found)


def test_only_caches_tell_caches_apart() -> None:
    """What others must know of a state or a memory is an attribute or a method of it."""
    classes = cache_classes()
    bad = [f"{module}:{line}" for module, tree in trees().items() if not within(module, "forms.caches")
           for line in told_apart(tree, classes)]  # fmt: skip
    assert not bad, "\n".join(["they ask for the class of a cache:", *bad])


def test_caches_have_a_word_for_each_thing() -> None:
    """Pages are evicted by one call, and what is neither room nor fixed is not called so."""
    own = {module: tree for module, tree in trees().items() if within(module, "forms.caches")}
    nodes = [(module, node) for module, tree in own.items() for node in ast.walk(tree)]
    names = {(module, getattr(node, kind)) for module, node in nodes for kind in ("id", "attr", "arg", "name")
             if isinstance(getattr(node, kind, None), str)}  # fmt: skip
    assert not [name for name in names if {"room", "fixed"} & {*name[1].lower().split("_")}]
    calls = [node.func for _, node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    assert [call.attr for call in calls].count("evict") == 1


def test_a_question_for_the_class_of_a_cache_is_found() -> None:
    code = "isinstance(x, KVCache)\nisinstance(x, int | caches.PagedCache)\ntype(x) is KVCache\nisinstance(x, Tensor)\n"
    assert told_apart(ast.parse(code), {"KVCache", "PagedCache"}) == [1, 2, 3]
    assert {"KVCache", "PagedCache", "RecurrentState", "MatrixMemory", "KeyMemory", "CarriedPool"} <= cache_classes()


def test_an_import_that_climbs_and_a_circle_are_found() -> None:
    """The reader of imports sees those at the top, in functions and under TYPE_CHECKING."""
    code = "import attnzoo.layer.gates\ndef f():\n    from attnzoo.forms import softmax\n    from attnzoo import Gate\n"
    known = ["forms.softmax", "layer.gates", "algebra.oracle", "kernels.fox.op"]
    found = list(imports_of("algebra.gate", ast.parse(code), known))
    assert [str(one) for one in found[:2]] == [
        "algebra.gate:1 imports layer.gates",
        "algebra.gate:3 imports forms.softmax",
    ]
    assert [complaint(one) for one in found[:2]] == ["layer is above algebra", "forms is above algebra"]
    assert found[2] == Import("algebra.gate", 4, "algebra.gate", "Gate")
    relative = ast.parse("from .op import run\nfrom . import op\nfrom ..path.api import path_attention")
    expected = ["kernels.fox.api:1 imports kernels.fox.op.run", "kernels.fox.api:2 imports kernels.fox.op"]
    expected += ["kernels.fox.api:3 imports kernels.path.api.path_attention"]
    assert [str(one) for one in imports_of("kernels.fox.api", relative, known)] == expected
    assert str(next(imports_of("kernels.fox", relative, known, True))) == "kernels.fox:1 imports kernels.fox.op.run"
    beside = Import("kernels.path.api", 1, "kernels.fox.api", "check")
    assert complaint(beside) == "kernels.fox is beside kernels.path"
    assert complaint(Import("recurrences.gla", 1, "kernels.fox", "")) == REFUSED["recurrences", "kernels"]
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "a")}) == [["a", "b", "c"]]
    assert circles({("a", "b"), ("b", "c"), ("a", "c")}) == []
