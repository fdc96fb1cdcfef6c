"""Pages that show the project's own source files, so that links to code stay true and work offline."""

from __future__ import annotations

import ast
import functools
import posixpath
import re
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "attnzoo",
    "recurrences",
    "kernels",
    "docs/benchmarks/log",
    "docs/benchmarks/results",
    "docs/results",
    "tests",
)
ALONE = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "README.md", "docs/results/packages.txt", "pyproject.toml")
SUFFIXES = (".md", ".py", ".yaml")
PAGES = ("index.md", "both_sides.md", "little_text.md", "forgetting.md")  # of these folders, that are pages of the site
LINK = re.compile(r"(?<=\]\()\.\.?/[^)#]+")
BEGINS = re.compile(r"^(?!\||- |\s)(.+\n)(?=\||- )", re.MULTILINE)  # a table or a list right below a line of text


@functools.cache
def paths() -> tuple[str, ...]:
    """Every file that gets a page, relative to the root of the repository."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    found += [ROOT / name for name in ALONE]
    # attnzoo/kernels and attnzoo/recurrences are links to the folders at the root
    found = [path for path in found if path.resolve() == path and path.name not in PAGES]
    return tuple(sorted(str(path.relative_to(ROOT)) for path in found))


@functools.cache
def symbols(path: str) -> dict[str, int]:
    """Line of each function, class, method (``Class.method``) and module constant of a Python file."""
    lines: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines[prefix + node.name] = node.lineno
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, ast.AnnAssign) else []
            lines.update({prefix + target.id: node.lineno for target in targets if isinstance(target, ast.Name)})
            if isinstance(node, ast.If | ast.Try):
                visit(node.body, prefix)

    visit(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return lines


def locate(target: str, kind: str) -> tuple[str, int | None]:
    """The file and line that ``path``, ``path#symbol`` (kind src) or ``path::test`` (kind test) names.

    Raises:
        ValueError: there is no such file or symbol.
    """
    path, _, symbol = target.partition("#" if kind == "src" else "::")
    if path not in paths():
        raise ValueError(f"{kind}:{target}: no file {path}")
    if kind == "test" and not (symbol and symbol.split("::")[-1].startswith("test")):
        raise ValueError(f"{kind}:{target}: expected path::test_name")
    if not symbol:
        return path, None
    known = symbols(path) if path.endswith(".py") else {}
    name = symbol.replace("::", ".")
    if name not in known:
        raise ValueError(f"{kind}:{target}: no {symbol} in {path}")
    return path, known[name]


def page_of(path: str) -> str:
    """The site's Markdown page of a source file."""
    return f"source/{path}.md"


def stub(path: str) -> str:
    """Markdown of the page of ``path``; :func:`listing` takes the place of the comment.

    What was measured and noted, Markdown below ``docs``, is shown as text and not as a listing.
    """
    if path.startswith("docs/"):
        return _text(path)
    front = f"---\ntitle: {path}\nhide: [navigation, toc]\nsearch:\n  exclude: true\n---\n\n"
    return f"{front}# {path}\n\n<!-- listing {path} -->\n"


def _text(path: str) -> str:
    """Markdown of a page that is Markdown itself, with its links as they are from there."""
    here, there = posixpath.dirname(page_of(path)), posixpath.dirname(path.removeprefix("docs/"))
    written = (ROOT / path).read_text(encoding="utf-8")
    written = LINK.sub(lambda link: posixpath.relpath(posixpath.join(there, link[0]), here), written)
    written = BEGINS.sub(r"\1\n", written)  # Python-Markdown wants a blank line there, others do not
    heading = "" if written.startswith("# ") else f"# {Path(path).parent.name}\n\n"
    return f"---\ntitle: {path}\nhide: [navigation]\nsearch:\n  exclude: true\n---\n\n{heading}{written}"


def index() -> str:
    """Markdown of the page that leads to all of them, a section per folder."""
    folders: dict[str, list[str]] = {}
    for path in paths():
        folders.setdefault(str(Path(path).parent), []).append(path)
    lines = ["---", "search:", "  exclude: true", "---", "", "# The source", ""]
    lines += ["Every file of the library and of its tests, as it was when these pages were built.", ""]
    for folder, files in sorted(folders.items()):
        links = ", ".join(f"[`{Path(path).name}`]({path}.md)" for path in files)
        lines += [f"**{'At the top' if folder == '.' else folder}**: {links}", ""]
    return "\n".join(lines)


def listing(path: str) -> str:
    """The highlighted file, with an anchor ``L-n`` on every line."""
    formatter = HtmlFormatter(cssclass="highlight source-listing", linenos="inline", linespans="L", wrapcode=True)
    code: str = highlight((ROOT / path).read_text(encoding="utf-8"), get_lexer_for_filename(path), formatter)
    return code
