"""Chat templates of Hugging Face checkpoints, rendered as transformers renders them.

The text is that of `apply_chat_template(..., tokenize=False)` of transformers 5, with one exception: parts of
a message are joined, by line breaks, for templates that would take a list of them for a string.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

try:
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
except ImportError as exc:
    from hotswap.errors import BackendMissing

    raise BackendMissing("Chats need the jinja2 library: pip install 'hotswap[torch]'.") from exc

from hotswap.backends.sandbox import Budget, Sandbox
from hotswap.chat import Chat
from hotswap.errors import InvalidRequest

__all__ = ["JinjaChatTemplate"]

_MOST_CPU_S = 2.0
_LEAST_CHARACTERS, _CHARACTERS_EACH = 16 << 20, 16
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SHOWN_CHARACTERS = 500


class JinjaChatTemplate:
    """The chat template of a checkpoint, or the several that it chooses from. Threads may share it.

    A text that is no template refuses every chat, and says why.

    Args:
        templates: The texts by name; `"tool_use"` is for chats with tools, `"default"` for all others.
        special_tokens: The texts of special tokens, by the names that templates use: `bos_token`.
        most_cpu_s: Seconds of processor time that one chat may take.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        most_cpu_s: float = _MOST_CPU_S,
    ) -> None:
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox()
        self._most_cpu_s = most_cpu_s
        self._templates = {name: _Template(self._sandbox, name, text) for name, text in templates.items()}

    @property
    def error(self) -> str:
        """Why templates cannot be used; empty if all can."""
        return " ".join(template.error for template in self._templates.values() if template.error)

    def render(self, chat: Chat) -> str:
        template = self._chosen(chat)
        budget = Budget(self._most_cpu_s, _LEAST_CHARACTERS + _CHARACTERS_EACH * chat.num_characters)
        with _refusals(), self._sandbox.spending(budget):
            if chat.continue_final_message:
                return self._continued(template, chat)
            return self._render(template, chat, _with_reasoning(chat.messages))

    def _chosen(self, chat: Chat) -> _Template:
        if chat.tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise InvalidRequest(
            f"The model has chat templates for other uses alone ({', '.join(sorted(self._templates))}); give "
            "the prompt as text."
        )

    def _render(self, template: _Template, chat: Chat, messages: list[dict[str, Any]]) -> str:
        if not template.reads_parts:
            messages = [_with_one_text(message) for message in messages]
        return template.render(
            {
                **self._special_tokens,
                **chat.chat_template_kwargs,
                "messages": messages,
                "tools": None if chat.tools is None else list(chat.tools),
                "documents": None if chat.documents is None else list(chat.documents),
                "add_generation_prompt": chat.add_generation_prompt,
            }
        )

    def _continued(self, template: _Template, chat: Chat) -> str:
        """Render with a mark at the end of the last message, and cut the text there."""
        *before, last = _with_reasoning(chat.messages)
        content: Any = last.get("content")
        marked: Any
        if isinstance(content, list) and content:
            final = cast("str", content[-1]["text"])
            marked = [*content[:-1], {**content[-1], "text": final + _CONTINUE_TAG}]
        elif isinstance(content, str):
            final, marked = content, content + _CONTINUE_TAG
        else:
            raise InvalidRequest("The last message has no content to continue; give it one.")
        text = self._render(template, chat, [*before, {**last, "content": marked}])
        end = text.rfind(_CONTINUE_TAG.strip())
        if end < 0 or final.strip() not in text:
            raise InvalidRequest(
                "The chat template of the model changes the last message, so that it cannot be continued; "
                "give add_generation_prompt instead."
            )
        # Where the template has trimmed the message, the space of the mark is gone; so goes that before it.
        return text[:end] if text.startswith(_CONTINUE_TAG, end) else text[:end].rstrip()


class _Template:
    """One template, compiled; or why it cannot be."""

    def __init__(self, sandbox: Sandbox, name: str, text: str) -> None:
        self.reads_parts, self.error = True, ""
        try:
            tree = sandbox.parse(text)
            self.reads_parts = _reads_parts(tree)
            self._template = sandbox.from_string(sandbox.meter(tree))
        except Exception as exc:  # a syntax error, or whatever a text that is no template leads to
            self.error = f"The chat template {name!r} of the model is no template: {_brief(exc)}"

    def render(self, variables: Mapping[str, Any]) -> str:
        if self.error:
            raise InvalidRequest(f"{self.error} Give the prompt as text.")
        return self._template.render(variables)


@contextmanager
def _refusals() -> Generator[None]:
    """Turn what a template ends by into an `InvalidRequest`."""
    try:
        yield
    except InvalidRequest:
        raise
    except SecurityError as exc:
        raise InvalidRequest(f"The chat template of the model was stopped: {_brief(exc)}") from exc
    except TemplateError as exc:  # its own refusal, or an undefined value
        raise InvalidRequest(f"The chat template of the model refuses the messages: {_brief(exc)}") from exc
    except Exception as exc:  # a template is a program: it may divide by zero
        raise InvalidRequest(
            f"The chat template of the model fails for the messages: {type(exc).__name__}: {_brief(exc)}"
        ) from exc


def _brief(error: Exception) -> str:
    text = str(error)
    text = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _with_reasoning(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies, each with its reasoning by both of the names that templates read it by."""
    copies: list[dict[str, Any]] = []
    for message in messages:
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is None:
            copies.append(dict(message))
        else:
            copies.append({"thinking": reasoning, **message, "reasoning_content": reasoning})
    return copies


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    content: Any = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("Iterable[dict[str, str]]", content)
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a content: whether it loops over one."""
    names = {"content"}
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node, names):
            names.add(assigned.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Call):  # message.get("content")
        named = any(isinstance(arg, nodes.Const) and arg.value == "content" for arg in node.args)
        return named and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
