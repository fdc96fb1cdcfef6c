"""The built site in a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "site"
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # one without windows first
PATIENCE = 120_000  # milliseconds before a browser counts as hanging, on the busiest machine
# no sandbox: continuous integration runs as root; the rest keeps the browser itself off the network
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-browser", action="store_true", help="fail where the site or Chromium is missing")


def missing(config: pytest.Config, what: str) -> None:
    if config.getoption("--require-browser"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Path:
    """The built site."""
    if not (SITE / "index.html").exists():
        missing(request.config, "site/index.html is not built: run `make docs-test`")
    return SITE


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest):
    """Headless Chromium: $CHROMIUM, or the first that is on the path."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing(request.config, "playwright is not installed: run `make docs-test`")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        missing(
            request.config,
            f"no Chromium: expected one of {', '.join(CHROMIUM)} on the path, or $CHROMIUM "
            f"(apt-get install {CHROMIUM[0]})",
        )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS), timeout=PATIENCE)
        yield chromium
        chromium.close()


class Reader:
    """One browser tab that notes whatever goes wrong in it."""

    def __init__(self, context, site: Path) -> None:
        self.site = site
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.page.on(
            "console", lambda m: m.type in ("error", "warning") and self.complaints.append(f"console: {m.text}")
        )
        self.page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        self.page.on("requestfailed", self._failed)
        self.page.on("request", self._is_local)

    def _failed(self, request) -> None:
        if "ERR_ABORTED" not in request.failure:  # the reader went on before it came
            self.complaints.append(f"failed: {request.url} ({request.failure})")

    def _is_local(self, request) -> None:
        if not request.url.startswith((self.site.as_uri(), "data:", "blob:", "about:")):
            self.complaints.append(f"leaves the site: {request.url}")

    def open(self, path: str):
        self.complaints.clear()
        self.page.goto(f"{self.site.as_uri()}/{path}", wait_until="load")
        return self.page


@pytest.fixture(scope="session")
def tab(browser, site: Path) -> Iterator[Reader]:
    """One tab for all tests: what pages share is read once."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    # looked at when it has come to rest
    context.add_init_script(
        """document.addEventListener("DOMContentLoaded", () => {
            const still = document.createElement("style");
            still.textContent = "*, ::before, ::after { transition: none !important; animation: none !important }";
            document.head.append(still);
        })"""
    )
    yield Reader(context, site)
    context.close()


@pytest.fixture
def reader(tab: Reader) -> Iterator[Reader]:
    """The tab, empty and as wide as a laptop."""
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    yield tab
    tab.page.goto("about:blank")
