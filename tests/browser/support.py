"""Fleets behind a door on a port of this machine, and pages in a browser that must have no errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from hotswap import Fleet
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, sim_manifest
from hotswap.door import ApiKey, create_app, listen
from hotswap.view import TierView
from tests.runtime.support import Idle, models, sim_fleet

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

__all__ = ["KEY", "SLOW", "fleet_of", "gpus", "opened", "served"]

KEY = "the-key-of-an-operator"
GIB = 1 << 30
# A load takes a minute, so that one is under way for as long as a test looks at it; others none.
SLOW, FAST = 0.1 * GIB, 100 * GIB


def gpus(number: int, *, load_bytes_per_s: float = FAST) -> list[SimEngine]:
    """Simulated GPUs."""
    profile = DeviceProfile(memory_bytes=24 * GIB, load_bytes_per_s=load_bytes_per_s, unload_s=0.01)
    return [SimEngine(f"gpu-{n}", profile, kv_blocks=512, max_requests=8) for n in range(number)]


def fleet_of(*names: str, engines: Sequence[SimEngine], read_bytes_per_s: float = FAST) -> Fleet:
    """A fleet that swaps by hand alone, and has 6 GiB of each model on a disk."""
    store = SimStore(
        [sim_manifest(name, 6 * GIB, eos_token_ids=(0,)) for name in names],
        home=TierView(name="disk", bytes_per_s=read_bytes_per_s),
        cache=TierView(name="host", bytes_per_s=FAST, capacity_bytes=16 * GIB),
    )
    return sim_fleet(*names, engines=engines, store=store, models=models(*names), scheduler=Idle())


@asynccontextmanager
async def served(fleet: Fleet, *, key: str = "", port: int = 0) -> AsyncGenerator[str]:
    """Serve an open fleet, and lend the address of its page."""
    keys = [ApiKey(secret=key, admin=True)] if key else []
    async with listen(create_app(fleet, keys=keys), port=port) as taken:
        yield f"http://127.0.0.1:{taken}/ui"


@asynccontextmanager
async def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1400,
    height: int = 900,
    scheme: Literal["dark", "light"] = "light",
    motion: Literal["no-preference", "reduce"] = "no-preference",
    may_say: Iterable[str] = (),
) -> AsyncGenerator[Page]:
    """Lend a page in a context of its own; it must load nothing from elsewhere, and log no error.

    `may_say` are beginnings of errors that the browser itself logs of what a test does.
    """
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion=motion
    )
    errors: list[str] = []
    requests: list[str] = []
    allowed = tuple(may_say)
    try:
        page = await context.new_page()
        page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        await page.goto(url)
        yield page
        assert [error for error in errors if not (allowed and error.startswith(allowed))] == []
        origin = url.rpartition("/")[0]
        assert [one for one in requests if not one.startswith((origin, "data:"))] == []
    finally:
        await context.close()
