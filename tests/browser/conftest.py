"""These tests need Playwright, which has an environment of its own, and Chromium: `make browser-test`."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from playwright.async_api import Browser

collect_ignore_glob = [] if find_spec("playwright") else ["test_*.py"]

_ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncGenerator[Browser]:
    """Chromium, without a window; a test is skipped where there is none."""
    from playwright.async_api import async_playwright

    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("There is no Chromium here; install it, or name it by the variable CHROMIUM.")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=found, args=[*_ARGUMENTS])
        yield started
        await started.close()
