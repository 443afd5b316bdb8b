"""Text in, text out, across a swap: no character is split and no stop string missed, on any engine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest
from anyio import to_thread

from hotswap import Fleet, FleetStream, ModelId, Sampling, Token
from hotswap.abc import Tokenizer, WeightStore, WrapperStore
from hotswap.errors import InvalidRequest, PromptTooLong
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, expected, idle, sim_fleet, store_of

PROMPT = (70, 71, 72)
LETTERS = "abcdé€𝄞 ".encode()


class Bytes:
    """One token is one byte, so that a character may take up to four tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return [LETTERS.index(byte) + 1 for byte in text.encode()]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(LETTERS[token % len(LETTERS)] for token in tokens).decode(errors="replace")


class WithTokenizer(WrapperStore):
    def __init__(self, store: WeightStore, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(store)
        self._tokenizer = tokenizer or Bytes()

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return self._tokenizer


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


class Noting(Bytes):
    """Notes the threads that encode."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        self.threads.append(threading.get_ident())
        return super().encode(text)


async def test_texts_are_encoded_off_the_loop_though_callers_hold_every_thread() -> None:
    tokenizer = Noting()
    async with (
        sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet,
        AsyncExitStack() as held,
    ):
        limiter = to_thread.current_default_thread_limiter()
        for borrower in range(int(limiter.total_tokens)):
            limiter.acquire_on_behalf_of_nowait(borrower)
            held.callback(limiter.release_on_behalf_of, borrower)
        done = await fleet.generate("a", "abcd", Sampling(max_tokens=3, ignore_eos=True))
    assert len(done.tokens) == 3
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads


class Slow(Bytes):
    """Encodes long texts only once it is let."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        if len(text) > 1000:
            self.began.set()
            self.go_on.wait()
        return super().encode(text[:10])


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    tokenizer = Slow()
    sampling = Sampling(max_tokens=3, ignore_eos=True, truncate_prompt_tokens=5)
    async with sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet:
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(fleet.generate, "a", "a" * 200_000, sampling)
                await to_thread.run_sync(tokenizer.began.wait)
                for _ in range(5):
                    assert len((await fleet.generate("a", "abcd", sampling)).tokens) == 3
                tokenizer.go_on.set()
        finally:
            tokenizer.go_on.set()
        idle(fleet)


class Waiting(Bytes):
    """Encodes no text before it is let, and counts those that it encodes at a time."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.num_running = self.most_running = self.num_ended = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.began.set()
        self.go_on.wait(10)
        self.num_running -= 1
        self.num_ended += 1
        return [1]


@pytest.mark.parametrize("length", [10, 200_000])
async def test_a_client_that_leaves_does_not_wait_for_its_text(length: int) -> None:
    tokenizer = Waiting()
    async with sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.generate, "a", "a" * length)
            await to_thread.run_sync(tokenizer.began.wait)
            tasks.cancel_scope.cancel()
        assert not tokenizer.num_ended
        tokenizer.go_on.set()


@pytest.mark.parametrize("length", [10, 200_000])
async def test_clients_that_come_and_go_hold_no_more_threads_than_others(length: int) -> None:
    tokenizer = Waiting()
    async with sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet:
        for _ in range(12):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):  # asyncio's own cancellation, which leaves threads alone
                    await fleet.generate("a", "a" * length)
        assert 1 <= tokenizer.most_running <= 4
        tokenizer.go_on.set()


class Bounded(Noting):
    """Knows that no token has more than four characters."""

    def least_tokens(self, text: str) -> int:
        return -(-len(text) // 4)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    tokenizer, context = Bounded(), 100
    async with sim_fleet("a", store=WithTokenizer(store_of("a", context=context), tokenizer)) as fleet:
        with pytest.raises(PromptTooLong, match="truncate_prompt_tokens"):
            await fleet.generate("a", "a" * (4 * context))
        assert not tokenizer.threads
        with pytest.raises(PromptTooLong):  # the bound does not tell, and its tokens do
            await fleet.generate("a", "a" * (4 * context - 8))
        assert tokenizer.threads
        kept = Sampling(truncate_prompt_tokens=5, max_tokens=3, ignore_eos=True)
        done = await fleet.generate("a", "a" * (4 * context), kept)
    assert done.usage.prompt_tokens == 5


async def test_a_text_of_far_too_many_characters_is_not_encoded_to_be_truncated() -> None:
    tokenizer = Noting()
    kept = Sampling(truncate_prompt_tokens=5, max_tokens=3, ignore_eos=True)
    async with sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet:
        with pytest.raises(PromptTooLong, match=r"4,194,305 characters, over the 4,194,304"):
            await fleet.generate("a", "a" * ((1 << 22) + 1), kept)
    assert not tokenizer.threads


class Unread(list[int]):
    """Token ids that tell how many they are, and cannot be read one by one."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("each was read")


async def test_of_token_ids_that_are_too_many_none_is_read() -> None:
    many = Unread([5] * 1000)
    async with sim_fleet("a", store=store_of("a", context=100)) as fleet:
        with pytest.raises(PromptTooLong, match="1000 tokens and model 'a' a context of 100"):
            await fleet.generate("a", many)
        kept = Sampling(truncate_prompt_tokens=5, max_tokens=3, ignore_eos=True)
        assert (await fleet.generate("a", many, kept)).usage.prompt_tokens == 5


async def test_an_end_token_has_no_text_unless_it_is_asked_for() -> None:
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        free = await fleet.generate("a", PROMPT, Sampling(max_tokens=8, ignore_eos=True))
        end = free.tokens[3].id
        stop = Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=(end,))
        cut = await fleet.generate("a", PROMPT, stop)
        kept = await fleet.generate("a", PROMPT, replace(stop, include_stop=True))
    first = next(at for at, token in enumerate(free.tokens) if token.id == end)
    letters = Bytes()
    ids = [token.id for token in free.tokens]
    assert cut.text == letters.decode(ids[:first])
    assert kept.text == letters.decode(ids[: first + 1])
    assert cut.matched_stop == kept.matched_stop == end
    assert cut.finish_reason == "stop"
    assert [token.id for token in cut.tokens] == ids[: first + 1]


