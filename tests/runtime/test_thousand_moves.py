"""A thousand moves at random tokens, of streams of every kind, over ten architectures: nothing changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import anyio
import pytest

from hotswap import Fleet, MigrationLimits, MigrationMethod, Model, ModelId, Sampling, Token
from hotswap.abc import Tokenizer, WrapperStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.errors import InvalidRequest, MigrationAborted
from hotswap.policies import LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import VOCABULARY, make_model
from tests.runtime.support import Idle, until

# Among them windows that slide, soft caps, sinks, experts, latent attention and learned positions.
KINDS = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)
MOVES = 100
METHODS: tuple[MigrationMethod, ...] = ("kv", "kv", "tokens")


class Letters:
    """One token is one of five letters, so that stop strings of a few letters do occur."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return ["abcde".index(letter) for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join("abcde"[token % 5] for token in tokens)


class WithLetters(WrapperStore):
    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return Letters()


@dataclass(eq=False)
class Client:
    """Reads a stream, and moves it before tokens of its own choice."""

    prompt: tuple[int, ...]
    sampling: Sampling
    moments: set[int] = field(default_factory=set[int])
    read: list[Token] = field(default_factory=list[Token])

    async def run(self, fleet: Fleet, kind: str, random: Random) -> None:
        async with fleet.stream(kind, self.prompt, self.sampling) as stream:
            async for token in stream:
                self.read.append(token)
                if len(self.read) in self.moments:
                    to = "e1" if stream.hops[-1].instance == "e0" else "e0"
                    try:
                        await fleet.migrate(stream.request.id, to=to, method=random.choice(METHODS))
                    except (MigrationAborted, InvalidRequest):
                        continue  # it went elsewhere meanwhile, or has ended


def random_client(random: Random, number: int) -> Client:
    chosen = random.random() < 0.7
    return Client(
        prompt=tuple(random.randrange(2, VOCABULARY) for _ in range(random.choice([1, 15, 16, 40, 100]))),
        sampling=Sampling(
            max_tokens=random.randrange(30, 80),
            min_tokens=random.choice([0, 20]),
            ignore_eos=True,
            temperature=0.9 if chosen else 0.0,
            top_k=random.choice([0, 40]),
            top_p=random.choice([1.0, 0.9]),
            repetition_penalty=random.choice([1.0, 1.3]),
            presence_penalty=random.choice([0.0, 0.0, 0.7]),
            frequency_penalty=random.choice([0.0, 0.0, 0.4]),
            logit_bias=random.choice([(), ((7, 2.5), (11, -3.0))]),
            seed=number,
            stop=random.choice([(), ("abcd", "eeee")]),
            stop_token_ids=random.choice([(), tuple(random.sample(range(VOCABULARY), 8))]),
        ),
        moments=set(random.sample(range(1, 80), 16)),
    )


@asynccontextmanager
async def replicas(num: int, kind: str) -> AsyncGenerator[Fleet]:
    store, skeletons = DictStore(), SkeletonCache()
    store.add(kind, make_model(kind))
    engines = [
        TorchEngine(
            f"e{n}", skeletons=skeletons, kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=8
        )
        for n in range(num)
    ]
    fleet = Fleet(
        engines=engines,
        store=WithLetters(store),
        models=[Model(kind)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
        migration_limits=MigrationLimits(per_instance=4),
    )
    async with fleet:
        for engine in engines:
            await fleet.swap(engine.id, to=kind)
        yield fleet


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_that_move_again_and_again_are_those_of_an_undisturbed_run(kind: str) -> None:
    random = Random(kind)
    clients: list[Client] = []
    async with replicas(2, kind) as fleet:
        while sum(record.outcome == "done" for record in fleet.migrations) < MOVES:
            four = [random_client(random, len(clients) + n) for n in range(4)]
            clients += four
            async with anyio.create_task_group() as tasks:
                for client in four:
                    tasks.start_soon(client.run, fleet, kind, random)
        assert {record.method for record in fleet.migrations if record.outcome == "done"} == {"kv", "tokens"}
        assert all(instance.num_requests == 0 for instance in fleet.view().instances)
        await until(lambda: all(i.num_free_kv_blocks == i.num_kv_blocks for i in fleet.view().instances))
    undisturbed = [Client(client.prompt, client.sampling) for client in clients]
    async with replicas(1, kind) as fleet, anyio.create_task_group() as tasks:
        for client in undisturbed:
            tasks.start_soon(client.run, fleet, kind, random)
    assert [client.read for client in clients] == [client.read for client in undisturbed]
    assert {client.read[-1].finish_reason for client in clients} == {"stop", "length"}
