"""One file that holds the page of moving gates whole: ``python docs/tools/standalone.py FILE``, once the site is built.

It asks for nothing else, so that it works from a memory stick, in a mail or without a network.
"""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
COLORS = """
:root { --md-default-fg-color: #1d2530; --md-default-fg-color--light: #5f6b7a; --md-default-fg-color--lighter: #b8c0ca;
  --md-default-fg-color--lightest: #dfe3e8; --md-default-bg-color: #fff; --md-code-bg-color: #f2f4f6;
  --md-code-font-family: monospace; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--md-default-fg-color); background: var(--md-default-bg-color);
  max-width: 68rem; margin: 1rem auto; padding: 0 1rem; }
.katex-mathml { display: none }
"""


def standalone(site: Path = SITE) -> str:
    """The page as one HTML file, with its styles, fonts and scripts inside, and links as plain words."""
    page = (site / "interactive.html").read_text(encoding="utf-8")
    title = "Move the gates: recurrences and their dual position encodings"
    article = re.search(r"<h1.*?</article>", page, re.DOTALL)
    if article is None:
        raise ValueError(f"{site / 'interactive.html'}: expected an article, found none; run `make docs` first")
    body = article[0].removesuffix("</article>")
    scripts = re.findall(r'<script src="([^"]+)"></script>', body)
    body = re.sub(r'<script src=[^>]*></script>|<link [^>]*>|<a class="headerlink".*?</a>', "", body)
    body = re.sub(r'<a [^>]*href="(?!https:)[^"]*"[^>]*>(.*?)</a>', r"\1", body, flags=re.DOTALL)
    katex = site / "assets/carried/katex/katex.min.css"
    style = re.sub(
        r"src:url\((fonts/[^)]+\.woff2)\)[^;}]*", lambda m: _font(katex.parent / m[1]), katex.read_text("utf-8")
    )
    style += COLORS + (site / "interactive/style.css").read_text(encoding="utf-8")
    code = "\n".join((site / script).read_text(encoding="utf-8") for script in scripts)
    head = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">'
    )
    script = f"<script>\n{code}\n</script>"
    return f"{head}\n<title>{title}</title>\n<style>{style}</style>\n<body>\n{body}\n{script}\n</body>\n</html>\n"


def _font(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'src:url(data:font/woff2;base64,{data}) format("woff2")'


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "duality.html")
    target.write_text(standalone(), encoding="utf-8")
    print(f"{target}: {target.stat().st_size / 1024:.0f} KiB, one file")