async def test_a_completion_tells_what_it_was() -> None:
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        whole = await fleet.generate("a", PROMPT, Sampling(max_tokens=8, ignore_eos=True))
        letter = whole.text[3]
        done = await fleet.generate("a", PROMPT, Sampling(max_tokens=8, ignore_eos=True, stop=letter))
        async with fleet.stream("a", PROMPT, Sampling(max_tokens=8, ignore_eos=True)) as stream:
            assert (stream.finish_reason, stream.ttft_s) == (None, None)
            same = await stream.complete()
            assert stream.usage == same.usage
    assert done.matched_stop == letter
    assert done.text == whole.text[: whole.text.index(letter)]
    assert whole.usage.prompt_tokens == 3
    assert whole.usage.generated_tokens == 8
    assert whole.usage.total_tokens == 11
    assert whole.matched_stop is None
    assert whole.seed is None
    assert [hop.instance for hop in whole.hops] == ["e0"]
    assert 0 < whole.queue_s < whole.ttft_s  # the model had to be loaded first
    assert same.tokens == whole.tokens


async def test_an_unseeded_request_draws_its_seed_once_and_tells_it() -> None:
    sampling = Sampling(max_tokens=8, ignore_eos=True, temperature=1.0)
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        some = [await fleet.generate("a", PROMPT, sampling) for _ in range(4)]
        again = await fleet.generate("a", PROMPT, replace(sampling, seed=some[0].seed))
    assert len({done.seed for done in some}) == len({done.text for done in some}) == 4
    assert again.tokens == some[0].tokens


@pytest.mark.parametrize(
    "prompt",
    [
        [[0, 1]],
        [0.5],
        None,
        ["a"],
        {"input_ids": [1]},
        "a\ud800b",
        b"ab",
        [True],
        [-1],
        [2**40],
        [],
        "",
        5,
        {1, 2},
        frozenset({1, 2}),
        {1: 2}.keys(),
    ],  # the last ones are in no order that can be meant
    ids=repr,
)
async def test_a_prompt_that_is_neither_text_nor_tokens_is_refused(prompt: Any) -> None:
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        with pytest.raises(InvalidRequest, match="prompt"):
            await fleet.generate("a", prompt)


@pytest.mark.parametrize(
    "wrong", [{"model": 5}, {"model": ["a"]}, {"adapter": 3}, {"sampling": {"n": 1}}], ids=repr
)
async def test_an_argument_of_another_type_is_refused_by_name(wrong: dict[str, Any]) -> None:
    async with sim_fleet("a") as fleet:
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            await fleet.generate(**{"model": "a", "prompt": PROMPT} | wrong)


async def test_only_the_end_of_a_long_prompt_is_kept_where_asked() -> None:
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        sampling = Sampling(max_tokens=1, truncate_prompt_tokens=2)
        for prompt, kept in (("abcd", (3, 4)), ((7, 8, 9), (8, 9)), ((9,), (9,))):
            async with fleet.stream("a", prompt, sampling) as stream:
                assert stream.request.prompt == kept


async def test_as_many_tokens_as_fit_can_be_asked_for() -> None:
    async with sim_fleet("a", store=store_of("a", context=64)) as fleet:
        done = await fleet.generate("a", PROMPT, Sampling(max_tokens=None, ignore_eos=True))
    assert done.usage.total_tokens == 64
    assert done.finish_reason == "length"


