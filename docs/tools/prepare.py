"""Writes what the site is built from beside its pages: stubs of source files, KaTeX and the pairs. Run it first."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import maths, pairs, sources

DOCS = sources.ROOT / "docs"


def main() -> None:
    """Fill ``docs/source`` and ``docs/assets/carried``, which git does not keep.

    Raises:
        FileNotFoundError: KaTeX is not installed.
    """
    if not maths.KATEX.exists():
        raise FileNotFoundError("docs: expected docs/node_modules/katex; run `make docs-install`")
    shutil.rmtree(DOCS / "source", ignore_errors=True)
    for path in sources.paths():
        stub = DOCS / sources.page_of(path)
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(sources.stub(path), encoding="utf-8")
    (DOCS / "source" / "index.md").write_text(sources.index(), encoding="utf-8")
    carried = DOCS / "assets" / "carried"
    shutil.rmtree(carried, ignore_errors=True)
    files = {"katex/katex.min.css": maths.KATEX / "katex.min.css", "katex/LICENSE": maths.KATEX.parent / "LICENSE"}
    files |= {f"katex/fonts/{font.name}": font for font in (maths.KATEX / "fonts").glob("*.woff2")}
    files |= {"iframe-worker/shim.js": maths.SHIM, "iframe-worker/LICENSE": maths.SHIM.parents[1] / "LICENSE"}
    for name, source in files.items():
        (carried / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, carried / name)
    (carried / "pairs.js").write_text(pairs.script(), encoding="utf-8")


if __name__ == "__main__":
    main()
