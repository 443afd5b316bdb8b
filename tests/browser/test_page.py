"""The page of a door, as people see and use it in a real browser."""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import anyio
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Route, expect

from hotswap import Fleet, Sampling
from tests.browser.support import KEY, SLOW, fleet_of, gpus, opened, served

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_MS = 30_000.0
expect.set_options(timeout=PATIENCE_MS)
LOST = "Failed to load resource: net::ERR_"
REFUSED = "Failed to load resource: the server responded with a status of 401"
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "</script><style>*{display:none}",
    "&lt;b&gt;",
)
Scheme = Literal["dark", "light"]


async def assert_fits(page: Page) -> None:
    """Assert that nothing but regions that scroll is wider than the window."""
    assert await page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


async def assert_accessible(page: Page) -> None:
    """Assert that axe finds nothing to object to, best practices included."""
    found = await Axe().run(page)
    what = [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found.response["violations"]]
    assert what == [], json.dumps(what, indent=2)


async def swapped(fleet: Fleet, *swaps: tuple[str, str]) -> None:
    """Make swaps, one after the other."""
    for instance, model in swaps:
        await fleet.swap(instance, to=model, reason=f"a test wants {model}")


# ---------------------------------------------------------------------- what it shows


async def test_a_swap_shows_while_it_happens_and_why_once_it_has_ended(browser: Browser) -> None:
    async with (
        fleet_of("llama", "qwen", engines=gpus(2), read_bytes_per_s=SLOW) as fleet,
        served(fleet) as url,
    ):
        async with opened(browser, url) as page, anyio.create_task_group() as tasks:
            row = page.locator("#instances tr", has_text="gpu-0")
            await expect(row).to_contain_text("empty")
            tasks.start_soon(lambda: fleet.swap("gpu-0", to="qwen", reason="to see it"))
            await expect(row).to_contain_text("loading")
            await expect(row).to_contain_text("of 6.0 GiB")
            progress = row.get_by_role("progressbar")
            first = int(await progress.get_attribute("aria-valuenow") or -1)
            await expect(progress).not_to_have_attribute("aria-valuenow", str(first))
            assert int(await progress.get_attribute("aria-valuenow") or -1) > first
            bar = page.get_by_role("button", name=re.compile(r"gpu-0 loads qwen, under way"))
            await bar.click()
            await expect(page.locator("#detail")).to_contain_text("to see it")
            tasks.cancel_scope.cancel()
        async with opened(browser, url) as page:
            await expect(page.locator("#log tr")).to_contain_text(["gpu-0 loads qwen"])
            await page.get_by_role("button", name="gpu-0 loads qwen", exact=True).click()
            await expect(page.locator("#detail")).to_contain_text("to see it")
            await expect(page.locator("#detail")).to_contain_text("cancelled")
            await expect(page.locator("#instances tr", has_text="gpu-0")).to_contain_text("empty")


