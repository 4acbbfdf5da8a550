"""Which fields beside ``model`` name a request's adapter: those by which clients of other engines do.

Each holds the name under which an adapter is served. What names an adapter in a form that cannot be honoured is
refused: a request never gets another model's answer because a field was not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from manylora.server.errors import clipped
from manylora.types import InvalidRequest

Name = Annotated[str, msgspec.Meta(min_length=1)]


class LoraRequest(msgspec.Struct):
    """The object of vLLM and TensorRT-LLM. Its name decides; number and path are for servers that load by them."""

    lora_name: Name | None = None


class AdapterParameters(msgspec.Struct, kw_only=True):
    """What names an adapter, in a body or in its ``parameters``."""

    adapter_id: Name | None = None  # TGI, LoRAX
    adapter: Name | None = None
    adapter_name: Name | None = None  # LMDeploy
    lora_name: Name | None = None
    lora_path: Name | None = None  # SGLang, which takes a served name here
    lora_request: LoraRequest | None = None
    # Named so that asking for them is refused rather than ignored.
    adapters: Any = None
    adapter_source: Any = None
    adapter_parameters: Any = None
    lora: Any = None
    lora_id: Any = None
    lora_int_id: Any = None
    lora_task_id: Any = None


class AdapterFields(AdapterParameters, kw_only=True):
    """The same of a whole body. ``parameters`` is LoRAX's, of which nothing else is read."""

    parameters: AdapterParameters | None = None


_NAMES = ("adapter_id", "adapter", "adapter_name", "lora_name", "lora_path")
_REFUSED = {
    "adapters": "a request has one adapter: name it as the model",
    "adapter_source": "adapters are loaded before they are asked for, by name",
    "adapter_parameters": "adapters cannot be merged in a request",
    "lora": "a request has one adapter, at full scale: name it as the model",
    "lora_id": "adapters are named, not numbered",
    "lora_int_id": "adapters are named, not numbered",
    "lora_task_id": "adapters are named, not numbered",
}


def adapter_asked(body: AdapterFields) -> tuple[str, str] | None:
    """The field that names an adapter, and its name; None where none does.

    Raises InvalidRequest, naming the field, where two name different ones, or one asks for what cannot be had.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    first, name = asked[0]
    for field, other in asked[1:]:
        if other != name:
            raise InvalidRequest(
                f"{field} names the adapter `{clipped(other)}`, but {first} names `{clipped(name)}`", field
            )
    return first, name


def _asked(body: AdapterParameters, within: str = "") -> Iterator[tuple[str, str]]:
    """Every field that names an adapter, with the name."""
    for field, reason in _REFUSED.items():
        if getattr(body, field) not in (None, [], {}):
            raise InvalidRequest(f"{within}{field} is not supported by this server: {reason}", within + field)
    for field in _NAMES:
        name = getattr(body, field)
        if name is not None:
            yield within + field, name
    if body.lora_request is not None:
        if body.lora_request.lora_name is None:
            raise InvalidRequest(
                f"{within}lora_request must give the adapter's lora_name", f"{within}lora_request"
            )
        yield f"{within}lora_request", body.lora_request.lora_name
    if isinstance(body, AdapterFields) and body.parameters is not None:
        yield from _asked(body.parameters, "parameters.")
