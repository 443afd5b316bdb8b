"""Checks of streams: their tokens, their ends, and the resources that they release."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import FrozenInstanceError, replace
from itertools import cycle
from typing import Any

import anyio
import pytest

from hotswap.engine import Engine
from hotswap.errors import InvalidRequest, PromptTooLong, RequestEvicted, UnknownAdapter
from hotswap.request import AdapterId, Token
from hotswap.testing.cancel import cancel_at, cancel_everywhere
from hotswap.testing.conformance.engine_suite import EngineSuite, collect, no_requests
from hotswap.testing.conformance.suite import check, until
from hotswap.view import InstanceState

__all__ = ["StreamChecks"]

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
_NO_TOKEN = 2**31 - 1


class StreamChecks(EngineSuite):
    """Checks of `Engine.stream` and of the view while streams run."""

    @check
    async def test_a_stream_yields_each_token_once_and_ends_with_a_reason(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card)
            tokens = await collect(setup.engine, request)
            assert_generation(tokens, first_index=0)
            assert [token.id for token in tokens] == await self.expected(request, setup.card)
            assert [token.text for token in tokens] == [""] * len(tokens), "an engine knows no text"

    @check
    async def test_max_tokens_ends_a_generation_by_length(self) -> None:
        async with self.serving() as setup:
            for max_tokens in (1, 2, 9):
                tokens = await collect(setup.engine, self.request(setup.card, max_tokens=max_tokens))
                assert_generation(tokens, first_index=0)
                assert len(tokens) == max_tokens
                assert tokens[-1].finish_reason == "length"

    @check
    async def test_the_end_of_the_context_ends_a_generation_by_length(self) -> None:
        async with self.serving(max_context_tokens=16) as setup:
            tokens = await collect(setup.engine, self.request(setup.card, 10, max_tokens=50))
            assert_generation(tokens, first_index=0)
            assert len(tokens) == 6
            assert tokens[-1].finish_reason == "length"

    @check
    async def test_a_stop_token_ends_a_generation_at_its_first_place(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card)
            undisturbed = await self.expected(request, setup.card)
            stop = undisturbed[len(undisturbed) // 2]
            stopping = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)))
            tokens = await collect(setup.engine, stopping)
            assert_generation(tokens, first_index=0)
            assert [token.id for token in tokens] == undisturbed[: undisturbed.index(stop) + 1]
            assert tokens[-1].finish_reason == "stop"

    @check
    async def test_an_end_token_of_the_model_ends_a_generation_unless_ignored(self) -> None:
        async with self.serving() as plain:
            request = self.request(plain.card)
            undisturbed = await self.expected(request, plain.card)
        end = undisturbed[len(undisturbed) // 2]
        async with self.serving(eos_token_ids=(end, _NO_TOKEN)) as setup:
            ignoring = await collect(setup.engine, request)
            assert [token.id for token in ignoring] == undisturbed
            heeding = replace(request, sampling=replace(request.sampling, ignore_eos=False))
            tokens = await collect(setup.engine, heeding)
            assert [token.id for token in tokens] == undisturbed[: undisturbed.index(end) + 1]
            assert tokens[-1].finish_reason == "stop"

    @check
    async def test_nothing_stops_before_min_tokens(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card)
            every = tuple(set(await self.expected(request, setup.card)))
            sampling = replace(request.sampling, stop_token_ids=every, min_tokens=8)
            tokens = await collect(setup.engine, replace(request, sampling=sampling))
            assert_generation(tokens, first_index=0)
            assert 8 <= len(tokens) <= request.sampling.max_tokens

    @check
    async def test_a_continued_request_gets_the_rest(self) -> None:
        async with self.serving() as setup:
            for sampling in (GREEDY, SAMPLED):
                request = self.request(setup.card, **sampling)
                whole = await self.expected(request, setup.card)
                for split in (1, 5, len(whole) - 1):
                    tokens = await collect(setup.engine, request.continued(whole[:split]))
                    assert_generation(tokens, first_index=split)
                    assert [token.id for token in tokens] == whole[split:]

    @check
    async def test_the_same_request_gives_the_same_tokens_beside_any_others(self) -> None:
        async with self.serving() as setup:
            requests = [
                self.request(setup.card, 1 + 7 * salt, salt=salt, max_tokens=4 + 5 * salt, **sampling)
                for salt, sampling in enumerate((GREEDY, SAMPLED, GREEDY, SAMPLED, SAMPLED | {"seed": 8}))
            ]
            async with self.streaming(setup.engine, requests) as readers:
                pass
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_more_requests_than_the_engine_can_hold_all_come_to_their_end(self) -> None:
        async with self.serving() as setup:
            view = setup.engine.status()
            each = min(self.long_tokens, 64)
            count = 1 + min(view.max_requests, view.num_kv_blocks * view.kv_block_tokens // each)
            if count > 80:
                pytest.skip("too many requests fit for a quick test; give the engine fewer KV blocks")
            requests = [self.request(setup.card, salt=salt, max_tokens=each) for salt in range(count)]
            async with self.streaming(setup.engine, requests) as readers:
                pass
            for reader in readers[:3] + readers[-3:]:
                await self.assert_whole(reader, setup.card)
            assert all(len(reader.ids) == each for reader in readers)

    @check
    async def test_a_prompt_that_fills_the_context_is_too_long(self) -> None:
        async with self.serving(max_context_tokens=16) as setup:
            with pytest.raises(PromptTooLong):
                await collect(setup.engine, self.request(setup.card, 16))
            await collect(setup.engine, self.request(setup.card, 15))

    @check
    async def test_a_prompt_beyond_all_kv_blocks_is_too_long(self) -> None:
        async with self.serving() as setup:
            most = setup.engine.status().max_tokens
            assert most is not None
            if most >= setup.card.max_context_tokens:
                pytest.skip("the engine's KV blocks hold a whole context")
            with pytest.raises(PromptTooLong):
                await collect(setup.engine, self.request(setup.card, most + 1))

    @check
    async def test_token_ids_outside_of_the_vocabulary_are_refused_by_the_name_of_their_field(self) -> None:
        fields: dict[str, Any] = {
            "logit_bias": {_NO_TOKEN: 1.0},
            "suppress_tokens": [1, _NO_TOKEN],
            "begin_suppress_tokens": [_NO_TOKEN],
            "forced_end_tokens": [_NO_TOKEN, 1],
            "bad_words_ids": [[1], [1, _NO_TOKEN]],
            "stop_token_ids": [_NO_TOKEN],
        }
        async with self.serving() as setup:
            for name, value in fields.items():
                with pytest.raises(InvalidRequest, match=name):
                    await collect(setup.engine, self.request(setup.card, **{name: value}))
            request = self.request(setup.card)
            for wrong in (replace(request, prompt=(1, _NO_TOKEN)), request.continued([_NO_TOKEN])):
                with pytest.raises(InvalidRequest, match="vocabulary"):
                    await collect(setup.engine, wrong)
            await collect(setup.engine, request)

    @check
    async def test_leaving_a_stream_gives_its_blocks_back(self) -> None:
        async with self.serving() as setup:
            for num_read in (0, 1, 3):
                async with setup.engine.stream(self.long_requests(setup.card)[0]) as tokens:
                    for _ in range(num_read):
                        await anext(tokens)
                await self.assert_given_back(setup.engine)

    @check
    async def test_a_stream_cancelled_anywhere_gives_its_blocks_back(self) -> None:
        async with self.serving() as setup:
            request = self.long_requests(setup.card)[0]

            async def read_a_little() -> None:
                async with setup.engine.stream(request) as tokens:
                    for _ in range(8):
                        await anext(tokens)

            async def look() -> None:
                await self.assert_given_back(setup.engine)

            await cancel_everywhere(read_a_little, look)

    @check
    async def test_a_reader_that_is_cancelled_disturbs_no_request(self) -> None:
        async with self.serving() as setup:
            one, two = (self.request(setup.card, salt=salt, max_tokens=30) for salt in (1, 2))
            async with self.streaming(setup.engine, [two]) as readers:
                with anyio.CancelScope() as scope:
                    async with setup.engine.stream(one) as tokens:
                        await anext(tokens)
                        scope.cancel()
                        await anyio.sleep_forever()
            await self.assert_whole(readers[0], setup.card)

    @check
    async def test_a_cancelled_iteration_loses_no_token(self) -> None:
        async with self.serving() as setup:
            request = self.request(setup.card, max_tokens=20)
            read: list[Token] = []
            async with setup.engine.stream(request) as tokens:

                async def read_one() -> None:
                    read.append(await anext(tokens))

                for number in cycle((1, 2, 3, 100)):
                    await cancel_at(number, read_one)
                    if read and read[-1].finish_reason is not None:
                        break
            assert [token.id for token in read] == await self.expected(request, setup.card)

    @check
    async def test_a_request_for_another_model_is_given_back(self) -> None:
        async with self.serving() as setup:
            with pytest.raises(RequestEvicted):
                await collect(setup.engine, self.request(setup.cards[1]))

    @check
    async def test_a_request_for_an_adapter_it_lacks_is_refused(self) -> None:
        async with self.serving() as setup:
            request = replace(self.request(setup.card), adapter=AdapterId("no-such-adapter"))
            with pytest.raises(UnknownAdapter, match="no-such-adapter"):
                await collect(setup.engine, request)

    @check
    async def test_an_empty_engine_admits_nothing(self) -> None:
        async with self.idle() as setup:
            with pytest.raises(RequestEvicted):
                await collect(setup.engine, self.request(setup.card))

    @check
    async def test_the_view_is_true_while_requests_come_and_go(self) -> None:
        async with self.serving() as setup:
            engine = setup.engine
            for count, request in enumerate(self.long_requests(setup.card), start=1):
                async with engine.stream(request) as tokens:
                    view = engine.status()
                    assert view.num_running + view.num_waiting == 1, f"request {count} is not seen: {view}"
                    await anext(tokens)
                    view = engine.status()
                    assert view.num_running == 1, f"request {count} runs, unseen: {view}"
                    used = view.num_kv_blocks - view.num_free_kv_blocks
                    least = -(-len(request.prompt) // view.kv_block_tokens)
                    most = -(-(len(request.prompt) + self.long_tokens) // view.kv_block_tokens)
                    assert least <= used <= most, f"the prompt alone takes {least} KV blocks: {view}"
                await until(lambda: no_requests(engine))

    @check
    async def test_the_view_tells_how_much_is_to_be_computed(self) -> None:
        async with self.serving() as setup, AsyncExitStack() as opened:
            engine, requests = setup.engine, self.long_requests(setup.card)
            assert engine.status().num_prefill_tokens == 0
            streams = [await opened.enter_async_context(engine.stream(request)) for request in requests]
            left, most = engine.status().num_prefill_tokens, sum(r.num_tokens for r in requests)
            assert 0 < left <= most, f"of {most} tokens nearly all are to be computed: {engine.status()}"
            for tokens in streams:
                await anext(tokens)
            await until(lambda: engine.status().num_prefill_tokens == 0)
            assert engine.status().num_running > 0

    @check
    async def test_the_view_counts_every_request(self) -> None:
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)):
                view = setup.engine.status()
                assert view.num_running + view.num_waiting == 3, f"three requests run: {view}"
            assert (view.state, view.model) == (InstanceState.SERVING, setup.card.id)
            assert no_requests(setup.engine)

    @check
    async def test_the_view_is_frozen(self) -> None:
        async with self.serving() as setup:
            before = setup.engine.status()
            copy = replace(before)
            async with setup.engine.stream(self.request(setup.card)) as tokens:
                await anext(tokens)
                assert before == copy, "a view stays what it was"
            with pytest.raises(FrozenInstanceError):
                before.num_running = 1  # type: ignore[misc]

    async def assert_given_back(self, engine: Engine) -> None:
        """Raise unless a stream that was just left has released its resources by the end of the next step."""
        left_at_s = anyio.current_time()
        await until(lambda: no_requests(engine))
        assert anyio.current_time() - left_at_s <= 2 * self.step_s, "a request outlived its stream"


def assert_generation(tokens: list[Token], *, first_index: int) -> None:
    """Raise unless indices follow each other and the last token, and it alone, has a finish reason."""
    assert [token.index for token in tokens] == list(range(first_index, first_index + len(tokens)))
    assert tokens, "a generation has at least one token"
    assert [token.finish_reason is not None for token in tokens] == [False] * (len(tokens) - 1) + [True]
