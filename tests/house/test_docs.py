"""What the pages name exists; the three journeys name functions in the order in which they are entered."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from hotswap import Adapter, Fleet, FleetView, InstanceId, Model, ModelId, Sampling
from hotswap.abc import Action, Migrate, ModelCard, Scheduler, Swap, WeightStore
from hotswap.backends.sim import DeviceProfile, SimEngine
from hotswap.errors import FleetClosed, LoadsExhausted, OutOfMemory, SwapFailed
from hotswap.offline.virtual_time import virtual_time
from tests.house.tree import PACKAGE, ROOT
from tests.runtime.support import PROFILE, engine_of, sim_fleet, store_of, until

RUNTIME = PACKAGE / "runtime"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
PAGES += (ROOT / "benchmarks").glob("*.md")
PAGE = (ROOT / "docs" / "journeys.md").read_text("utf-8")
# Names in the pages that are not hotswap's: of Python, vLLM, OpenTelemetry, systemd, and units.
FOREIGN = {"AsyncEngineArgs", "KeyboardInterrupt", "MemoryError", "RemoveIPC", "SystemExit", "TracerProvider"}
FOREIGN |= {"AzureLLMInferenceTrace_code", "AzureLLMInferenceTrace_conv", "GiB", "MiB", "RoPE", "TiB"}
FOREIGN |= {"AsyncLLM", "ContextTokens", "GeneratedTokens", "ImportError", "MyEngine", "ValueError"}
LONG = Sampling(max_tokens=200, ignore_eos=True)
E0, E1 = InstanceId("e0"), InstanceId("e1")


def named(text: str) -> list[tuple[Path, str]]:
    """The functions and classes that a text names, by file and qualified name, in order, each once."""
    found = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    return list(dict.fromkeys((ROOT / file if "/" in file else RUNTIME / file, name) for file, name in found))


def defined(file: Path) -> dict[str, ast.AST]:
    """Every class, function and method of a file, by qualified name."""
    found: dict[str, ast.AST] = {}

    def add(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node
                if isinstance(node, ast.ClassDef):
                    add(node.body, f"{prefix}{node.name}.")

    add(ast.parse(file.read_text("utf-8")).body, "")
    return found


def steps(journey: str) -> list[list[tuple[Path, str]]]:
    """The functions of the runtime that each step of a journey is the first to name."""
    (section,) = re.findall(rf"^## {journey}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    texts = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    seen: set[tuple[Path, str]] = set()
    result = []
    for text in texts:
        functions = [
            (file, name)
            for file, name in named(text)
            if file.parent == RUNTIME and not isinstance(defined(file)[name], ast.ClassDef)
        ]
        result.append([function for function in functions if function not in seen])
        seen.update(functions)
    return result


@contextmanager
def entered() -> Generator[dict[tuple[Path, str], None]]:
    """Record the runtime's functions in the order in which each is entered, or resumed, first."""
    found: dict[tuple[Path, str], None] = {}
    files = {str(path): path for path in RUNTIME.glob("*.py")}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (path := files.get(frame.f_code.co_filename)) is not None:
            found.setdefault((path, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def assert_in_order(journey: str, found: dict[tuple[Path, str], None]) -> None:
    """Assert that every function that the steps name was entered, and the first one of each step in order."""
    places = {function: place for place, function in enumerate(found)}
    named_functions = [functions for functions in steps(journey) if functions]
    assert len(named_functions) > 4
    assert [name for functions in named_functions for name in functions if name not in places] == []
    firsts = [functions[0] for functions in named_functions]
    assert sorted(firsts, key=places.__getitem__) == firsts


class Script(Scheduler):
    """Plans what a test has put into `actions`, once."""

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        actions, self.actions = self.actions, []
        return actions


class Failing(SimEngine):
    """Fails to load while `fails` is set."""

    fails = False

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        if self.fails:
            raise OutOfMemory("There is no room.")
        await super().load(model, store)


def test_every_link_between_pages_leads_to_a_file() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 100
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_every_link_to_a_heading_leads_to_one() -> None:
    links = [
        (page, *link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8"))
    ]
    assert len(links) > 20
    for page, link, anchor in links:
        headings = re.findall(
            r"^#+ (.*)$", ((page.parent / link) if link else page).read_text("utf-8"), re.MULTILINE
        )
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{page.name}: {link}#{anchor}"


def test_every_test_that_a_page_names_exists() -> None:
    paths = {
        path for page in PAGES for path in re.findall(r"`((?:[\w.]+/)*test_\w+\.py)", page.read_text("utf-8"))
    }
    tests = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not any(test.endswith(f"/{path}") for test in tests)] == []


def test_every_class_that_a_page_names_exists() -> None:
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    known = set(re.findall(r"^\s*class (\w+)|^(\w+)(?:: \w+)? = ", source, re.MULTILINE))
    alerts = re.findall(r"alert: (\w+)", (ROOT / "deploy" / "alerts.yaml").read_text("utf-8"))
    classes = {name for names in known for name in names} | FOREIGN | set(alerts)
    words = set(re.findall(r"\w+", source))
    for page in PAGES:
        whole = page.read_text("utf-8")
        text = re.sub(r"```.*?```", "", whole, flags=re.DOTALL)
        code = " ".join(re.findall(r"`([^`\n]+)`", text))
        named_classes = set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*|\b[A-Z]{2,}[a-z]\w*", code))
        assert named_classes <= classes | set(re.findall(r"^class (\w+)", whole, re.MULTILINE)), page
        assert {
            member for name, member in re.findall(r"\b([A-Z]\w+)\.(\w+)", code) if name in classes
        } <= words


def test_every_name_is_in_the_file_that_the_page_names() -> None:
    assert len(named(PAGE)) > 50
    assert [(file.name, name) for file, name in named(PAGE) if name not in defined(file)] == []


def codes_of(page: str) -> list[CodeType]:
    """The examples of a page, which may await."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return [
        compile(code, page, "exec", flags=flags)
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


@virtual_time
async def test_the_operations_of_a_fleet_run_as_the_page_has_them() -> None:
    compiled, _ = codes_of("operations.md")
    store = store_of("llama-8b", "qwen-4b")
    async with sim_fleet("llama-8b", scheduler=Script(), store=store) as fleet:
        for instance in fleet.view().instances:
            await fleet.swap(instance.id, to="llama-8b")
        await eval(
            compiled, {"fleet": fleet, "Model": Model, "SimEngine": SimEngine, "DeviceProfile": DeviceProfile}
        )
        view = fleet.view()
    assert {instance.id: instance.model for instance in view.instances} == {"e0": "qwen-4b", "e3": None}
    assert [model.id for model in view.models] == ["qwen-4b"]


async def test_a_fleet_shuts_down_on_a_signal_as_the_page_has_it() -> None:
    _, compiled = codes_of("operations.md")
    async with sim_fleet("a", scheduler=Script()) as fleet:

        async def serve() -> None:
            await eval(compiled, {"fleet": fleet, "anyio": anyio, "signal": signal})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(FleetClosed, match="takes no new requests"):
            await fleet.generate("a", (1,))


@virtual_time
async def test_a_request_goes_as_the_page_says() -> None:
    engines = [engine_of(name, max_adapters=2) for name in ("e0", "e1")]
    async with sim_fleet("a", engines=engines, scheduler=Script(), adapters=[Adapter("x", "a")]) as fleet:
        for engine in engines:
            await fleet.swap(engine.id, to="a")
        with entered() as found:
            async with fleet.stream("a", [1], LONG, adapter="x") as stream:
                await anext(stream)
                await fleet.unload(stream.hops[0].instance)
                await stream.collect()
    assert stream.num_hops == 2
    assert_in_order("A request", found)


@virtual_time
async def test_a_swap_goes_as_the_page_says() -> None:
    script, engine = Script(), Failing("e0", PROFILE)
    async with sim_fleet("a", "b", engines=[engine], scheduler=script, max_load_attempts=1) as fleet:
        await fleet.swap("e0", to="a")
        with entered() as found:
            script.actions = [Swap(instance=E0, model=ModelId("b"))]
            await until(lambda: len(fleet.swaps) == 2)
            await fleet.swap("e0", to="a")
            engine.fails = True
            async with anyio.create_task_group() as clients:
                clients.start_soon(refused, fleet, "b")
                await until(lambda: bool(fleet.view().waiting))
                with pytest.raises(SwapFailed):
                    await fleet.swap("e0", to="b")
    assert_in_order("A swap", found)


@virtual_time
async def test_a_move_goes_as_the_page_says() -> None:
    script = Script()
    async with sim_fleet("a", scheduler=script) as fleet:
        for instance in fleet.view().instances:
            await fleet.swap(instance.id, to="a")
        async with fleet.stream("a", [1] * 64, LONG) as stream:
            await anext(stream)
            first, second = sorted((E0, E1), key=lambda end: end != stream.hops[0].instance)
            with entered() as found:
                await fleet.migrate(stream.request.id, to=second, method="kv")
                script.actions = [Migrate(request=stream.request.id, destination=first, method="tokens")]
                await until(lambda: len(fleet.migrations) == 2)
                await fleet.drain(first)
            await stream.collect()
    assert [record.outcome for record in fleet.migrations] == ["done"] * 3
    assert_in_order("A move", found)


async def refused(fleet: Fleet, model: str) -> None:
    with pytest.raises(LoadsExhausted):
        await fleet.generate(model, [1])
