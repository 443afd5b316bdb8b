"""The files of a checkpoint that say how its text is written: kept at import, parsed when they are asked for.

Nothing of them is run at import. Each is bounded in size, and those of JSON are objects.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from hotswap.backends.fields import Fields, parse_object
from hotswap.backends.stores.layout import CHECKPOINT_FILES, MORE_TEMPLATES, SIDE_FILES
from hotswap.errors import BackendMissing, ShardCorrupt, UnsupportedAdapter
from hotswap.model import Adapter, Manifest
from hotswap.text import ChatTemplate, TextSettings, Tokenizer

__all__ = [
    "parse_text_settings",
    "read_adapter_settings",
    "read_checkpoint_files",
    "read_more_templates",
    "read_text_files",
]

_log = logging.getLogger("hotswap.stores")

_MOST_BYTES: Final = {
    "tokenizer.json": 256 << 20,
    "tokenizer_config.json": 16 << 20,
    "special_tokens_map.json": 1 << 20,
    "generation_config.json": 1 << 20,
    "chat_template.jinja": 1 << 20,
    MORE_TEMPLATES: 8 << 20,
    **dict.fromkeys(CHECKPOINT_FILES, 16 << 20),
    "hf_quant_config.json": 1 << 20,
    "quantize_config.json": 1 << 20,
}
_MOST_TEMPLATES = 64
_TEMPLATES_DIRECTORY = "additional_chat_templates"  # of checkpoints; stores have one file, `MORE_TEMPLATES`
_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_MOST_HEAD_BYTES = 4096
_NOT_ENCODING: Final = frozenset(
    (
        *(b"version", b"truncation", b"direction", b"max_length", b"strategy", b"stride"),
        *(b"padding", b"pad_to_multiple_of", b"pad_id", b"pad_type_id", b"pad_token", b"Fixed"),
    )
)
_FETCH_AGAIN = "Fetch the checkpoint again."
_SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt")


def read_text_files(source: Path) -> dict[str, bytes]:
    """Return the text files that a checkpoint has, by the names that stores keep them under. Blocking.

    The templates of its `additional_chat_templates` become one file of JSON.

    Raises:
        ShardCorrupt: a file is longer than any of its kind, no JSON object, or no UTF-8.
    """
    files = {
        name: text for name in SIDE_FILES if (text := _read(source / name, _MOST_BYTES[name])) is not None
    }
    if (more := read_more_templates(source)) is not None:
        files[MORE_TEMPLATES] = more
    for name, text in files.items():
        if name.endswith(".jinja"):
            _text(source / name, text)
        elif name != "tokenizer.json":  # which its own parser checks, and which is long
            parse_object(text, source / name, remedy=_FETCH_AGAIN)
    return files


def read_checkpoint_files(source: Path) -> dict[str, bytes]:
    """Return the small files beside those of text that an engine may ask a checkpoint for. Blocking.

    Raises:
        ShardCorrupt: a file is longer than any of its kind.
    """
    found = {name: _read(source / name, _MOST_BYTES[name]) for name in CHECKPOINT_FILES}
    return {name: content for name, content in found.items() if content is not None}


def read_more_templates(source: Path) -> bytes | None:
    """Return the templates in `additional_chat_templates` as one file of JSON, by name; `None` without any.

    Raises:
        ShardCorrupt: one is too long, or no UTF-8.
    """
    directory, most_bytes = source / _TEMPLATES_DIRECTORY, _MOST_BYTES["chat_template.jinja"]
    paths = sorted(directory.glob("*.jinja"))[:_MOST_TEMPLATES]
    templates = {path.stem: _text(path, _read(path, most_bytes) or b"") for path in paths}
    return json.dumps(templates, ensure_ascii=False).encode() if templates else None


def parse_text_settings(files: Mapping[str, bytes], where: Path | str) -> TextSettings:
    """Return what text files say; `where` is what errors call their directory. Blocking.

    Raises:
        ShardCorrupt: a file cannot be used.
    """
    generation = _object(files, "generation_config.json", where)
    return TextSettings(
        chat_template=_chat_template(files, where),
        generation_config={} if generation is None else generation.raw,
    )


def read_adapter_settings(adapter: Adapter, manifest: Manifest, base: Mapping[str, bytes]) -> TextSettings:
    """Return what the directory of an adapter says of text that the files of its model do not. Blocking.

    Raises:
        UnsupportedAdapter: it has a tokenizer or added tokens that cannot be used with the model.
        ShardCorrupt: a file cannot be used.
    """
    if adapter.source is None or not (source := Path(adapter.source)).is_dir():
        return TextSettings()
    files = read_text_files(source)
    tokenizer = _own_tokenizer(adapter, manifest, files, base)
    if tokenizer is None and "tokenizer.json" not in files:
        _check_added_tokens(adapter, source, base)
        if any((source / name).exists() for name in _SLOW_TOKENIZERS):
            _log.warning(
                "Adapter %r has a tokenizer without tokenizer.json, which is not read; its texts are encoded "
                "by the tokenizer of model %r.",
                adapter.id,
                adapter.model,
            )
    own = _chat_template(files, source) if _has_template(files, source) else None
    return TextSettings(tokenizer=tokenizer, chat_template=own)


# ------------------------------------------------------------------------------------------------- files


def _read(path: Path, most_bytes: int) -> bytes | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        text = file.read(most_bytes + 1)
    if len(text) > most_bytes:
        raise ShardCorrupt(
            f"{str(path)!r} is longer than {most_bytes:,} bytes, which no such file is. {_FETCH_AGAIN}"
        )
    return text


def _text(path: Path | str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as exc:
        raise ShardCorrupt(f"{str(path)!r} is no UTF-8 at byte {exc.start}. {_FETCH_AGAIN}") from exc


def _object(files: Mapping[str, bytes], name: str, where: Path | str) -> Fields | None:
    text = files.get(name)
    return None if text is None else parse_object(text, f"{where}/{name}")


# ------------------------------------------------------------------------------------------------- templates


def _has_template(files: Mapping[str, bytes], where: Path | str) -> bool:
    config = _object(files, "tokenizer_config.json", where)
    in_config = config is not None and config.get("chat_template") is not None
    return in_config or "chat_template.jinja" in files or MORE_TEMPLATES in files


def _chat_template(files: Mapping[str, bytes], where: Path | str) -> ChatTemplate | None:
    if not (templates := _templates(files, where)):
        return None
    try:
        from hotswap.backends.chat_template import JinjaChatTemplate
    except BackendMissing as exc:  # texts and token ids work without it
        _log.warning("%s is served without chats: %s", where, exc)
        return None
    template = JinjaChatTemplate(templates, _special_tokens(files, where))
    if template.error:
        _log.warning("Chats are refused with %s: %s", where, template.error)
    return template


def _templates(files: Mapping[str, bytes], where: Path | str) -> dict[str, str]:
    """The templates by name: those of files, or else those of the tokenizer's config."""
    found: dict[str, object] = {}
    if (more := _object(files, MORE_TEMPLATES, where)) is not None:
        found |= more.raw
    if (default := files.get("chat_template.jinja")) is not None:
        found["default"] = _text(f"{where}/chat_template.jinja", default)
    config = _object(files, "tokenizer_config.json", where)
    if not found and config is not None:
        found = _named(config.get("chat_template"))
    templates = {name: text for name, text in found.items() if isinstance(text, str)}
    if found.keys() - templates.keys():
        _log.warning("A chat template of %s is no text, and is left out.", where)
    return templates


