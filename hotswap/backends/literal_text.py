"""Text of clients that reads like control tokens, kept text on its way through a chat template.

A template writes control tokens and the words of clients into one text, whose tokenizer cannot tell them
apart. So what a client has written like a control token is given to the template by another name, and the
text is encoded by a tokenizer in which the control tokens have other names as well: names that no client can
guess.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from tokenizers import Tokenizer

from hotswap.chat import Chat
from hotswap.errors import InvalidRequest
from hotswap.text import ChatTemplate

__all__ = ["GuardedText", "GuardingTemplate", "LiteralText", "control_tokens", "renamed"]

# Private characters, which no template changes, and no tokenizer splits a text at.
_PRIVATE = [chr(code) for code in range(0xE000, 0xF8FF)]
# What marks a part of an answer, and templates look for in earlier ones: `<think>`, `</tool_call>`.
_PART_OF_ANSWER = re.compile(r"</?\w+>")
# Templates compare these, so that text beside which they are written is not looked at.
_COMPARED = ("role", "type")


def control_tokens(tokenizer: Tokenizer, template: str) -> dict[str, bool]:
    """Return the tokens by which a model is told of turns, each with whether it is a special one.

    These are the special tokens, and others beside the vocabulary proper that the template writes; those that
    are blanks are text.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    return {
        token.content: token.special
        for token in added
        if token.content.strip(" \t\r\n▁") and (token.special or token.content in template)
    }


class GuardedText(str):
    """The text of a chat.

    Attributes:
        encodable: The same with other names for the control tokens that its template has written.
        literals: What has given the names.
    """

    encodable: str
    literals: LiteralText

    def __new__(cls, text: str, encodable: str, literals: LiteralText) -> GuardedText:
        made = super().__new__(cls, text)
        made.encodable, made.literals = encodable, literals
        return made


class GuardingTemplate:
    """A template whose texts are `GuardedText` where something of a chat reads like a control token."""

    def __init__(self, template: ChatTemplate, literals: LiteralText) -> None:
        self._template, self._literals = template, literals

    def render(self, chat: Chat) -> str:
        guarded = self._literals.guarded(chat)
        text = self._template.render(guarded)
        return text if guarded is chat else self._literals.written(text)


