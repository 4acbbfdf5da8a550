"""Values that a chat template can read in either of two ways, since templates disagree about what they are given.

Sandboxed templates reach none of what begins with an underscore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Text(str):
    """A message's text. A template that looks for parts in it finds one, as vLLM gives it."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        yield {"type": "text", "text": str(self)}


class Parts(list[Any]):
    """A message's parts. A template that takes them for text finds the joined text, as transformers gives it."""

    def __str__(self) -> str:
        return " ".join(part["text"] for part in self)

    def __add__(self, other: Any) -> Any:
        return (str(self) if isinstance(other, str) else list(self)) + other

    def __radd__(self, other: Any) -> Any:
        return other + (str(self) if isinstance(other, str) else list(self))

    def __contains__(self, item: Any) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)  # such as ``strip`` and ``split``


class _Written:
    """What a client sent as JSON. A template that takes it for text finds that JSON."""

    _text: str

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


class Arguments(_Written, dict[str, Any]):
    """A call's arguments as an object."""

    def __init__(self, decoded: Mapping[str, Any], text: str) -> None:
        super().__init__(decoded)
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name in self:
            raise AttributeError(name)  # an argument, which Jinja looks up next
        return getattr(self._text, name)


class ArgumentList(_Written, list[Any]):  # type: ignore[misc]  # joins text, not lists
    """A call's arguments, where they are a list."""

    def __init__(self, decoded: Iterable[Any], text: str) -> None:
        super().__init__(decoded)
        self._text = text
