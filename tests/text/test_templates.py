"""Chat templates render as transformers' apply_chat_template does."""

from __future__ import annotations

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


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = render_chat(with_template("{{ messages[0].content }}"), [{"role": "user", "content": parts}])
    assert text == "one\ntwo"


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
    ],
)
def test_template_failures_are_the_requests(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(with_template(template), CHATS[0])


def test_no_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render_chat(with_template(None), CHATS[0])


def test_template_variables_cannot_replace_the_messages() -> None:
    tokenizer = with_template("{{ messages[0].content }}{{ extra }}")
    text = render_chat(tokenizer, CHATS[0], template_kwargs={"messages": [], "extra": 1})
    assert text == "Hello  1"
