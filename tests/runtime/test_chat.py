"""Chats in a fleet: none holds up other requests, and the errors of each are its client's own."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from hotswap import Adapter, Chat, Fleet, ModelId, Sampling
from hotswap.abc import ChatTemplate, TextSettings, Tokenizer, WeightStore, WrapperStore
from hotswap.backends.chat_template import JinjaChatTemplate
from hotswap.errors import InvalidRequest, UnknownAdapter, UnknownModel
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, engine_of, idle, sim_fleet, store_of
from tests.runtime.test_telemetry import Recorder

HI = [{"role": "user", "content": "hi"}]
ROLES = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SHORT = Sampling(max_tokens=2, ignore_eos=True)


class Letters:
    """A token for every character, and a start token, 1."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return [1] * add_special_tokens + [2 + ord(character) for character in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token - 2) for token in tokens if token > 1)


class Texts(WrapperStore):
    """A store that says of every model what it was made with."""

    def __init__(self, store: WeightStore, template: str | None = ROLES, **config: Any) -> None:
        super().__init__(store)
        self.templates: dict[str, ChatTemplate] = {}
        self.default = None if template is None else JinjaChatTemplate({"default": template})
        self.config = config
        self.has_tokenizer = True

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return Letters() if self.has_tokenizer else None

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        template = self.templates.get(model, self.default)
        return TextSettings(chat_template=template, generation_config=self.config)

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        return TextSettings()


def serving(template: str | None = ROLES, **config: Any) -> Fleet:
    return sim_fleet("a", store=Texts(store_of("a"), template, **config))


async def prompt(fleet: Fleet, model: str, **options: Any) -> str:
    async with fleet.stream(model, Chat(HI), SHORT, **options) as stream:
        return Letters().decode(stream.request.prompt)


class Noting(dict[str, Any]):
    """A message that notes in which thread its fields are read."""

    threads: set[int]

    def items(self) -> Any:
        self.threads.add(threading.get_ident())
        return super().items()


@pytest.mark.parametrize(
    ("number", "fields", "on_loop"),
    [
        (10, {"content": "hi"}, True),
        (2_000, {"content": "hi"}, False),
        (1, {"content": [{"type": "text", "text": "hi"}] * 2_000}, False),
        (1, {"content": "x" * 2_000_000}, False),
    ],
    ids=["few", "messages", "parts", "characters"],
)
async def test_a_large_chat_is_checked_and_copied_off_the_loop(
    number: int, fields: dict[str, Any], on_loop: bool
) -> None:
    messages = [Noting(role="user", **fields) for _ in range(number)]
    for message in messages:
        message.threads = set()
    async with serving() as fleet:
        with pytest.raises(InvalidRequest, match=rf"messages\[{number}\]\.role is 3"):
            await fleet.chat("a", [*messages, {"role": 3, "content": "hi"}])
        idle(fleet)
    read_in = set[int]().union(*(message.threads for message in messages))
    assert (read_in == {threading.get_ident()}) == on_loop
    assert (threading.get_ident() in read_in) == on_loop


@virtual_time
async def test_a_chat_is_written_by_the_template_and_gets_no_other_tokens() -> None:
    async with serving() as fleet:
        async with fleet.stream("a", Chat(HI), SHORT) as stream:
            assert list(stream.request.prompt) == [2 + ord(character) for character in "user: hi\n"]
        async with fleet.stream("a", Chat(HI), SHORT, add_special_tokens=True) as stream:
            assert stream.request.prompt[0] == 1
        async with fleet.stream("a", "user: hi\n", SHORT) as stream:
            assert stream.request.prompt[0] == 1
        done = await fleet.chat("a", HI, SHORT)
        assert (done.usage.prompt_tokens, done.usage.generated_tokens) == (9, 2)
        idle(fleet)


@virtual_time
async def test_a_chat_that_cannot_be_written_is_refused_before_it_waits() -> None:
    store = Texts(store_of("a"), None)
    async with sim_fleet("a", store=store) as fleet:
        with pytest.raises(InvalidRequest, match="'a' has no chat template"):
            await fleet.chat("a", HI)
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.role"):
            await fleet.chat("a", [{"content": "hi"}])
        with pytest.raises(UnknownModel):
            await fleet.chat("b", HI)
        with pytest.raises(UnknownAdapter):
            await fleet.chat("a", HI, adapter="x")
        idle(fleet)
    store = Texts(store_of("a"))
    store.has_tokenizer = False
    async with sim_fleet("a", store=store) as fleet:
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            await fleet.chat("a", HI)
    async with serving("{{ raise_exception('No ' + messages[0].role) }}") as fleet:
        with pytest.raises(InvalidRequest, match="No user"):
            await fleet.chat("a", HI)
    async with serving("") as fleet:
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            await fleet.chat("a", HI)
    async with sim_fleet("a") as fleet:  # a store that knows nothing of text
        with pytest.raises(InvalidRequest, match="no chat template"):
            await fleet.chat("a", HI)


