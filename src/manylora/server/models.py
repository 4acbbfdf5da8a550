"""Finds the model that a request means, and writes the cards of /v1/models."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from manylora.engine.client import EngineClient, ReplacesAdapters
from manylora.server.connection import ServerSettings
from manylora.server.docs import Operation
from manylora.server.errors import ApiError, clipped
from manylora.text.texts import ModelText, Texts
from manylora.types import AdapterCard

_PERMITTED = {
    "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True, "allow_search_indices": False,
    "allow_view": True, "allow_fine_tuning": False, "organization": "*", "group": None, "is_blocking": False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The model of a request. ``name``: the name for the answer, as the client wrote it, or the base's first
    name; ``adapter``: None for the base; ``text``: its text side."""

    name: str
    adapter: str | None
    text: ModelText


class Models:
    """The base model and the adapters that the engine serves now."""

    def __init__(self, client: EngineClient, texts: Texts, settings: ServerSettings) -> None:
        self._client = client
        self.texts = texts
        self._settings = settings
        self._created_s = int(time.time())
        # Adapters known to be served, by name. The engine decides, and refuses a name that is no longer
        # served. Asking it for every request would cost a list of perhaps thousands.
        self._known: dict[str, AdapterCard] = {}

    async def choose(self, name: str, asked: tuple[str, str] | None = None) -> Chosen:
        """Match a name whole, or else as ``base:adapter`` with one of the base's names. Raises ApiError 404
        where none matches.

        ``asked``: a field beside ``model`` that names an adapter, and the name. With the base as model, that
        adapter is chosen (ApiError 404 where none has the name). With another adapter as model, the two
        contradict each other (400).
        """
        chosen = self._match(name)
        if chosen is None:
            await self._ask_for_names()
            chosen = self._match(name)
        if chosen is None:
            raise ApiError(404, f"The model `{clipped(name)}` does not exist.", param="model")
        if asked is not None:
            chosen = await self._narrowed(chosen, *asked)
        card = None if chosen.adapter is None else self._card_of(chosen.adapter)
        return dataclasses.replace(chosen, text=await self.texts.of(card))

    async def _narrowed(self, chosen: Chosen, field: str, adapter: str) -> Chosen:
        if chosen.adapter == adapter:
            return chosen
        if chosen.adapter is not None:
            fault = f"names the adapter `{clipped(adapter)}`, but model names `{clipped(chosen.name)}`"
            raise ApiError(400, f"{field} {fault}", param=field)
        if self._card_of(adapter) is None:
            await self._ask_for_names()
        if self._card_of(adapter) is None:
            raise ApiError(404, f"The adapter `{clipped(adapter)}` does not exist.", param=field)
        return Chosen(adapter, adapter, self.texts.base)

    async def _ask_for_names(self) -> None:
        self._known = {card.name: card for card in await self._client.adapters()}

    def _card_of(self, name: str) -> AdapterCard | None:
        # Other servers may replace an adapter, so a client with a cheap lookup is asked each time.
        client = self._client
        return client.card(name) if isinstance(client, ReplacesAdapters) else self._known.get(name)

    def learn(self, card: AdapterCard) -> None:
        """Note a loaded adapter, so that its name is matched whole from now on."""
        self._known[card.name] = card

    def forget(self, name: str) -> None:
        """Forget an adapter that is about to be unloaded. The engine is asked before the name is used again."""
        self._known.pop(name, None)

    def _match(self, name: str) -> Chosen | None:
        bases = self._settings.names
        if name in bases:
            return Chosen(bases[0], None, self.texts.base)
        if self._card_of(name) is not None:
            return Chosen(name, name, self.texts.base)
        # Either part may contain colons. The longest name of the base that matches is used.
        for base in sorted(bases, key=len, reverse=True):
            adapter = name.removeprefix(base + ":")
            if adapter != name and self._card_of(adapter) is not None:
                return Chosen(name, adapter, self.texts.base)
        return None

    async def cards(self) -> list[dict[str, Any]]:
        """List the base's card under each of its names, then the adapters' cards in the order they were added."""
        bases = map(self._base_card, self._settings.names)
        return [*bases, *(self._adapter_card(card) for card in await self._client.adapters())]

    async def card(self, name: str) -> dict[str, Any]:
        """Return one model's card. Raises ApiError 404."""
        adapter = (await self.choose(name)).adapter
        if adapter is None:
            return self._base_card(name)
        for card in await self._client.adapters():
            if card.name == adapter:
                return self._adapter_card(card)
        raise ApiError(404, f"The model `{clipped(name)}` does not exist.", param="model")

    def _base_card(self, name: str) -> dict[str, Any]:
        return self._card(name, self._created_s, self._settings.model_root, None)

    def _adapter_card(self, card: AdapterCard) -> dict[str, Any]:
        return self._card(card.name, card.created_s, card.path, self._settings.served_model_name)

    def _card(self, name: str, created_s: int, root: str, parent: str | None) -> dict[str, Any]:
        number = f"modelperm-{name}"
        permission = {"id": number, "object": "model_permission", "created": created_s, **_PERMITTED}
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "manylora",
            "root": root,
            "parent": parent,
            "max_model_len": self._client.info.max_model_len,
            "permission": [permission],
        }


def note_model(request: Request, name: str) -> None:
    """Note the model's name for the log line of the request."""
    request.state.model = clipped(name)


def operations(models: Models) -> list[Operation]:
    """List the operations of /v1/models."""

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await models.cards()})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        note_model(request, name)
        return JSONResponse(await models.card(name))

    text = "The base model and every adapter served now"
    return [
        Operation("GET", "/v1/models", list_models, "models", text),
        Operation("GET", "/v1/models/{name:path}", show_model, "models", "One model", errors=(404,)),
    ]
