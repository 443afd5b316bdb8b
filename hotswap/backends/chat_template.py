"""Chat templates of Hugging Face checkpoints, rendered as transformers renders them.

The text is that of `apply_chat_template(..., tokenize=False)` of transformers 5.24, with one exception: parts
of a message are joined, by line breaks, for templates that do not read parts. Transformers gives these the
list, which they write as Python shows it, leave out or refuse.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
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
_MOST_PASSES = 16  # over assignments: a value may come by others that stand behind its own
_ENTRY_FILTERS = ("first", "last", "random")
_LOOP_FILTERS = ("groupby", "map", "rejectattr", "selectattr")


class JinjaChatTemplate:
    """The chat template of a checkpoint, or the several that it chooses from. Threads may share it.

    A text that is no template refuses every chat, and says why.

    Args:
        templates: The texts by name; `"tool_use"` is for chats with tools, `"default"` for all others.
        special_tokens: The texts of special tokens, by the names that templates use: `bos_token`.
        most_cpu_s: Seconds of processor time that one chat may take.

    Attributes:
        source: The texts of all templates.
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
        self.source = "\n".join(templates.values())
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


# ----------------------------------------------------------------------------- whether a template reads parts


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template reads the parts of a content: by a loop, by a filter, or by the fields of one."""
    names = _Names(tree)
    return (
        any(names.has_content(loop.iter) for loop in tree.find_all(nodes.For))
        or any(names.goes_through(made) for made in tree.find_all(nodes.Filter))
        or any(names.reads_part(read) for read in tree.find_all((nodes.Getattr, nodes.Getitem)))
    )


class _Names:
    """The variables of a template that may have a content, an entry of one, or the contents of messages."""

    def __init__(self, tree: nodes.Template) -> None:
        self._contents, self._entries, self._lists = {"content"}, set[str](), set[str]()
        self._loops = [(_variable(loop.target), loop.iter) for loop in tree.find_all(nodes.For)]
        assigned = list(_assigned(tree))
        size = 0
        for _ in range(_MOST_PASSES):
            size, before = self._assign(assigned), size
            if size == before:
                break

    def has_content(self, node: nodes.Node | None) -> bool:
        """Whether a value is a content, or made of one."""
        if isinstance(node, nodes.Filter):
            is_entry = node.name in _ENTRY_FILTERS
            return self._has_contents(node.node) if is_entry else self.has_content(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.has_content(node.expr1) or self.has_content(node.expr2)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self.has_content(node.node)
        if isinstance(node, nodes.Getitem) and _field(node) is None and self._has_contents(node.node):
            return True
        return _variable(node) in self._contents or _field(node) == "content"

    def goes_through(self, node: nodes.Filter) -> bool:
        """Whether a filter goes through the entries of a content."""
        reads_fields = node.name in _LOOP_FILTERS or any(arg.key == "attribute" for arg in node.kwargs)
        return reads_fields and self.has_content(node.node)

    def reads_part(self, node: nodes.Node) -> bool:
        """Whether a value is a field of an entry of a content, where the entry is no character."""
        if not isinstance(node, nodes.Getattr | nodes.Getitem) or (field := _field(node)) is None:
            return False
        is_method = isinstance(node, nodes.Getattr) and hasattr(str, field)
        return not is_method and self._has_entry(node.node)

    def _assign(self, assigned: Iterable[tuple[str, nodes.Node]]) -> int:
        """Add the variables that get a content or an entry; return how many there are."""
        for name, value in assigned:
            if self.has_content(value):
                self._contents.add(name)
            elif self._has_entry(value):
                self._entries.add(name)
            elif self._has_contents(value):
                self._lists.add(name)
        self._contents.update(name for name, of in self._loops if name is not None and self._has_contents(of))
        return len(self._contents) + len(self._entries) + len(self._lists)

    def _has_contents(self, node: nodes.Node | None) -> bool:
        """Whether a value is a list of contents, as `messages | map(attribute='content')`."""
        if isinstance(node, nodes.Filter):
            fields = (arg.value for arg in node.kwargs if arg.key == "attribute" and node.name == "map")
            if any(isinstance(field, nodes.Const) and field.value == "content" for field in fields):
                return True
            return node.name not in _ENTRY_FILTERS and self._has_contents(node.node)
        return _variable(node) in self._lists

    def _has_entry(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Filter):
            return node.name in _ENTRY_FILTERS and self.has_content(node.node)
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return _field(node) is None and self.has_content(node.node)
        return _variable(node) in self._entries


def _assigned(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Give the variables that are set, and the parameters of macros, each with a value that it gets."""
    for one in tree.find_all(nodes.Assign):
        if (name := _variable(one.target)) is not None:
            yield name, one.node
    for block in tree.find_all(nodes.With):
        for target, value in zip(block.targets, block.values, strict=True):
            if isinstance(target, nodes.Name):
                yield target.name, value
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            for parameter, value in zip(macros[call.node.name].args, call.args, strict=False):
                yield parameter.name, value
            for keyword in call.kwargs:
                yield keyword.key, keyword.value


def _variable(node: nodes.Node | None) -> str | None:
    """Return the name of a variable, that of an attribute of a namespace included: `ns.content`."""
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return node.name if isinstance(node, nodes.Name) else None


def _field(node: nodes.Node | None) -> str | None:
    """Return the field that a value is read from: `x.field`, `x["field"]`, `x.get("field")`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Call):
        gets = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        key = node.args[0] if gets and node.args else None
    else:
        key = node.arg if isinstance(node, nodes.Getitem) else None
    return key.value if isinstance(key, nodes.Const) and isinstance(key.value, str) else None