class Kept:
    """A template that keeps what it is given."""

    def __init__(self) -> None:
        self.chats: list[Chat] = []

    def render(self, chat: Chat) -> str:
        self.chats.append(chat)
        return "x"


@virtual_time
async def test_all_that_a_chat_may_have_can_be_asked_of_a_fleet() -> None:
    asked: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "documents": [{"title": "Ants", "text": "They are small."}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert {"messages", *asked} == {*inspect.signature(Chat).parameters}
    store, kept = Texts(store_of("a")), Kept()
    store.templates["a"] = kept
    async with sim_fleet("a", store=store) as fleet:
        await fleet.chat("a", HI, SHORT, **asked)
        for name, value in asked.items():
            if name != "continue_final_message":  # which is none for prompts that end with a new message
                await fleet.chat("a", HI, SHORT, **{name: value})
    alone = [Chat(HI, **{name: asked[name]}) for name in asked if name != "continue_final_message"]
    assert kept.chats == [Chat(HI, **asked), *alone]


@pytest.mark.parametrize("prompt", [HI, tuple(HI), HI[0]], ids=["list", "tuple", "one"])
@virtual_time
async def test_messages_that_are_given_as_a_prompt_are_told_where_they_belong(prompt: Any) -> None:
    async with serving() as fleet:
        with pytest.raises(InvalidRequest, match=r"Chat\(messages\).*fleet\.chat\(model, messages\)"):
            await fleet.generate("a", prompt)
        idle(fleet)


class Slow:
    """A template that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.thread = 0

    def render(self, chat: Chat) -> str:
        self.thread = threading.get_ident()
        self.begun.set()
        assert self.go.wait(60)
        return "slow"


async def test_streams_go_on_while_a_chat_is_written() -> None:
    store, slow = Texts(store_of("a", "b")), Slow()
    store.templates["b"] = slow
    async with sim_fleet("a", "b", store=store) as fleet, anyio.create_task_group() as clients:
        clients.start_soon(prompt, fleet, "b")
        while not slow.begun.is_set():
            await anyio.lowlevel.checkpoint()
        done = await fleet.chat("a", HI, SHORT)
        assert len(done.tokens) == 2
        slow.go.set()
    assert slow.thread != threading.get_ident()


@virtual_time
async def test_after_a_roll_the_template_of_the_new_weights_is_used() -> None:
    store = Texts(store_of("a", "b"))
    store.templates["b"] = JinjaChatTemplate({"default": "new {{ messages | length }}"})
    async with sim_fleet("a", "b", store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        assert await prompt(fleet, "a") == "user: hi\n"
        await fleet.roll("a", to="b")
        assert await prompt(fleet, "a") == await prompt(fleet, "b") == "new 1"


@virtual_time
async def test_a_roll_in_the_middle_has_the_chat_written_again() -> None:
    store = Texts(store_of("a", "b"))
    slow = Slow()
    store.templates |= {"a": slow, "b": JinjaChatTemplate({"default": "new"})}
    slow.go.set()
    async with sim_fleet("a", "b", store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        read: list[str] = []

        async def ask() -> None:
            read.append(await prompt(fleet, "a"))

        async with anyio.create_task_group() as clients:
            clients.start_soon(ask)
            await fleet.roll("a", to="b")
        assert read in (["slow"], ["new"])
        assert await prompt(fleet, "a") == "new"
        idle(fleet)


@virtual_time
async def test_a_models_own_parameters_are_given_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    asked: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "no_repeat_ngram_size": 3,
        "max_new_tokens": 9,
    }
    async with serving(**asked) as fleet:
        assert (await fleet.generate("a", "x")).seed is None  # greedy, as ever
        with caplog.at_level(logging.WARNING):
            sampling = fleet.models.sampling("a")
            assert sampling == Sampling(temperature=0.7, max_tokens=9)
            assert fleet.models.sampling("a", temperature=0.0) == Sampling(max_tokens=9)
        assert [record.getMessage() for record in caplog.records] == [
            "generation_config.json of model 'a' asks for no_repeat_ngram_size, which is not applied."
        ]
        assert (await fleet.chat("a", HI, sampling)).seed is not None
        with pytest.raises(UnknownModel):
            fleet.models.sampling("b")


@virtual_time
async def test_an_adapter_without_text_of_its_own_writes_as_its_model() -> None:
    engines = [engine_of("e0", max_adapters=2)]
    store = Texts(store_of("a"))
    async with sim_fleet("a", engines=engines, store=store, adapters=[Adapter("x", "a")]) as fleet:
        assert await prompt(fleet, "a", adapter="x") == "user: hi\n"


@virtual_time
async def test_the_span_of_a_chat_is_named_by_the_operation() -> None:
    recorder = Recorder()
    store = Texts(store_of("a"))
    async with sim_fleet("a", store=store, tracer_provider=recorder.provider) as fleet:
        await fleet.chat("a", HI, SHORT)
    (span,) = recorder.spans("chat a")
    assert (span.attributes or {})["gen_ai.operation.name"] == "chat"