def _named(value: object) -> dict[str, object]:
    """Chat templates as a config writes them: one text, or a list of objects with `name` and `template`."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value)
    if isinstance(value, list):
        entries = (
            cast("dict[str, object]", entry)
            for entry in cast("list[object]", value)
            if isinstance(entry, dict)
        )
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return {} if value is None else {"default": value}


def _special_tokens(files: Mapping[str, bytes], where: Path | str) -> dict[str, str]:
    """The texts of special tokens by name, as transformers finds them."""
    config = _object(files, "tokenizer_config.json", where)
    values: dict[str, Any] = {} if config is None else dict(config.raw)
    legacy = _object(files, "special_tokens_map.json", where)
    if legacy is not None and "added_tokens_decoder" not in values:
        values |= legacy.raw
    tokens: dict[str, str] = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_TOKENS):
        value: object = values.get(name)
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


# ------------------------------------------------------------------------------------------------- adapters


def _own_tokenizer(
    adapter: Adapter, manifest: Manifest, files: Mapping[str, bytes], base: Mapping[str, bytes]
) -> Tokenizer | None:
    """The tokenizer of an adapter; `None` if it has none, or the one of its model."""
    text, of_model = files.get("tokenizer.json"), base.get("tokenizer.json")
    if text is None or (of_model is not None and _encoding(text) == _encoding(of_model)):
        return None
    from hotswap.backends.tokenizer import HfTokenizer

    tokenizer = HfTokenizer.parse(text, name=f"{adapter.source}/tokenizer.json")
    if of_model is not None and HfTokenizer.parse(of_model).text == tokenizer.text:
        return None
    _check_ids(adapter, manifest, tokenizer.added_tokens)
    return tokenizer


def _encoding(text: bytes) -> bytes:
    """The text of a tokenizer without what trainers set, truncation and padding, where these come first.

    Most adapters have the tokenizer of their model, and to parse one takes the time of many steps.
    """
    at = text.find(b'"added_tokens"', 0, _MOST_HEAD_BYTES)
    first = set(re.findall(rb'"(\w+)":', text[: max(at, 0)]))
    return text[at:] if at >= 0 and first <= _NOT_ENCODING else text


def _check_added_tokens(adapter: Adapter, source: Path, base: Mapping[str, bytes]) -> None:
    """Refuse added tokens, in the form of former tokenizers, that the tokenizer of the model has not."""
    name = "added_tokens.json"
    text = _read(source / name, _MOST_BYTES["special_tokens_map.json"])
    if text is None:
        return
    added = parse_object(text, source / name, remedy=_FETCH_AGAIN).raw
    known: dict[str, int] = {}
    if added and (of_model := base.get("tokenizer.json")) is not None:
        from hotswap.backends.tokenizer import HfTokenizer

        tokenizer = HfTokenizer.parse(of_model)
        known = {token: id for token in added if (id := tokenizer.id_of(token)) is not None}
    if new := [token for token, id in added.items() if known.get(token) != id]:
        raise UnsupportedAdapter(
            f"Adapter {adapter.id!r} adds the token {new[0][:80]!r} to those of model {adapter.model!r}, and "
            "has no tokenizer.json that says how; save its tokenizer as a fast one beside it."
        )


def _check_ids(adapter: Adapter, manifest: Manifest, tokens: Mapping[int, str]) -> None:
    """Refuse tokens that the model has no embedding of."""
    size = manifest.vocabulary
    beyond = [f"{token!r} ({id})" for id, token in sorted(tokens.items()) if size is not None and id >= size]
    if beyond:
        raise UnsupportedAdapter(
            f"Adapter {adapter.id!r} adds tokens to the {size:,} of model {adapter.model!r}: "
            f"{', '.join(beyond[:3])}. Embeddings of added tokens are not served; merge the adapter into "
            "its model."
        )
