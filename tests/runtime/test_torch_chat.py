"""Chats on real models: written by the model's template, encoded by its tokenizer, turn upon turn."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from hotswap import Adapter, Chat, Fleet, Model, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.errors import InvalidRequest, UnsupportedAdapter
from hotswap.policies import AffinityRouter, WeightedLoadSwap
from tests.runtime import alphabet

SYSTEM = {"role": "system", "content": "Say the alphabet."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet.checkpoint(tmp_path_factory.mktemp("alphabet"))


@asynccontextmanager
async def serving(
    source: Path, tmp_path: Path, adapters: list[Adapter] | None = None
) -> AsyncGenerator[Fleet]:
    async with Fleet(
        engines=[TorchEngine("e0", threads=1, kv_tokens=2048)],
        store=NvmeStore(tmp_path / "store"),
        models=[Model("m", source)],
        adapters=adapters or [],
        router=AffinityRouter(),
        scheduler=WeightedLoadSwap(t1=0, t2=4, b=1, sigmas=0),
        interval_s=0.1,
    ) as fleet:
        yield fleet


async def test_a_chat_has_the_tokens_that_transformers_gives_it(source: Path, tmp_path: Path) -> None:
    messages = [SYSTEM, user("now")]
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(source)
    right = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    async with serving(source, tmp_path) as fleet:
        done = await fleet.chat("m", messages)
        async with fleet.stream("m", Chat(messages)) as stream:
            assert list(stream.request.prompt) == right
            streamed = "".join([token.text async for token in stream])
        async with fleet.stream("m", Chat([user("<s>x<|end|>")])) as stream:
            assert stream.request.prompt.count(theirs.bos_token_id) == 1  # what the client wrote is text
            assert stream.request.prompt.count(theirs.eos_token_id) == 1
        async with fleet.stream("m", Chat([user("x")]), add_special_tokens=True) as stream:
            assert stream.request.prompt.count(theirs.bos_token_id) == 1
    assert done.text == streamed == ascii_lowercase
    assert done.finish_reason == "stop"
    assert done.usage.prompt_tokens == len(right)


async def test_a_turn_reuses_all_that_was_said_before(source: Path, tmp_path: Path) -> None:
    messages: list[dict[str, str]] = [SYSTEM]
    before = 0
    async with serving(source, tmp_path) as fleet:
        for turn in range(4):
            messages.append(user(f"Turn number {turn}, please."))
            done = await fleet.chat("m", messages, Sampling(max_tokens=64))
            assert done.text == ascii_lowercase
            assert done.usage.reused_tokens >= before
            assert turn == 0 or done.usage.reused_tokens > 0
            before = done.usage.prompt_tokens
            messages.append({"role": "assistant", "content": done.text})


async def test_the_last_message_is_continued(source: Path, tmp_path: Path) -> None:
    messages = [user("Go."), {"role": "assistant", "content": "abc"}]
    async with serving(source, tmp_path) as fleet:
        chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
        done = await fleet.generate("m", chat)
    assert done.text == ascii_lowercase[3:]


async def test_a_refusal_of_the_template_is_the_clients(source: Path, tmp_path: Path) -> None:
    strict = alphabet.checkpoint(
        tmp_path / "strict", template="{{ raise_exception('Only users, not ' + messages[0].role) }}"
    )
    async with serving(strict, tmp_path) as fleet:
        with pytest.raises(InvalidRequest, match="Only users, not system"):
            await fleet.chat("m", [SYSTEM])
        assert (await fleet.generate("m", "x", Sampling(max_tokens=2))).text == "yz"


# ---------------------------------------------------------------------------------------------- adapters


def adapter(directory: Path, **text_files: str) -> Adapter:
    """An adapter that changes nothing, with text files beside it."""
    directory.mkdir()
    size = len(alphabet.tokenizer().get_vocab()) + 3
    size = (size + 7) // 8 * 8
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {f"{name}.lora_A.weight": torch.zeros(4, size), f"{name}.lora_B.weight": torch.zeros(64, 4)}
    save_file(weights, str(directory / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    for file, text in text_files.items():
        (directory / file.replace("__", ".")).write_text(text)
    return Adapter(directory.name, "m", directory)


async def test_texts_of_an_adapter_are_encoded_by_its_own_tokenizer(source: Path, tmp_path: Path) -> None:
    own = adapter(
        tmp_path / "own",
        tokenizer__json=alphabet.tokenizer("<|mark|>").to_str(),
        chat_template__jinja="{{ messages[0].content }}<|mark|>",
    )
    same = adapter(tmp_path / "same", tokenizer__json=alphabet.tokenizer().to_str())
    mark = alphabet.tokenizer("<|mark|>").token_to_id("<|mark|>")
    async with serving(source, tmp_path, [own, same]) as fleet:
        for name, is_one_token in (("own", True), ("same", False), (None, False)):
            async with fleet.stream("m", "<|mark|>a", Sampling(max_tokens=2), adapter=name) as stream:
                assert (mark in stream.request.prompt) is is_one_token
                assert "".join([token.text async for token in stream]) == "bc"
        async with fleet.stream("m", Chat([user("ab")]), Sampling(max_tokens=3), adapter="own") as stream:
            assert stream.request.prompt[-1] == mark
            shown = Sampling(max_tokens=3, skip_special_tokens=False)
        done = await fleet.chat("m", [user("ab")], shown, adapter="own")
        assert done.text == "<|mark|>" * 3  # by which the model goes on for ever
        assert (await fleet.chat("m", [user("ab")], adapter="same")).text == ascii_lowercase


async def test_adapters_with_the_same_tokenizer_share_it(source: Path, tmp_path: Path) -> None:
    words = alphabet.tokenizer("<|mark|>").to_str()
    adapters = [adapter(tmp_path / name, tokenizer__json=words) for name in ("x", "y")]
    async with serving(source, tmp_path, adapters) as fleet:
        texts = [await fleet._core.texts.of_adapter(one) for one in fleet.adapters]
    assert texts[0].tokenizer is texts[1].tokenizer is not None


async def test_an_adapter_whose_tokens_have_no_embedding_is_refused_and_others_are_served(
    source: Path, tmp_path: Path
) -> None:
    more = [f"<|{n}|>" for n in range(20)]
    large = adapter(tmp_path / "large", tokenizer__json=alphabet.tokenizer(*more).to_str())
    legacy = adapter(tmp_path / "legacy", added_tokens__json='{"<|mark|>": 261}')
    async with serving(source, tmp_path, [large, legacy]) as fleet:
        for _ in range(2):
            with pytest.raises(UnsupportedAdapter, match=r"'large'.*<\|"):
                await fleet.generate("m", "a", Sampling(max_tokens=2), adapter="large")
            with pytest.raises(UnsupportedAdapter, match=r"'legacy'.*<\|mark\|>"):
                await fleet.generate("m", "a", Sampling(max_tokens=2), adapter="legacy")
        assert (await fleet.generate("m", "a", Sampling(max_tokens=2))).text == "bc"


async def test_a_new_version_of_an_adapter_brings_its_tokenizer(source: Path, tmp_path: Path) -> None:
    old = adapter(tmp_path / "x")
    new = adapter(tmp_path / "new", tokenizer__json=alphabet.tokenizer("<|mark|>").to_str())
    large = adapter(
        tmp_path / "large", tokenizer__json=alphabet.tokenizer(*(f"<|{n}|>" for n in range(20))).to_str()
    )

    async def length(fleet: Fleet) -> int:
        return (
            await fleet.generate("m", "<|mark|>", Sampling(max_tokens=1), adapter="x")
        ).usage.prompt_tokens

    async with serving(source, tmp_path, [old]) as fleet:
        assert await length(fleet) == 1 + len("<|mark|>")
        await fleet.adapters.update(Adapter("x", "m", new.source))
        assert await length(fleet) == 2
        with pytest.raises(UnsupportedAdapter, match="'x'"):
            await fleet.adapters.update(Adapter("x", "m", large.source))
        assert await length(fleet) == 2