async def test_requests_tokens_queues_tiers_and_losses_are_told(browser: Browser) -> None:
    engines = gpus(2)
    async with fleet_of("llama", "qwen", engines=engines) as fleet, served(fleet) as url:
        await swapped(fleet, ("gpu-0", "llama"), ("gpu-1", "llama"))
        async with opened(browser, url) as page, anyio.create_task_group() as tasks:
            long = Sampling(max_tokens=2000, ignore_eos=True)
            tasks.start_soon(fleet.generate, "llama", [1], long)
            tasks.start_soon(fleet.generate, "qwen", [1], long)
            llama = page.locator("#models tr", has_text="llama")
            await expect(llama.locator("[data-label='running']")).to_have_text("1")
            await expect(llama.locator("[data-label='tokens/s']")).to_have_text(re.compile(r"\d"))
            qwen = page.locator("#models tr", has_text="qwen")
            await expect(qwen.locator("[data-label='waiting']")).to_have_text("1")
            await expect(qwen.locator("[data-label='oldest wait']")).to_have_text(re.compile(r"\d.* s"))
            await page.locator(".tier", has_text="host").locator("summary").click()
            await expect(page.locator(".tier", has_text="host").locator("li")).to_have_text(["llama6.0 GiB"])
            (moving,) = fleet.view().running
            other = {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[moving.instance]
            await fleet.migrate(moving.id, to=other, reason="to be seen")
            await expect(page.locator("#log tr", has_text="A request moves")).to_contain_text("to be seen")
            await page.get_by_role(
                "button", name=re.compile(f"^A request moves .*{other}, done")
            ).first.focus()
            await expect(page.locator("#detail")).to_contain_text(moving.id)
            engines[int(other[-1])].lose("its cable was pulled", for_good=True)
            await expect(page.locator("#instances tr", has_text=other)).to_contain_text(
                "its cable was pulled"
            )
            await expect(page.locator("#log")).to_contain_text(f"{other} is lost")
            tasks.cancel_scope.cancel()


async def test_history_can_be_scrolled_back_to_its_beginning(browser: Browser) -> None:
    async with fleet_of("llama", "qwen", engines=gpus(2)) as fleet, served(fleet) as url:
        await swapped(fleet, ("gpu-0", "llama"), ("gpu-0", "qwen"))

        async def add_an_hour(route: Route) -> None:
            """Have the real swaps follow those of an hour before, one a minute."""
            answer = await (await route.fetch()).json()
            last = answer["data"][0]
            earlier = [
                {**last, "started_s": last["started_s"] - 60.0 * n, "reason": f"{n} minutes before"}
                for n in range(60, 0, -1)
            ]
            await route.fulfill(json={**answer, "data": [*earlier, *answer["data"]]})

        async with opened(browser, "about:blank") as page:
            await page.route("**/admin/swaps", add_an_hour)
            await page.goto(url)
            await expect(page.locator("#log-note")).to_contain_text("of 62")
            region = page.locator("#time")
            oldest = region.get_by_role("button", name=re.compile("60 minutes before"))
            newest = region.get_by_role("button", name=re.compile("a test wants qwen"))
            await expect(newest).to_be_in_viewport()
            assert await oldest.count() == 0
            # By the button, by the scroll wheel, and by keys from the last bar.
            await page.get_by_role("button", name="Earlier").click()
            await expect(page.locator("#now")).to_have_attribute("aria-pressed", "false")
            await expect(newest).not_to_be_in_viewport()
            await region.hover()
            await page.mouse.wheel(-100_000, 0)
            await expect(oldest).to_be_in_viewport()
            await expect(oldest).to_have_count(1)
            await page.get_by_role("button", name="Now").click()
            await expect(newest).to_be_in_viewport()
            await newest.focus()
            await page.keyboard.press("Home")
            await expect(oldest).to_be_focused()
            await expect(page.locator("#detail")).to_contain_text("60 minutes before")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#detail")).to_contain_text("59 minutes before")
            # Bars that cannot be seen are not made.
            assert await region.locator(".mark").count() < 30
            await page.get_by_label("Width").select_option("1 hour")
            await expect(region.locator(".mark")).not_to_have_count(0)
            await assert_fits(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
async def test_the_page_fits_and_is_accessible(
    browser: Browser, width: int, scheme: Scheme, tmp_path: Path
) -> None:
    names = ("llama-3.3-8b-instruct", "qwen-3-4b", "mistral-small-3.2-24b", "gemma-3-12b")
    engines = [*gpus(3), *gpus(5, load_bytes_per_s=SLOW)[3:]]
    async with fleet_of(*names, engines=engines) as fleet, served(fleet) as url:
        await swapped(fleet, *[(f"gpu-{n % 3}", names[n % 4]) for n in range(9)])
        async with (
            opened(browser, url, width=width, height=844, scheme=scheme) as page,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(lambda: fleet.swap("gpu-3", to=names[1], reason="operator"))
            for _ in range(4):
                tasks.start_soon(
                    fleet.generate, names[0], [1] * 40, Sampling(max_tokens=3000, ignore_eos=True)
                )
            running = page.locator("#models tr", has_text=names[0]).locator("[data-label='running']")
            await expect(running).to_have_text("4")
            engines[2].lose("its driver was reset", for_good=True)
            await fleet.drain("gpu-4")
            await expect(page.locator("#instances")).to_contain_text("its driver was reset")
            await expect(page.locator("#instances")).to_contain_text("drained")
            await expect(page.locator("#instances").get_by_role("progressbar")).to_be_visible()
            await page.locator(".mark").last.focus()
            # A fleet that is new has no history to scroll through, and none that lies ahead.
            assert await page.locator("#time").evaluate("(e) => e.scrollWidth < 1.5 * e.clientWidth")
            await assert_fits(page)
            await page.screenshot(path=tmp_path / f"page-{width}-{scheme}.png", full_page=True)
            await assert_accessible(page)
            await page.get_by_role("button", name="Swap gpu-0").click()
            await assert_fits(page)
            await page.screenshot(path=tmp_path / f"swap-{width}-{scheme}.png")
            await assert_accessible(page)
            await page.keyboard.press("Escape")
            tasks.cancel_scope.cancel()
        async with (
            served(fleet, key=KEY) as locked,
            opened(browser, locked, width=width, height=844, scheme=scheme) as page,
        ):
            await expect(page.get_by_label("Operator key")).to_be_focused()
            await assert_fits(page)
            await page.screenshot(path=tmp_path / f"sign-in-{width}-{scheme}.png")
            await assert_accessible(page)


async def test_names_are_text_whatever_they_say(browser: Browser) -> None:
    async with fleet_of(*HOSTILE, engines=gpus(1)) as fleet, served(fleet) as url:
        await fleet.swap("gpu-0", to=HOSTILE[0], reason=HOSTILE[1])
        async with opened(browser, url) as page:
            await expect(page.locator("#models tr td:first-child")).to_have_text(
                sorted(HOSTILE), use_inner_text=True
            )
            await expect(page.locator("#log")).to_contain_text(HOSTILE[1])
            await page.get_by_role("button", name=f"gpu-0 loads {HOSTILE[0]}", exact=True).click()
            await expect(page.locator("#detail")).to_contain_text(HOSTILE[1])
            await page.get_by_role("button", name="Swap gpu-0").click()
            options = page.locator("#ask-model option")
            assert set(HOSTILE) < set(await options.all_inner_texts())
            assert await page.locator("body script").count() == 1
            assert await page.locator("img").count() == 0


async def test_a_large_fleet_is_drawn_in_part_and_searched_in_whole(browser: Browser) -> None:
    names = [f"model-{n:04d}" for n in range(2000)]
    async with fleet_of(*names, engines=gpus(500)) as fleet, served(fleet) as url:
        await fleet.swap("gpu-499", to="model-1999")
        async with opened(browser, url) as page:
            await expect(page.locator("#models-note")).to_have_text("first 60 of 2,000")
            await expect(page.locator("#models tr").first).to_contain_text("model-1999")  # which is served
            await expect(page.locator("#instances tr")).to_have_count(60)
            assert await page.evaluate("document.querySelectorAll('*').length") < 4000
            await page.keyboard.press("/")
            await page.keyboard.type("1999")
            await expect(page.locator("#instances tr")).to_have_count(1)
            await expect(page.locator("#instances tr")).to_contain_text("gpu-499")
            await expect(page.locator("#models tr")).to_have_count(1)
            await expect(page.locator("#tracks .track")).to_have_count(1)
            await page.get_by_label("Filter instances").fill("")
            await page.locator("#instances-more button").click()
            await expect(page.locator("#instances tr")).to_have_count(180)
            # A swap redraws the row that it is of: the others are the elements that they were.
            kept = await page.locator("#instances tr", has_text="gpu-7").first.element_handle()
            await fleet.swap("gpu-3", to="model-0003")
            await expect(page.locator("#instances tr", has_text="model-0003")).to_have_count(1)
            assert kept is not None
            assert await kept.evaluate("(row) => row.isConnected")
            await assert_fits(page)


# ---------------------------------------------------------------------- what it does


async def test_a_key_is_asked_for_and_kept_nowhere(browser: Browser) -> None:
    async with (
        fleet_of("llama", engines=gpus(1)) as fleet,
        served(fleet, key=KEY) as url,
        opened(browser, url, may_say=[REFUSED]) as page,
    ):
        key = page.get_by_label("Operator key")
        await expect(key).to_be_focused()
        await key.fill("the-key-of-a-stranger")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("missing or wrong")
        await expect(key).to_be_focused()
        await expect(key).to_have_value("")
        await expect(page.locator("#instances")).to_be_hidden()
        await key.fill(KEY)
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.locator("#instances tr")).to_contain_text(["gpu-0"])
        await expect(page.locator("#link-text")).to_have_text("Live")
        assert KEY not in page.url
        assert await page.context.cookies() == []
        assert await page.evaluate("localStorage.length + sessionStorage.length") == 0
        await page.get_by_role("button", name="Sign out").click()
        await expect(key).to_be_focused()
        await expect(page.locator("#instances-part")).to_be_hidden()
        await page.reload()
        await expect(key).to_be_visible()


async def tab_to(page: Page, name: str) -> None:
    """Press the tab key until a button or a field of a name has the focus, which must be seen."""
    for _ in range(60):
        await page.keyboard.press("Tab")
        focused = page.locator(":focus")
        label = await focused.evaluate(
            "(e) => e.ariaLabel || (e.labels && e.labels[0] ? e.labels[0].textContent : e.textContent)"
        )
        style = await focused.evaluate("(e) => getComputedStyle(e).outlineStyle")
        assert style != "none", f"the focus on {label!r} cannot be seen"
        if label.strip() == name:
            return
    raise AssertionError(f"The tab key does not lead to {name!r}.")


async def test_keys_alone_swap_drain_and_reopen(browser: Browser) -> None:
    async with (
        fleet_of("llama", "qwen", engines=gpus(2)) as fleet,
        served(fleet) as url,
        opened(browser, url) as page,
    ):
        await expect(page.locator("#instances tr")).to_have_count(2)
        await tab_to(page, "Swap gpu-1")
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Model to serve")).to_be_focused()
        await page.keyboard.type("qwen")
        await tab_to(page, "Reason, for the record")
        await page.keyboard.type("by keys")
        await tab_to(page, "Swap")
        await page.keyboard.press("Enter")
        await expect(page.locator("#toast")).to_contain_text("gpu-1 serves qwen after")
        assert (fleet.view().instances[1].model, fleet.swaps[-1].reason) == ("qwen", "by keys")
        await expect(page.get_by_role("button", name="Swap gpu-1")).to_be_focused()  # where it came from
        await tab_to(page, "Drain gpu-1")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Escape")
        assert not fleet.view().instances[1].draining
        await page.keyboard.press("Enter")
        await tab_to(page, "Drain")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Reopen gpu-1")).to_be_visible()
        assert fleet.view().instances[1].draining
        await page.get_by_role("button", name="Reopen gpu-1").press("Enter")
        await expect(page.get_by_role("button", name="Drain gpu-1")).to_be_visible()
        assert not fleet.view().instances[1].draining


async def test_what_cannot_be_done_is_told_and_nothing_is_done_unasked(browser: Browser) -> None:
    engines = gpus(1)
    async with fleet_of("llama", "qwen", engines=engines) as fleet, served(fleet) as url:
        await fleet.swap("gpu-0", to="llama")
        async with opened(browser, url, may_say=["Failed to load resource: the server responded"]) as page:
            await page.get_by_role("button", name="Swap gpu-0").click()
            await expect(page.locator("#ask-text")).to_contain_text("It serves llama")
            await page.get_by_role("button", name="Cancel").click()
            await page.get_by_role("button", name="Swap gpu-0").click()
            await page.get_by_label("Model to serve").select_option("llama")
            await page.locator("#ask-go").click()
            await expect(page.locator("#toast")).to_contain_text("failed")
            assert len(fleet.swaps) == 1
            await page.get_by_role("button", name="Swap gpu-0").click()
            await page.get_by_label("Model to serve").select_option("nothing: unload llama")
            await page.locator("#ask-go").click()
            await expect(page.locator("#toast")).to_contain_text("serves nothing now")
            assert fleet.view().instances[0].model is None


async def test_the_page_goes_on_after_a_restart_of_its_server(browser: Browser) -> None:
    first, second = fleet_of("llama", engines=gpus(1)), fleet_of("qwen", "llama", engines=gpus(2))
    async with AsyncExitStack() as page_of:
        async with first, served(first) as url:
            page = await page_of.enter_async_context(opened(browser, url, may_say=[LOST]))
            await first.swap("gpu-0", to="llama")
            await expect(page.locator("#link-text")).to_have_text("Live")
            await expect(page.locator("#log tr")).to_have_count(1)
            await expect(page.locator("#instances tr")).to_contain_text(["llama"])
        await expect(page.locator("#link-text")).to_contain_text("Connection lost")
        await expect(page.locator("#toast")).to_contain_text("Connection lost")
        await expect(page.locator("#instances tr")).to_contain_text(["llama"])  # as it was
        port = int(url.rpartition(":")[2].removesuffix("/ui"))
        async with second, served(second, port=port):
            await expect(page.locator("#link-text")).to_have_text("Live")
            await expect(page.locator("#instances tr")).to_have_count(2)
            await expect(page.locator("#log tr")).to_have_count(0)
            await second.swap("gpu-1", to="qwen")
            await expect(page.locator("#log tr")).to_contain_text(["gpu-1 loads qwen"])


async def test_a_screen_reader_is_told_of_the_connection_and_of_answers_alone(browser: Browser) -> None:
    async with (
        fleet_of("llama", "qwen", engines=gpus(2)) as fleet,
        served(fleet) as url,
        opened(browser, url, motion="reduce") as page,
    ):
        await expect(page.locator("#instances tr")).to_have_count(2)
        await swapped(fleet, ("gpu-0", "llama"), ("gpu-1", "qwen"), ("gpu-0", "qwen"))
        await expect(page.locator("#log tr")).to_have_count(3)
        live = page.locator("[aria-live], [role=status], [role=alert], [role=log]")
        assert [text for text in await live.all_inner_texts() if text] == []
        for table in ("Instances", "Models", "What happened"):
            await expect(page.get_by_role("table", name=table)).to_be_visible()
        await expect(page.get_by_role("main")).to_be_visible()
        await expect(page.get_by_role("banner")).to_be_visible()
        assert await page.evaluate("document.getAnimations().length") == 0
