"""One model for engines of several kinds, and requests that go from kind to kind.

    OMP_NUM_THREADS=1 .cache/vllm-env/bin/python -m tests.backends.llamacpp.kinds 200

has a `TorchEngine`, a `VllmEngine` and a `LlamaCppEngine` evict so many requests, in turn.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import anyio
import gguf
import numpy as np
import transformers

from hotswap import Fleet, Model, Request, RequestId, Token
from hotswap.abc import Engine, ModelCard, WeightStore, WrapperEngine
from hotswap.backends.llamacpp import LlamaCppEngine
from hotswap.backends.torch import TorchEngine
from hotswap.policies.schedulers import KeepAsIs
from tests.backends.evictions import Client, rounds
from tests.backends.llamacpp.asking import answer, ask, ids
from tests.backends.llamacpp.gguf_files import GgufStore, add_vocabulary, write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import COMMON, make_model

MODEL, HEAD = "m", 32
PROMPTS = ([5, 6, 7], [11, 22, 33, 44, 55, 66], [300, 200, 100, 400, 17, 18, 19, 20, 21])
NEAR = 0.02  # of log-probabilities; llama.cpp rounds some functions to 16 bits
_HALVES = 2  # a rotary embedding turns pairs: neighbours in GGUF, halves in transformers


class FromItsStore(WrapperEngine):
    """An engine that loads from a store of its own, which has the models in the layout that it takes."""

    def __init__(self, engine: Engine, store: WeightStore) -> None:
        super().__init__(engine)
        self._store = store

    def check_model(self, model: ModelCard) -> None:
        """Refuse none: the card is of another store, whose layout the wrapped engine would look at."""

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        manifest = await self._store.manifest(model.id)
        await self.wrapped.load(replace(model, weight_bytes=manifest.weight_bytes), self._store)


def make_stores(root: Path) -> tuple[DictStore, GgufStore]:
    """The same weights as the modules of transformers, and as a GGUF file."""
    model = make_model(transformers.LlamaConfig(**COMMON, head_dim=HEAD), seed=1)
    modules = DictStore()
    modules.add(MODEL, model)
    return modules, GgufStore({MODEL: write_gguf_of(model, root / "m.gguf")})


def make_llama_cpp(store: GgufStore) -> Engine:
    """An engine that rounds as little as a `TorchEngine` in fp32 does."""
    exact = {"cache_type_k": "GGML_TYPE_F32", "cache_type_v": "GGML_TYPE_F32"}
    engine = LlamaCppEngine("llamacpp", kv_tokens=2048, max_requests=2, threads=1, arguments=exact)
    return FromItsStore(engine, store)


def make_engines(kinds: Sequence[str], files: GgufStore) -> dict[str, Engine]:
    """Engines of the kinds `"torch"`, `"vllm"` and `"llamacpp"`."""
    engines: dict[str, Engine] = {}
    for kind in kinds:
        if kind == "torch":
            engines[kind] = TorchEngine(kind, kv_tokens=2048, threads=1)
        elif kind == "vllm":
            vllm: Any = import_module("hotswap.backends.vllm")  # installed in an environment of its own
            sizes = {"kv_bytes": "8 MiB", "kv_block_tokens": 32, "memory_bytes": "256 MiB"}
            engines[kind] = vllm.VllmEngine(kind, dtype="float32", **sizes)
        else:
            engines[kind] = make_llama_cpp(files)
    return engines


def write_gguf_of(model: Any, path: Path) -> Path:
    """Write a llama model of transformers as GGUF in fp32."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weights = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = weights.reshape(-1, _HALVES, HEAD // _HALVES, weights.shape[1])
            weights = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weights.shape)
        place = names.get_name(name, try_suffixes=(".weight",))
        assert place is not None, name
        writer.add_tensor(place, weights)
    write(writer)
    return path


