"""A template that never comes to an end does."""

from __future__ import annotations

import concurrent.futures

import pytest

from manylora.text.chat import render_chat, within
from manylora.text.tokenizer import Tokenizer
from manylora.types import InvalidRequest
from tests.text import made

LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}"


def test_endless_templates_are_ended() -> None:
    tokenizer = Tokenizer(made.byte_level(False), {}, {"default": LONG})
    chat = [{"role": "user", "content": "x"}]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="takes longer"):
                pool.submit(within, 0.05, render_chat, tokenizer, chat).result()
        assert pool.submit(within, 60.0, lambda: 3).result() == 3
