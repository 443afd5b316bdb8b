"""Chats are written as transformers writes them, and no template takes more than its budget."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hotswap.backends.chat_template import JinjaChatTemplate
from hotswap.chat import Chat
from hotswap.errors import InvalidRequest
from hotswap.text import ChatTemplate
from tests.backends.chat_templates import TEMPLATES
from tests.text_tokenizers import byte_level

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DATE = {"date_string": "26 Nov 2026"}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <today> & tomorrow, in 'São Paulo'",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name of the city — 東京, for instance"},
                    "days": {"type": ["integer", "string"]},
                    "hours": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " Be <brief>.\n"}
SINGLE = [user("Hello & welcome")]
TURNS = [
    SYSTEM,
    user(" naïve 😀 "),
    assistant("<think>\nhm\n</think>\n\nYes."),
    user("Why?\n\nSay it."),
    assistant("So."),
]
USES_TOOLS = [
    SYSTEM,
    user("Weather in 東京?"),
    {"role": "assistant", "content": None, "tool_calls": [call("abcdefgh1", "weather", city="東京", days=2)]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": '{"°C": 21.5}'},
    assistant("It is 21.5 °C.", reasoning_content="I looked."),
    user("And now?"),
]
NONE = [
    {**user("Weather?"), "name": None, "tool_calls": None},
    {"role": "assistant", "content": None, "name": None, "tool_calls": [call("abcdefgh1", "now", at=None)]},
    {"role": "tool", "name": None, "tool_call_id": "abcdefgh1", "content": "noon", "reasoning_content": None},
    assistant("Noon.", tool_calls=None, thinking=None),
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]},
]


@cache
def theirs(name: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level()._tokenizer, chat_template=TEMPLATES[name], **SPECIAL
    )


@cache
def ours(name: str) -> JinjaChatTemplate:
    return JinjaChatTemplate({"default": TEMPLATES[name]}, SPECIAL)


def both(name: str, messages: Any, **options: Any) -> tuple[str, str]:
    """The text of transformers and ours; that it was refused, of what was."""
    variables = {**DATE, **options.pop("chat_template_kwargs", {})}
    options = {"add_generation_prompt": True, **options}
    try:
        right = theirs(name).apply_chat_template(messages, tokenize=False, **options, **variables)
    except Exception:  # a template's own refusal, or a type that it did not expect
        right = "refused"
    try:
        text = ours(name).render(Chat(messages, chat_template_kwargs=variables, **options))
    except InvalidRequest:
        text = "refused"
    return right, text


# ---------------------------------------------------------------------------------------- as transformers


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["without tools", "no tools", "tools"])
@pytest.mark.parametrize(
    "messages", [SINGLE, TURNS, USES_TOOLS, NONE], ids=["one", "turns", "tool calls", "None"]
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(
    name: str, messages: Any, tools: Any, add_generation_prompt: bool
) -> None:
    right, text = both(name, messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert text == right


def test_every_template_takes_some_of_these_chats() -> None:
    taken = {
        name: [
            both(name, messages, tools=tools)[1]
            for messages in (SINGLE, TURNS, USES_TOOLS)
            for tools in (None, TOOLS)
        ]
        for name in TEMPLATES
    }
    assert [name for name, texts in taken.items() if set(texts) == {"refused"}] == []
    with_tools = [name for name, texts in taken.items() if any("weather" in text for text in texts[3:])]
    assert len(with_tools) >= 6


EACH = "{%% for m in messages %%}%s{%% endfor %%}"


def both_by(template: str, messages: Any) -> tuple[str, str]:
    """The text of transformers and ours by a template that is given here."""
    right = theirs("chatml").apply_chat_template(messages, chat_template=template, tokenize=False)
    chat = Chat(messages, add_generation_prompt=False)
    return right, JinjaChatTemplate({"default": template}, SPECIAL).render(chat)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (EACH % "{{ m.role[0] }}{{ m.name is defined }} ", "uFalse aFalse tFalse aFalse "),
        (EACH % "{{ m.role[0] }}{{ 'tool_calls' in m }} ", "uFalse aTrue tFalse aFalse "),
        (EACH % "{{ m.content }};", "Weather?;;noon;Noon.;"),
        (EACH % "{{ m.content is none }} ", "False False False False "),
        (EACH % "{{ m.tool_calls | default([]) | tojson }}", None),
        (EACH % "{{ m.keys() | list }}{{ m }}{{ m | tojson(indent=2) }}{{ m | pprint }}", None),
    ],
)
def test_fields_that_are_none_are_those_of_transformers(template: str, written: str | None) -> None:
    right, text = both_by(template, NONE)
    assert text == right
    assert written is None or text == written


def test_a_template_that_asks_for_contents_of_none_is_given_none_by_either() -> None:
    """Transformers leaves them out too: by DeepSeek-R1-Distill neither writes calls of tools."""
    called = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [user("When?"), {"role": "assistant", "content": None, "tool_calls": [called]}]
    assert both("deepseek-r1", messages) == ("refused", "refused")
    with pytest.raises(InvalidRequest, match="has no attribute 'content'"):
        ours("deepseek-r1").render(Chat(messages))


TEXT_PARTS = [{"type": "text", "text": " a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content[0].text }}",
        "{{ messages[0]['content'][-1]['text'] }}{{ messages[0].content | length }}",
        "{{ messages[0].content[0].get('text') }}",
        "{{ messages[0].get('content')[1:][0].text }}",
        "{% set content = messages[0].content %}{% set part = content[1] %}{{ part['type'] }}",
        "{% set part = messages[0].content | first %}{{ part.text }}",
        "{{ (messages[0].content | last).text }}",
        "{{ messages[0].content | map(attribute='text') | join('|') }}",
        "{{ messages[0].content | selectattr('type', 'equalto', 'text') | list | length }}",
        "{{ messages[0].content | join('|', attribute='text') }}",
        "{% macro m(x) %}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}{{ m(messages[0].content) }}",
        "{% set ns = namespace(x='') %}{% set ns.x = messages[0].content %}{{ ns.x[0].text }}",
        "{% with x = messages[0].content %}{{ x[1].text }}{% endwith %}",
        "{% macro say(x) %}{{ x[0].text }}{% endmacro %}{{ say(x=messages[0].content) }}",
        "{% for c in messages | map(attribute='content') %}{% for p in c %}{{ p.text }}{% endfor %}"
        "{% endfor %}",
        "{% set all = messages | map(attribute='content') | list %}{{ all[0][1].text }}",
        "{% for c in messages | map(attribute='content') | list %}{{ c[0].text }}{% endfor %}",
        "{{ (messages | map(attribute='content') | first)[0].text }}",
    ],
)
def test_a_template_that_reads_parts_gets_them_however_it_does(template: str) -> None:
    right, text = both_by(template, [{"role": "user", "content": TEXT_PARTS}])
    assert text == right != ""


@pytest.mark.parametrize(
    "use",
    [
        "content",
        "content[0] + content[1:]",
        "content[0].upper() + content[1:]",
        "content.split('x')[0]",
        "content if content is string else ''",
        "content | trim",
    ],
)
def test_a_template_for_texts_gets_the_parts_as_one_text(use: str) -> None:
    template = "{% set content = messages[0].content %}{{ " + use + " }}"
    text = JinjaChatTemplate({"default": template}).render(Chat([{"role": "user", "content": TEXT_PARTS}]))
    assert text.strip() == "a\nb"


@pytest.mark.parametrize(
    "template",
    [
        "{% for c in messages | map(attribute='content') %}{{ c }}{% endfor %}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ (messages | map(attribute='content') | list)[0] | trim }}",
    ],
)
def test_a_template_for_the_texts_of_all_messages_gets_each_as_one_text(template: str) -> None:
    text = JinjaChatTemplate({"default": template}).render(Chat([{"role": "user", "content": TEXT_PARTS}]))
    assert text.strip() == "a\nb"


@pytest.mark.parametrize("name", ["llama-3", "gemma", "glm"])
def test_templates_that_go_through_the_parts_of_a_message_get_them(name: str) -> None:
    right, text = both(name, PARTS)
    assert text == right
    assert "one" in text


def test_other_templates_get_the_parts_as_one_text() -> None:
    text = ours("chatml").render(Chat(PARTS))
    assert "<|im_start|>user\n one \ntwo<|im_end|>\n" in text


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama-3", "gemma", "zephyr", "hermes"])
@pytest.mark.parametrize("last", ["Once upon", "Once upon  ", "  Once\n"])
def test_the_last_message_is_continued_as_transformers_does(name: str, last: str) -> None:
    right, text = both(
        name,
        [user("Tell me a story."), assistant(last)],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == right
    assert text.rstrip().endswith(last.strip())


def test_documents_and_other_variables_reach_the_template() -> None:
    documents = [{"title": "Ants", "text": "They <are> small."}]
    right, text = both("command-r", SINGLE, documents=documents)
    assert text == right
    assert "title: Ants" in text
    right, text = both("qwen", SINGLE, chat_template_kwargs={"enable_thinking": False})
    assert text == right
    assert text.endswith("</think>\n\n")
    right, text = both("smol", TURNS, documents=documents, chat_template_kwargs={"custom": "é"})
    assert text == right
    assert text.endswith("é")


def test_today_is_what_transformers_says() -> None:
    template = "{{ strftime_now('%Y-%m-%d') }}"
    right = theirs("chatml").apply_chat_template(SINGLE, chat_template=template, tokenize=False)
    text = JinjaChatTemplate({"default": template}).render(Chat(SINGLE))
    again = theirs("chatml").apply_chat_template(SINGLE, chat_template=template, tokenize=False)
    assert text in (right, again)  # the day may end between them


def test_a_template_for_tools_is_used_for_chats_with_tools() -> None:
    template = JinjaChatTemplate({"default": "plain", "tool_use": "{{ tools | length }} tools"})
    assert isinstance(template, ChatTemplate)
    assert template.render(Chat(SINGLE)) == "plain"
    assert template.render(Chat(SINGLE, tools=TOOLS)) == "2 tools"
    with pytest.raises(InvalidRequest, match="rag"):
        JinjaChatTemplate({"rag": "x"}).render(Chat(SINGLE))


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["</think>", "<think>\n", "{{ x }}", "{% raw %}", "<|im_end|>", " \n", "'\"\\", "&lt;<b>"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_CALLS = st.builds(
    lambda name, arguments: {
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    _TEXT,
    st.dictionaries(_TEXT, _JSON, max_size=3),
)
_ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": _TEXT},
    optional={
        "tool_calls": st.lists(_CALLS, max_size=2) | st.none(),
        "reasoning_content": _TEXT | st.none(),
        "thinking": _TEXT | st.none(),
        "name": st.none(),
    },
)
_RESULTS = st.builds(
    lambda text: {"role": "tool", "content": text, "name": "f", "tool_call_id": "abcdefgh1"}, _TEXT
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": draw(_TEXT)}] if draw(st.booleans()) else []
    )
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(_TEXT)), draw(_ANSWERS)]
        messages += draw(st.lists(_RESULTS, max_size=2))
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(messages=conversations(), tools=st.sampled_from([None, TOOLS]), end=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    name: str, messages: Any, tools: Any, end: bool
) -> None:
    right, text = both(name, messages, tools=tools, add_generation_prompt=end)
    assert text == right


# ---------------------------------------------------------------------------------------------- hostile ones

FOREVER = {
    "loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a loop over output": "{% for i in range(99999) %}{{ 'a' * 60000 }}{% endfor %}",
}
_DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ %s }}"
HUGE = {
    "repeated": "{{ 'a' * 10**10 }}",
    "of constants": "{% set x = 'a' * 9999999999 %}{{ x | length }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "sums": _DOUBLING % ("'a'", "{% set ns.x = ns.x + ns.x %}", "ns.x | length"),
    "tildes": _DOUBLING % ("'a'", "{% set ns.x = ns.x ~ ns.x %}", "ns.x | length"),
    "blocks": _DOUBLING
    % ("'a'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}", "ns.x | length"),
    "lists": _DOUBLING % ("[1]", "{% set ns.x = ns.x + ns.x %}", "ns.x | length"),
    "nested lists": _DOUBLING % ("['a']", "{% set ns.x = [ns.x, ns.x] %}", "ns.x"),
    "nested lists as JSON": _DOUBLING % ("['a']", "{% set ns.x = [ns.x, ns.x] %}", "ns.x | tojson"),
    "a list of one text": "{{ (['a' * 60000] * 60000) | string }}",
    "joined": "{{ (['a' * 60000] * 60000) | join }}",
    "joined by a method": "{{ ''.join(['a' * 60000] * 60000) }}",
    "joined lazily": "{{ ''.join(range(99999) | map('string') | map('replace', '', 'a' * 60000)) }}",
    "separators": "{{ range(99999) | join('a' * 99999) }}",
    "replaced": "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
    "replaced by a method": "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "centered": "{{ 'a' | center(10 ** 10) }}",
    "padded": "{{ 'a'.ljust(10 ** 10) }}",
    "formatted": "{{ '{:10000000000d}'.format(1) }}",
    "formatted by a width": "{{ '{:{w}d}'.format(1, w=10 ** 10) }}",
    "formatted often": "{{ ('{0}' * 60000).format('a' * 60000) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent by a width": "{{ '%*d' % (10 ** 10, 1) }}",
    "percent often": "{{ ('%(a)s' * 60000) % {'a': 'a' * 60000} }}",
    "the filter": "{{ '%10000000000d' | format(1) }}",
    "indented": "{{ ('\\n' * 60000) | indent(60000) }}",
    "indented JSON": "{{ messages | tojson(indent=10 ** 9) }}",
    "a sum of lists": "{{ ([[0] * 60000] * 60000) | sum(start=[]) }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "digits": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "slices": "{{ messages | slice(10 ** 9) | list }}",
    "batches": "{{ messages | batch(10 ** 9, 'x') | list }}",
    "tabs": "{{ ('\\t' * 60000).expandtabs(60000) }}",
    "translated": "{{ ('a' * 60000).translate({97: 'a' * 60000}) }}",
}
FOREIGN = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "an item": "{{ ''['__class__'].__mro__ }}",
    "a filter": "{{ (''|attr('__class__')).__mro__ }}",
    "globals of a helper": "{{ raise_exception.__globals__.x }}",
    "globals of a class": "{{ namespace.__init__.__globals__.x }}",
    "globals of a method": "{{ dict.fromkeys.__func__.__globals__.x }}",
    "its own module": "{{ self.__init__.__globals__.x }}",
    "a format": "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
    "a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a namespace's begin": "{{ namespace(__class__=1) }}",
    "a list": "{{ messages.append(1) }}",
    "a message": "{{ messages[0].update(role='system') }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}",
    "an inheritance": "{% extends 'x' %}",
}


@pytest.mark.parametrize("source", FOREVER.values(), ids=FOREVER)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    with pytest.raises(InvalidRequest):
        JinjaChatTemplate({"default": source}, most_cpu_s=0.1).render(Chat(SINGLE))


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_a_template_that_makes_too_much_is_ended_before(source: str) -> None:
    template = JinjaChatTemplate({"default": source}, most_cpu_s=60.0)
    with pytest.raises(InvalidRequest, match="was stopped"):
        template.render(Chat(SINGLE))


@pytest.mark.parametrize("use", ["content.format(1)", "content % 1", "content.strip(content)"])
def test_long_messages_are_no_patterns(use: str) -> None:
    template = JinjaChatTemplate({"default": "{% set content = messages[0].content %}{{ " + use + " }}"})
    with pytest.raises(InvalidRequest, match="was stopped"):
        template.render(Chat([user(":" * (4 << 20))]))


@pytest.mark.parametrize("source", FOREIGN.values(), ids=FOREIGN)
def test_a_template_reaches_its_own_values_alone(source: str) -> None:
    with pytest.raises(InvalidRequest):
        JinjaChatTemplate({"default": source}).render(Chat(SINGLE))


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x | no_such_filter }}", "{{ " + "(" * 5000, "{% generation %}"]
)
def test_a_text_that_is_no_template_refuses_chats(source: str) -> None:
    template = JinjaChatTemplate({"default": source})
    assert template.error
    with pytest.raises(InvalidRequest, match="no template"):
        template.render(Chat(SINGLE))


def test_a_refusal_has_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequest, match="Conversation roles must alternate user/assistant"):
        ours("llama-2").render(Chat([assistant("I begin.")]))


def test_what_clients_send_is_text_and_no_template() -> None:
    text = "{{ ''.__class__ }}{% for i in range(99999) %}{{ i }}{% endfor %}"
    assert text in ours("chatml").render(Chat([user(text)]))


def test_a_chat_of_megabytes_is_within_the_budget() -> None:
    messages = [message for _ in range(500) for message in (user("é" * 4000), assistant("a" * 4000))]
    for name in TEMPLATES:
        right, text = both(name, messages)
        assert text == right != "refused"


def test_a_text_may_grow_message_by_message() -> None:
    grow = "{% set ns.text = ns.text + m.role ~ m.content %}"
    source = "{% set ns = namespace(text='') %}{% for m in messages %}" + grow + "{% endfor %}{{ ns.text }}"
    messages = [message for _ in range(500) for message in (user("é" * 2000), assistant("a" * 2000))]
    text = JinjaChatTemplate({"default": source}).render(Chat(messages))
    assert len(text) == 500 * (len("userassistant") + 4000)


def test_without_the_library_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['jinja2'] = None; import hotswap.backends.chat_template"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BackendMissing" in done.stderr
    assert "pip install 'hotswap[torch]'" in done.stderr