async def assert_alike(engines: dict[str, Engine], card: ModelCard, store: WeightStore) -> None:
    """Raise unless engines answer the same prompts alike, one engine after another.

    All tell the same log-probabilities, but for rounding, wherever the first engine's answer is cut.
    """
    answers = list[list[Token]]()
    for engine in engines.values():
        async with engine:
            await engine.load(card, store)
            answers = answers or [await answer(engine, asked(prompt, logprobs=20)) for prompt in PROMPTS]
            for prompt, whole in zip(PROMPTS, answers, strict=True):
                for cut in (0, 9, len(whole) - 1):
                    begun = asked(prompt, logprobs=20).continued([token.id for token in whole[:cut]])
                    async with engine.stream(begun) as tokens:
                        assert near(await anext(tokens), whole[cut]), (engine, prompt, cut)


def near(one: Token, other: Token) -> bool:
    """Whether two engines tell the same of a position, but for the least probable tokens of either."""
    first, second = ({top.id: top.logprob for top in token.top_logprobs} for token in (one, other))
    shared = first.keys() & second.keys()
    return len(shared) > 15 and all(abs(first[token] - second[token]) < NEAR for token in shared)


def asked(prompt: list[int], max_tokens: int = 24, logprobs: int | None = None) -> Request:
    """A greedy request."""
    return ask(prompt, model=MODEL, max_tokens=max_tokens, logprobs=logprobs)


async def assert_goes_on_across(engines: dict[str, Engine], store: WeightStore, num_hops: int) -> None:
    """Raise unless a request that each kind evicts in turn has every token once, in order."""
    got, hops, away = list[Token](), list[int](), list[str]()
    evicted = 0
    async with Fleet(
        engines=list(engines.values()), store=store, models=[Model(MODEL)], scheduler=KeepAsIs()
    ) as fleet:
        for kind in engines:
            await fleet.swap(kind, to=MODEL)
        async with fleet.stream(MODEL, PROMPTS[0], asked(PROMPTS[0], 900).sampling) as stream:
            while len(stream.hops) < num_hops:
                got.append(await anext(stream))
                hops.append(hop := len(stream.hops))
                if hop == evicted or hops.count(hop) < 4:  # tokens of before are read on after an eviction
                    continue
                evicted = hop
                await fleet.unload(here := stream.hops[-1].instance)
                away.append(here)
                while len(away) > len(engines) - 2:  # so that of three it goes on to the third
                    await fleet.swap(away.pop(0), to=MODEL)
    assert [token.index for token in got] == list(range(len(got)))
    assert {hop.instance for hop in stream.hops} == set(engines), "every kind has had it"


async def assert_parts_are_those_of_their_kinds(
    engines: dict[str, Engine], store: DictStore, num_evictions: int
) -> int:
    """Raise unless each part of a request has the tokens that its engine alone gives for those before it.

    The engines evict so many requests, in turn. Returns how many parts were compared.
    """
    card, done = store.card(MODEL), list[Client]()
    requests = [replace(asked(prompt), id=RequestId(f"r{at}")) for at, prompt in enumerate(PROMPTS)]
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine)
        async for clients in rounds(
            list(engines.values()), card, store, requests, num_evictions=num_evictions, random=Random(3)
        ):
            done += clients
        for client in done:
            assert [token.index for token in client.tokens] == list(range(client.request.sampling.max_tokens))
        num_compared = 0
        for engine in engines.values():
            await engine.load(card, store)
            for client in done:
                ends = [*(start for _, start in client.parts[1:]), len(client.tokens)]
                for (there, start), end in zip(client.parts, ends, strict=True):
                    if there is engine and end > start:
                        alone = await ids(engine, client.request.continued(client.ids[:start]))
                        assert alone[: end - start] == client.ids[start:end], (engine, client.request, start)
                        num_compared += 1
            await engine.unload()
    return num_compared


async def main(num_evictions: int) -> None:
    """Print what came of so many evictions across all kinds."""
    with tempfile.TemporaryDirectory() as scratch:
        modules, files = make_stores(Path(scratch))
        engines = make_engines(("torch", "vllm", "llamacpp"), files)
        num_parts = await assert_parts_are_those_of_their_kinds(engines, modules, num_evictions)
    sys.stdout.write(f"{num_evictions} evictions, {num_parts} parts: each is what its engine gives alone.\n")


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]))