async def test_logprobs_come_with_the_text_of_their_tokens() -> None:
    sampling = Sampling(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    async with sim_fleet("a", store=WithTokenizer(store_of("a"))) as fleet:
        done = await fleet.generate("a", PROMPT, sampling)
        plain = await fleet.generate("a", PROMPT, Sampling(max_tokens=4, ignore_eos=True))
    letters = Bytes()
    for token in done.tokens:
        assert token.logprob == token.top_logprobs[0].logprob
        assert [top.text for top in token.top_logprobs] == [
            letters.decode((top.id,)) for top in token.top_logprobs
        ]
        assert len(token.top_logprobs) == 2
    assert [entry.id for entry in done.prompt_logprobs] == list(PROMPT)
    assert [entry.logprob is None for entry in done.prompt_logprobs] == [True, False, False]
    assert {token.logprob for token in plain.tokens} == {None}
    assert plain.prompt_logprobs == ()


class Spelling(Bytes):
    """Notes the tokens that are decoded by themselves, special ones too, and the threads that do it."""

    def __init__(self) -> None:
        self.decoded: Counter[int] = Counter()
        self.threads = set[int]()

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            self.decoded.update(tokens)
            self.threads.add(threading.get_ident())
        return super().decode(tokens)


@pytest.mark.parametrize(("length", "on_loop"), [(100, True), (2000, False)])
async def test_each_token_told_of_a_prompt_is_decoded_once_and_those_of_long_ones_off_the_loop(
    length: int, on_loop: bool
) -> None:
    tokenizer = Spelling()
    sampling = Sampling(max_tokens=8, ignore_eos=True, prompt_logprobs=2)
    prompt = [70 + n % 5 for n in range(length)]
    async with (
        sim_fleet("a", store=WithTokenizer(store_of("a"), tokenizer)) as fleet,
        fleet.stream("a", prompt, sampling) as stream,
    ):
        first = await anext(stream)
        told = stream.prompt_logprobs
        tokens = [first, *await stream.collect()]
        assert [token.id for token in tokens] == expected(stream.request)
    assert [entry.id for entry in told] == prompt
    tops = [top for entry in told for top in entry.top_logprobs]
    assert len(tops) == 2 * (length - 1)
    assert all(top.text == Bytes().decode((top.id,)) for top in tops)
    assert tokenizer.decoded == Counter({top.id for top in tops})
    assert (threading.get_ident() in tokenizer.threads) == on_loop
    assert len(tokenizer.threads) == 1


class SpellingOnceLet(Bytes):
    """Decodes no token by itself before it is let."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens:
            self.began.set()
            self.go_on.wait(10)
        return super().decode(tokens)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "moves"])
async def test_a_request_may_leave_or_move_while_texts_of_its_prompt_are_written(leaves: bool) -> None:
    tokenizer = SpellingOnceLet()
    store = WithTokenizer(store_of("a", "b"), tokenizer)
    sampling = Sampling(max_tokens=300, ignore_eos=True, prompt_logprobs=1)
    async with sim_fleet("a", "b", store=store, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        await fleet.swap("e1", to="a")
        async with fleet.stream("a", [70] * 2000, sampling) as stream:
            await to_thread.run_sync(tokenizer.began.wait)
            if not leaves:
                await fleet.swap(next(i.id for i in fleet.view().instances if i.num_requests), to="b")
                tokenizer.go_on.set()
                assert [token.id for token in await stream.collect()] == expected(stream.request)
                assert stream.num_hops == 2
                assert len(stream.prompt_logprobs) == 2000
        idle(fleet)
        tokenizer.go_on.set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [f"{at:010b}".replace("0", "a").replace("1", "b") for at in range(600)],
            "^bad_words and bad_words_ids",
        ),
        (["b", "€" * 400], r"^bad_words\[1\] has 1,200 tokens"),
    ],
)
async def test_forbidden_words_of_too_many_tokens_are_refused_by_their_own_name(
    words: list[str], message: str
) -> None:
    async with two_replicas() as fleet:
        with pytest.raises(InvalidRequest, match=message):
            await fleet.generate("a", PROMPT, Sampling(bad_words=words))


@virtual_time
async def test_texts_are_encoded_and_decoded_as_requests_are() -> None:
    async with two_replicas() as fleet:
        async with fleet.stream("a", "abcd€", Sampling(max_tokens=1)) as stream:
            prompt = stream.request.prompt
        assert await fleet.models.encode("a", "abcd€") == prompt
        assert await fleet.models.decode("a", prompt) == Bytes().decode(prompt)
        assert len(await fleet.models.encode("a", "a" * 5000)) == 5000  # more than the context
        with pytest.raises(InvalidRequest, match="prompt is 5"):
            await fleet.models.encode("a", 5)  # type: ignore[arg-type]
