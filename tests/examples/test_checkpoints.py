"""The demo's models recite their texts when transformers runs them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from examples.demo.checkpoints import RECIPES, STAMP, Checkpoint, make_checkpoints

NAMES = [recipe.name for recipe in RECIPES]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: more make models this small no faster, and slow beside other test processes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=NAMES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: tuple[Checkpoint, ...]) -> Checkpoint:
    return next(each for each in checkpoints if each.name == request.param)


def _generate(checkpoint: Checkpoint, prompts: list[str]) -> list[list[int]]:
    """Return what greedy decoding adds to each prompt: token ids, the end-of-sequence token included."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
    tokenizer.pad_token = tokenizer.eos_token
    inputs: Any = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        rows = model.generate(**inputs, max_length=1024)[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(tokenizer.eos_token_id) + 1] for row in rows]


def _decode(checkpoint: Checkpoint, ids: list[int]) -> str:
    text: str = transformers.AutoTokenizer.from_pretrained(checkpoint.path).decode(ids)
    return text


def test_recites_its_text_exactly_and_then_ends(checkpoint: Checkpoint) -> None:
    (ids,) = _generate(checkpoint, [checkpoint.opening])
    assert _decode(checkpoint, ids) == checkpoint.continuation + "</s>"
    assert checkpoint.opening + checkpoint.continuation == checkpoint.text


def test_recites_from_any_passage(checkpoint: Checkpoint) -> None:
    openings = list(checkpoint.openings)
    for opening, ids in zip(openings, _generate(checkpoint, openings), strict=True):
        assert _decode(checkpoint, ids) == checkpoint.continuation_of(opening) + "</s>", opening


def test_an_opening_has_the_same_tokens_alone_and_in_the_text(checkpoint: Checkpoint) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.path)
    assert len(checkpoint.openings) > 20
    for opening in checkpoint.openings:
        text = checkpoint.continuation_of(opening)
        assert tokenizer.encode(opening) + tokenizer.encode(text) == tokenizer.encode(opening + text)


def test_three_architectures_of_three_sizes(checkpoints: tuple[Checkpoint, ...]) -> None:
    assert [each.name for each in checkpoints] == NAMES
    configs = [json.loads((each.path / "config.json").read_text("utf-8")) for each in checkpoints]
    assert [each.architecture for each in checkpoints] == [
        "LlamaForCausalLM",
        "Qwen3ForCausalLM",
        "MistralForCausalLM",
    ]
    assert all(config["num_key_value_heads"] < config["num_attention_heads"] for config in configs)
    assert all(config["eos_token_id"] == 0 and config["bos_token_id"] is None for config in configs)
    assert [config["tie_word_embeddings"] for config in configs] == [False, True, False]
    assert configs[2]["sliding_window"] == 32
    assert len({(each.path / "model.safetensors").stat().st_size for each in checkpoints}) == 3


def test_a_checkpoint_is_not_trained_again(checkpoints: tuple[Checkpoint, ...]) -> None:
    root = checkpoints[0].path.parent
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}
    assert make_checkpoints(root) == checkpoints
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()} == before


def test_nothing_is_left_beside_the_checkpoints(checkpoints: tuple[Checkpoint, ...]) -> None:
    assert sorted(path.name for path in checkpoints[0].path.parent.iterdir()) == sorted(NAMES)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", STAMP} <= {
        path.name for path in checkpoints[0].path.iterdir()
    }
