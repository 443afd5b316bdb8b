"""What a checkpoint says of text is kept with its weights, as data, and goes along to every tier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from hotswap import Adapter, Model, ModelId
from hotswap.abc import SupportsTextSettings
from hotswap.backends.stores import NvmeStore, RemoteStore, TieredStore, text_files
from hotswap.backends.stores.convert import convert
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.chat import Chat
from hotswap.errors import ShardCorrupt, StoreError, UnsupportedAdapter
from hotswap.store import WeightStore
from hotswap.text import TextSettings

M = ModelId("tiny")
HELLO = [{"role": "user", "content": "hello"}]
TOOL = [{"type": "function", "function": {"name": "f"}}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def source(tmp_path: Path, checkpoint: Path) -> Path:
    """A checkpoint to write files into."""
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


def write(source: Path, **files: Any) -> None:
    for name, content in files.items():
        (source / f"{name}.json").write_text(json.dumps(content))


async def imported(source: Path, root: Path) -> TextSettings:
    async with NvmeStore(root) as store:
        await store.import_model(Model("tiny", source))
        settings = await store.text_settings(M)
        assert settings is not None
        return settings


def rendered(settings: TextSettings, **options: Any) -> str:
    assert settings.chat_template is not None
    return settings.chat_template.render(Chat(HELLO, **options))


def theirs(source: Path, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    return str(tokenizer.apply_chat_template(HELLO, tokenize=False, **options))


def config_with_text(source: Path) -> None:
    write(source, tokenizer_config={"chat_template": TEMPLATE, "bos_token": "<s>"})


def config_with_list(source: Path) -> None:
    named = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools[0] | tojson }}"},
    ]
    write(
        source,
        tokenizer_config={"chat_template": named, "bos_token": {"__type": "AddedToken", "content": "<s>"}},
    )


def file_before_config(source: Path) -> None:
    write(source, tokenizer_config={"chat_template": "of the config", "bos_token": "<s>"})
    (source / "chat_template.jinja").write_text(TEMPLATE + "\n")


def several_files(source: Path) -> None:
    write(source, tokenizer_config={"chat_template": "of the config"})
    (source / "chat_template.jinja").write_text(TEMPLATE)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }} é")


def tokens_of_before(source: Path) -> None:
    write(
        source,
        tokenizer_config={"chat_template": TEMPLATE},
        special_tokens_map={"bos_token": {"content": "<s>"}},
    )


@pytest.mark.parametrize("tools", [None, TOOL], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "layout", [config_with_text, config_with_list, file_before_config, several_files, tokens_of_before]
)
async def test_chats_are_written_as_transformers_reads_the_same_directory(
    source: Path, tmp_path: Path, layout: Callable[[Path], None], tools: Any
) -> None:
    layout(source)
    settings = await imported(source, tmp_path / "root")
    right = theirs(source, tools=tools, add_generation_prompt=True)
    assert rendered(settings, tools=tools) == right
    assert "hello" in right or tools


async def test_a_checkpoint_without_a_template_has_none(source: Path, tmp_path: Path) -> None:
    settings = await imported(source, tmp_path / "root")
    assert settings.chat_template is None
    assert settings.generation_config["eos_token_id"] == [2, 5]


async def test_a_store_without_the_model_says_nothing(tmp_path: Path) -> None:
    async with NvmeStore(tmp_path) as store:
        assert isinstance(store, SupportsTextSettings)
        assert await store.text_settings(M) is None


async def test_copies_on_other_tiers_say_the_same(source: Path, tmp_path: Path) -> None:
    several_files(source)
    manifest = convert(source, tmp_path / "near", model_id=M)
    far, copy = tmp_path / "far", tmp_path / "copy"
    far.mkdir()
    async with RemoteStore(far.as_uri()) as remote:
        await remote.push(tmp_path / "near" / M)
        settings = await remote.text_settings(M)
        assert settings is not None
        assert rendered(settings) == "<user>hello"
    stores: list[WeightStore] = [NvmeStore(copy), RemoteStore(far.as_uri())]
    async with TieredStore(*stores) as tiered:
        assert rendered(await tiered.text_settings(M) or TextSettings()) == "<user>hello"
        await tiered.prefetch(manifest.model)
    async with NvmeStore(copy) as disk:  # the write-through copy
        settings = await disk.text_settings(M)
        assert settings is not None
        assert rendered(settings, tools=TOOL) == "tools: 1 é"
        assert settings.generation_config["eos_token_id"] == [2, 5]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[1]"),
        ("generation_config.json", b"\xff"),
        ("special_tokens_map.json", b"null"),
        ("chat_template.jinja", b"\xff{{ messages }}"),
        ("additional_chat_templates/rag.jinja", b"\xff"),
    ],
)
async def test_a_file_that_is_none_is_named_at_import(
    source: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(content)
    with pytest.raises(ShardCorrupt, match=Path(name).name):
        await imported(source, tmp_path / "root")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json"])
async def test_a_file_that_is_too_long_is_named_at_import(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(text_files._MOST_BYTES, name, 4096)
    (source / name).write_text(json.dumps({"chat_template": "x" * 4096}))
    with pytest.raises(ShardCorrupt, match=rf"{name}.*longer"):
        await imported(source, tmp_path / "root")


async def test_nothing_of_a_template_runs_at_import(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "chat_template.jinja").write_text("{% for %}")
    convert(source, tmp_path / "root", model_id=M)
    assert not caplog.records
    settings = await imported(source, tmp_path / "root")
    assert "Chats are refused" in caplog.text
    assert settings.chat_template is not None


def test_all_end_tokens_of_a_checkpoint_count(source: Path, tmp_path: Path) -> None:
    def ends(model: str, config: object, generation: object) -> tuple[int, ...]:
        whole = json.loads((source / "config.json").read_text())
        write(
            source, config={**whole, "eos_token_id": config}, generation_config={"eos_token_id": generation}
        )
        return convert(source, tmp_path / "root", model_id=model).eos_token_ids

    assert ends("list", 2, [2, 5, 7]) == (2, 5, 7)
    assert ends("one", [2, 5], 5) == (5, 2)
    assert ends("none", None, [3]) == (3,)
    assert ends("config", [4, 6], None) == (4, 6)


# ---------------------------------------------------------------------------------------------- adapters


def adapter(directory: Path, tokens: tuple[str, ...] = (), *, base: Path) -> Adapter:
    """An adapter whose tokenizer is that of its model, and more tokens."""
    directory.mkdir()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    return Adapter("x", M, directory)


async def settings_of(adapter: Adapter, root: Path) -> TextSettings:
    async with NvmeStore(root) as store:
        return await store.adapter_settings(adapter)


async def test_an_adapter_with_the_tokenizer_of_its_model_has_none_of_its_own(
    source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "root", model_id=M)
    same = adapter(tmp_path / "same", base=source)
    text = json.loads((tmp_path / "same" / "tokenizer.json").read_text())
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(text, indent=4))  # other bytes
    (tmp_path / "same" / "added_tokens.json").write_text('{"world": 2}')
    assert await settings_of(same, tmp_path / "root") == TextSettings()
    assert await settings_of(Adapter("none", M), tmp_path / "root") == TextSettings()


async def test_what_trainers_set_of_truncation_is_no_other_tokenizer(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "root", model_id=M)
    trained = adapter(tmp_path / "trained", base=source)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "trained" / "tokenizer.json"))
    monkeypatch.setattr(HfTokenizer, "parse", None)  # it need not be parsed to be known
    assert await settings_of(trained, tmp_path / "root") == TextSettings()


async def test_a_tokenizer_is_compared_whole_whatever_comes_first(source: Path, tmp_path: Path) -> None:
    def write_model_first(directory: Path, words: dict[str, int]) -> None:
        text = json.loads((source / "tokenizer.json").read_text())
        text["model"]["vocab"] = words
        added = text.pop("added_tokens")
        (directory / "tokenizer.json").write_text(json.dumps({**text, "added_tokens": added}))

    other = adapter(tmp_path / "other", base=source)
    write_model_first(tmp_path / "other", {"<unk>": 0, "hello": 2, "world": 1})
    write_model_first(source, {"<unk>": 0, "hello": 1, "world": 2})
    convert(source, tmp_path / "root", model_id=M)
    settings = await settings_of(other, tmp_path / "root")
    assert settings.tokenizer is not None
    assert list(settings.tokenizer.encode("hello")) == [2]


async def test_an_adapter_with_another_tokenizer_has_it(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "root", model_id=M)
    own = adapter(tmp_path / "own", ("<|user|>",), base=source)
    (tmp_path / "own" / "chat_template.jinja").write_text("<|user|>{{ messages[0].content }}")
    settings = await settings_of(own, tmp_path / "root")
    assert settings.tokenizer is not None
    assert list(settings.tokenizer.encode("<|user|> hello")) == [3, 1]
    assert rendered(settings) == "<|user|>hello"


async def test_tokens_without_an_embedding_refuse_an_adapter(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "root", model_id=M)
    large = adapter(tmp_path / "large", tuple(f"<|{n}|>" for n in range(62)), base=source)
    with pytest.raises(UnsupportedAdapter, match=r"'<\|61\|>' \(64\)"):
        await settings_of(large, tmp_path / "root")
    (tmp_path / "legacy").mkdir()
    (tmp_path / "legacy" / "added_tokens.json").write_text('{"<|user|>": 3}')
    with pytest.raises(UnsupportedAdapter, match=r"<\|user\|>.*tokenizer\.json"):
        await settings_of(Adapter("legacy", M, tmp_path / "legacy"), tmp_path / "root")


async def test_a_damaged_tokenizer_of_an_adapter_is_named(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "root", model_id=M)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    with pytest.raises(StoreError, match=r"own/tokenizer\.json"):
        await settings_of(Adapter("x", M, tmp_path / "own"), tmp_path / "root")


async def test_an_adapter_is_compared_with_the_model_of_any_tier(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "root", model_id=M)
    own = adapter(tmp_path / "own", ("<|user|>",), base=source)
    async with TieredStore(NvmeStore(tmp_path / "empty"), NvmeStore(tmp_path / "root", name="far")) as store:
        assert (await store.adapter_settings(own)).tokenizer is not None
