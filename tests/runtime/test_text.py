"""Text in, text out, across a swap: no character is split and no stop string missed, on any engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest
from anyio import to_thread

from hotswap import Fleet, FleetStream, ModelId, Sampling, Token
from hotswap.abc import Tokenizer, WrapperStore
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, expected, idle, sim_fleet, store_of

PROMPT = (70, 71, 72)
LETTERS = "abcdé€𝄞 ".encode()


class Bytes:
    """One token is one byte, so that a character may take up to four tokens."""

    def encode(self, text: str) -> Sequence[int]:
        return [LETTERS.index(byte) + 1 for byte in text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(LETTERS[token % len(LETTERS)] for token in tokens).decode(errors="replace")


class WithTokenizer(WrapperStore):
    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return Bytes()


@asynccontextmanager
async def two_replicas() -> AsyncGenerator[Fleet]:
    store = WithTokenizer(store_of("a", "b"))
    async with sim_fleet("a", "b", store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        yield fleet
        idle(fleet)


async def read_across_a_swap(fleet: Fleet, stream: FleetStream, after: int) -> list[Token]:
    tokens = [await anext(stream) for _ in range(after)]
    at = next(i.id for i in fleet.view().instances if i.num_requests)
    await fleet.swap(at, to="b")
    return tokens + await stream.collect()


def whole_text(stream: FleetStream) -> str:
    """What an undisturbed run decodes to, as the continuation of its prompt."""
    prompt, generated = list(stream.request.prompt), expected(stream.request)
    return Bytes().decode(prompt + generated)[len(Bytes().decode(prompt)) :]


@pytest.mark.parametrize("after", range(1, 12))
@virtual_time
async def test_the_text_of_a_request_that_moved_is_that_of_one_that_did_not(after: int) -> None:
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    async with two_replicas() as fleet, fleet.stream("a", PROMPT, sampling) as stream:
        tokens = await read_across_a_swap(fleet, stream, after)
        assert stream.num_hops == 2
        assert "".join(token.text for token in tokens) == whole_text(stream)


@pytest.mark.parametrize("after", range(1, 12))
@virtual_time
async def test_a_stop_string_that_lies_across_a_swap_ends_the_text_before_it(after: int) -> None:
    async with two_replicas() as fleet:
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=40, ignore_eos=True)) as probe:
            await probe.collect()
            whole = whole_text(probe)
        stop = whole[after - 1 : after + 3]
        sampling = Sampling(max_tokens=40, ignore_eos=True, stop=("never said", stop))
        async with fleet.stream("a", PROMPT, sampling) as stream:
            tokens = await read_across_a_swap(fleet, stream, 1)
            assert "".join(token.text for token in tokens) == whole[: whole.index(stop)]
            assert tokens[-1].finish_reason == "stop"
            assert all(token.finish_reason is None for token in tokens[:-1])


async def test_a_text_prompt_is_encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    run_sync = to_thread.run_sync

    async def recording(function, *args):  # type: ignore[no-untyped-def]
        encoded.append(function.__name__)
        return await run_sync(function, *args)

    monkeypatch.setattr(to_thread, "run_sync", recording)
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        done = await fleet.generate("a", "abcd", Sampling(max_tokens=3, ignore_eos=True))
    assert len(done.tokens) == 3
    assert encoded == ["encode"]