class LiteralText:
    """Writes what reads like a control token in chats by other names, and turns these back in their text.

    Args:
        tokens: The control tokens, and whether each is a special one.
    """

    def __init__(self, tokens: Mapping[str, bool]) -> None:
        secret = "".join(secrets.choice(_PRIVATE) for _ in range(12))
        self._names = sorted(tokens)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        in_answers = {
            name: is_special for name, is_special in tokens.items() if not _is_part(name, is_special)
        }
        self._everywhere, self._in_answers = _Finder(tokens), _Finder(in_answers)
        self._literal, self._control, self._break = (f"{secret}{_PRIVATE[at]}" for at in range(3))
        stand_in = f"{re.escape(self._literal)}(\\d+){re.escape(self._literal)}"
        self._written = re.compile(
            f"{stand_in}|{re.escape(self._break)}|({_alternatives(self._names)})", re.DOTALL
        )

    @property
    def control_names(self) -> dict[str, str]:
        """The control tokens with the names that they have in `GuardedText.encodable`."""
        return {name: self._control_name(name) for name in self._names}

    def guarded(self, chat: Chat) -> Chat:
        """Return a chat whose text makes no control token; the chat itself if it has none that does."""
        if not self._names or not any(self._is_risky(*found) for found in _texts_of(chat)):
            return chat
        messages = tuple(self._message(message) for message in chat.messages)
        return replace(
            chat,
            messages=messages,
            tools=None if chat.tools is None else self._value(chat.tools, self._everywhere),
            documents=None if chat.documents is None else self._value(chat.documents, self._everywhere),
            chat_template_kwargs=self._value(chat.chat_template_kwargs, self._everywhere),
        )

    def written(self, text: str) -> GuardedText:
        """Return the text that a template has made of a guarded chat."""
        plain = self._written.sub(self._plain, text)
        return GuardedText(plain, self._written.sub(self._encodable, text), self)

    def _plain(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return found[2] or ""
        number = int(found[1])
        return self._names[number] if number < len(self._names) else ""

    def _encodable(self, found: re.Match[str]) -> str:
        return self._plain(found) if found[2] is None else self._control_name(found[2])

    def _control_name(self, name: str) -> str:
        return f"{self._control}{self._numbers[name]}{self._control}"

    def _is_risky(self, text: str, key: str, is_answer: bool) -> bool:
        finder = self._in_answers if is_answer else self._everywhere
        return finder.finds(text) or (key not in _COMPARED and finder.is_part(text))

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        finder = self._in_answers if message.get("role") == "assistant" else self._everywhere
        guarded: dict[str, Any] = self._value(message, finder)
        return guarded

    def _value(self, value: Any, finder: _Finder, key: str = "") -> Any:
        if isinstance(value, str):
            return self._text(value, finder, key)
        if isinstance(value, Mapping):
            entries = cast("Mapping[str, Any]", value).items()
            return {self._value(name, finder, "type"): self._value(of, finder, name) for name, of in entries}
        if isinstance(value, list | tuple):
            return [self._value(entry, finder, key) for entry in cast("Iterable[Any]", value)]
        return value

    def _text(self, text: str, finder: _Finder, key: str) -> str:
        guarded = finder.pattern.sub(self._stand_in, text) if finder.finds(text) else text
        if key in _COMPARED:
            return guarded
        within = guarded.strip()  # templates trim
        start = guarded.index(within)
        before = self._break if finder.starts_within(within) else ""
        after = self._break if finder.ends_within(within) else ""
        return guarded[:start] + before + within + after + guarded[start + len(within) :]

    def _stand_in(self, found: re.Match[str]) -> str:
        return f"{self._literal}{self._numbers[found[0]]}{self._literal}"


def _is_part(name: str, is_special: bool) -> bool:
    return not is_special and _PART_OF_ANSWER.fullmatch(name) is not None


class _Finder:
    """Finds names in texts, and parts of names at their ends, which others could make whole."""

    def __init__(self, names: Iterable[str]) -> None:
        given = list(names)
        self.pattern = re.compile(_alternatives(given), re.DOTALL)
        self._starts = sorted({name[:2] for name in given})
        self._longest = max(map(len, given), default=0)
        self._heads = {name[:length] for name in given for length in range(1, len(name))}
        self._tails = {name[at:] for name in given for at in range(1, len(name))}

    def finds(self, text: str) -> bool:
        """Whether a text has a name."""
        return any(start in text for start in self._starts) and self.pattern.search(text) is not None

    def is_part(self, text: str) -> bool:
        """Whether a text may be one part of a name whose rest stands beside it."""
        within = text.strip()
        return self.ends_within(within) or self.starts_within(within)

    def ends_within(self, text: str) -> bool:
        """Whether a text ends with the beginning of a name."""
        lengths = range(1, min(self._longest, len(text) + 1))
        return any(text[-length:] in self._heads for length in lengths)

    def starts_within(self, text: str) -> bool:
        """Whether a text starts with the end of a name."""
        lengths = range(1, min(self._longest, len(text) + 1))
        return any(text[:length] in self._tails for length in lengths)


def _texts_of(chat: Chat) -> Iterator[tuple[str, str, bool]]:
    """Give every text of a chat with its key, and whether it is of an answer."""
    found: list[tuple[Any, str, bool]] = [
        (message, "", message.get("role") == "assistant") for message in chat.messages
    ]
    found += [(value, "", False) for value in (chat.tools, chat.documents, chat.chat_template_kwargs)]
    while found:
        value, key, is_answer = found.pop()
        if isinstance(value, str):
            yield value, key, is_answer
        elif isinstance(value, Mapping):
            for name, entry in cast("Mapping[str, Any]", value).items():
                yield name, "type", is_answer
                found.append((entry, name, is_answer))
        elif isinstance(value, list | tuple):
            found += [(entry, key, is_answer) for entry in cast("Iterable[Any]", value)]


def _alternatives(names: Iterable[str]) -> str:
    """Return a regular expression for the longest of some names, which looks at each character once."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree) if tree else r"(?!)"


def _branches(node: Mapping[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:  # a part without a branch
        ((character, node),) = node.items()
        run += re.escape(character)
    branches = [re.escape(character) + _branches(below) for character, below in node.items() if character]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """Return a tokenizer with other names of some tokens, whose ids are the same.

    Raises:
        InvalidRequest: it cannot be made.
    """
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        if (name := names.get(token["content"])) is not None:
            token.update(content=name, normalized=False, single_word=False)
    model: dict[str, Any] = described["model"]
    vocabulary: object = model.get("vocab")
    if isinstance(vocabulary, dict):
        pieces = cast("dict[str, int]", vocabulary)
        model["vocab"] = {names.get(piece, piece): id for piece, id in pieces.items()}
    elif isinstance(vocabulary, list):
        scored = cast("list[tuple[str, float]]", vocabulary)
        model["vocab"] = [(names.get(piece, piece), score) for piece, score in scored]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        made = Tokenizer.from_str(json.dumps(described))
    except Exception as exc:  # the library raises nothing narrower
        raise _refusal() from exc
    if any(tokenizer.token_to_id(name) != made.token_to_id(other) for name, other in names.items()):
        raise _refusal()
    return made


def _refusal() -> InvalidRequest:
    return InvalidRequest(
        "messages have text that reads like a control token of the model, and its tokenizer cannot keep such "
        "text; write it otherwise."
    )
