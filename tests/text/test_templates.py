"""Chat templates render as transformers' apply_chat_template does."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from manylora.text.chat import render_chat
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest
from tests.text import made

LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- content + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}{{ tools | tojson }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
last {{ ns.last }}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ message['content'] + eos_token}}{% endgeneration %}
    {% endif %}
{% endfor %}"""
ODD = """{% for message in messages %}{{ message | tojson(indent=2) }}{{ message.name or 'nobody' }}
{{ "<b>&" }}{{ unknown_variable }}{{ dict(a=1) }}{{ strftime_now('%Y') }}{{ pad_token }}
{% endfor %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello  "}],
    [{"role": "user", "content": 'Ünïcode <b>"quoted"</b> 🙂'}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "name": None},
        {"role": "user", "content": "What\nnow?", "name": "Ann"},
    ],
]
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.layout_5(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("template", [LLAMA_3, QWEN, MISTRAL, ODD, made.TEMPLATE])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_equals_transformers(folder: Path, template: str, add_generation_prompt: bool) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS if template == MISTRAL else [*CHATS, SYSTEM]:
        extra = {"enable_thinking": False}
        text = render_chat(ours, chat, add_generation_prompt=add_generation_prompt, template_kwargs=extra)
        assert text == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=False
        )
        ids = theirs.apply_chat_template(
            chat, add_generation_prompt=add_generation_prompt, enable_thinking=False, return_dict=False
        )
        assert ours.encode(text, add_special_tokens=False) == ids


def with_template(template: str | None) -> Tokenizer:
    templates = {"default": template} if template is not None else {}
    return Tokenizer(made.byte_level(False), {}, templates)


TOOLS = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls %}
{{ call.function | tojson }} {{ call.function.arguments | tojson(indent=1) }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}
{%- for name, value in call.function.arguments | items %} {{ name }}={{ value }}{% endfor %}
{%- if call.function.arguments is mapping %} {{ call.function.arguments.city }}{% endif %}
{%- endfor %}
{% endfor %}"""


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Zürich <b>", "a": [1, 2.50, {"z": null}], "Z": 1, "b": true}', "{}", '{"city":"\\u00fc"}'],
)
def test_arguments_are_objects(folder: Path, arguments: str) -> None:
    (folder / "chat_template.jinja").write_text(TOOLS)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    judge = theirs.apply_chat_template(calling(json.loads(arguments)), tokenize=False)
    assert render_chat(ours, calling(arguments), add_generation_prompt=False) == judge
    assert render_chat(ours, calling(json.loads(arguments)), add_generation_prompt=False) == judge


@pytest.mark.parametrize(
    ("sent", "meant"), [(None, {}), ("", {}), (" \n", {}), ("null", {}), ('[1, {"a": "b"}]', [1, {"a": "b"}])]
)
def test_arguments_may_be_none_or_a_list(sent: str | None, meant: Any) -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert json.loads(render_chat(with_template(template), calling(sent))) == meant


def test_arguments_have_the_methods_of_text_under_no_arguments_name() -> None:
    arguments = "messages[1].tool_calls[0].function.arguments"
    template = f"{{{{ {arguments}.strip() }}}} {{{{ {arguments}.title }}}}"
    assert render_chat(with_template(template), calling(' {"title":  1}')) == '{"title":  1} 1'


@pytest.mark.parametrize("use", ["'[' + {} + ']'", "'[' ~ {} ~ ']'", "'[' + {} | string + ']'"])
def test_arguments_are_text_where_a_template_wants_it(use: str) -> None:
    template = "{{ " + use.format("messages[1].tool_calls[0].function.arguments") + " }}"
    for arguments in ('{"city":  "Paris"}', "no JSON {", "[1]"):
        assert render_chat(with_template(template), calling(arguments)) == f"[{arguments}]"


PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
LOOPS = (
    "{% for message in messages %}{{ message.role }}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}<{{ part['text'] }}>{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{{ message.content[0].text }}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [LOOPS, EITHER, "{{ messages | tojson }}"])
def test_templates_that_look_into_parts_get_them(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS[1:]}]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert render_chat(Tokenizer.from_folder(folder), chat, add_generation_prompt=False) == theirs


@pytest.mark.parametrize(
    "use", ["{}", "{} ~ ''", "'' + {}", "{} + ''", "{} | trim", "{}.strip()", "{} if 'a  b' in {} else 'no'"]
)
def test_other_templates_get_the_joined_text(use: str) -> None:
    template = "{{ " + use.replace("{}", "messages[0].content") + " }}"
    assert render_chat(with_template(template), [{"role": "user", "content": PARTS}]) == "a  b"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_every_name(folder: Path, name: str) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}{{ messages[1].reasoning_content }}")
    answer: dict[str, Any] = {"role": "assistant", "content": "b", name: "why", "x": None}
    chat = [{"role": "user", "content": "a"}, answer]
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False)
    assert render_chat(Tokenizer.from_folder(folder), chat, add_generation_prompt=False) == theirs


def test_a_refusal_is_a_part_of_text() -> None:
    chat = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]
    assert render_chat(with_template(LOOPS), chat) == "assistant<No.>"


def test_a_template_may_look_into_parts_for_one_role() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}<{{ p.text }}>{% endfor %}"
        "{% else %}{{ m.content + '|' }}{% endif %}{% endfor %}"
    )
    chat = [{"role": role, "content": content} for role in ("user", "assistant") for content in (PARTS, "c")]
    assert render_chat(with_template(template), chat) == "<a ><b><c>a  b|c|"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        *itertools.product([made.TEMPLATE, LLAMA_3, EITHER], ["Once", "Once upon ", " <|eos|>"]),
        (EITHER, PARTS),
    ],
)
def test_goes_on_with_the_final_message(folder: Path, template: str, content: Any) -> None:
    (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    text = render_chat(ours, chat, add_generation_prompt=False, continue_final_message=True)
    assert text == theirs.apply_chat_template(
        copy.deepcopy(chat), tokenize=False, add_generation_prompt=False, continue_final_message=True
    )


def test_what_cannot_go_on() -> None:
    for template, chat, add in (
        ("{{ messages[0].role }}", CHATS[0], False),
        (made.TEMPLATE, CHATS[0], True),
        (made.TEMPLATE, calling("{}")[:2], False),
    ):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            render_chat(with_template(template), chat, add_generation_prompt=add, continue_final_message=True)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_malformed_messages(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(with_template(made.TEMPLATE), messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ messages[0].content + 3 }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[7].role }}",
        "{{ messages[0].content.append(1) }}",
        "{{ messages[0].content.strip.__self__.x }}",
        "{{ messages[0].content['__init__'].__globals__ }}",
        "{{ messages[0].tool_calls[0].function.arguments._text.x }}",
        "{{ messages[0].tool_calls[0].function.arguments.update(a=1) }}",
    ],
)
def test_template_failures_are_the_requests(template: str) -> None:
    for content in ("Hello", PARTS):
        with pytest.raises(InvalidRequest, match="chat template"):
            render_chat(with_template(template), [calling("{}")[1] | {"content": content}])


def test_no_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat(with_template(None), CHATS[0])


def test_template_variables_cannot_replace_the_messages() -> None:
    tokenizer = with_template("{{ messages[0].content }}{{ extra }}")
    text = render_chat(tokenizer, CHATS[0], template_kwargs={"messages": [], "extra": 1})
    assert text == "Hello  1"
