"""Loads and unloads adapters while the server runs.

Decides which folders may be read; the engine decides whether a folder has an adapter that fits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import os
import weakref
from pathlib import Path
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from manylora.engine.client import EngineClient, ReplacesAdapters
from manylora.metrics.requests import Metrics
from manylora.server.connection import ServerSettings
from manylora.server.docs import JSON, TEXT, Endpoint, Operation
from manylora.server.errors import ApiError, clipped
from manylora.server.lifecycle import Lifecycle
from manylora.server.middleware import same_origin
from manylora.server.models import Models, note_model
from manylora.server.requests import LoadAdapterBody, LoraBody, UnloadAdapterBody, read_body
from manylora.types import adapter_name_fault, why_reserved

# Linux's own limit. Resolving a path takes time that grows with the square of its length.
_MAX_PATH_CHARS = 4096

_MOST_ENTRIES = 10_000
"""The most entries of an adapter's folder, which may be a training run's folder."""

_LOOK_S = 10.0
_LOOKERS = 4
"""The number of threads that check folders. Each may hang at a network share that is gone."""

_LOADS_OF_A_CALLER = 2
"""The most loads of one caller at the engine, which loads one after another. Further ones wait here, so that
callers take turns."""


def permitted_folder(path: str, root: Path | None) -> Path:
    """Return the adapter folder that ``path`` means, with links resolved, if it is under ``root``.

    A relative path is tried from the working directory, then from ``root``, then from the folder of ``root``,
    and that of a link to it. Raises ApiError 403 for a path outside, whether or not it exists, and 404 for no
    such folder. Raises ApiError 400 for an invalid path, or a folder with too many entries. Takes as long as
    the file system does.
    """
    if root is None:
        raise ApiError(403, "loading adapters at run time is off: start the server with --adapter-dir")
    if len(path) > _MAX_PATH_CHARS:
        raise ApiError(400, f"lora_path may have at most {_MAX_PATH_CHARS} characters", param="lora_path")
    try:
        resolved_root = root.resolve()
        places = Path(), resolved_root, resolved_root.parent, root.absolute().parent
        candidates = [(place / path).resolve() for place in places]
        inside = [folder for folder in candidates if folder.is_relative_to(resolved_root)]
        if not inside:
            raise ApiError(403, f"'{clipped(path)}' is outside the folder that adapters may be loaded from")
        for folder in inside:
            if folder.is_dir():
                _check_entries(folder, path, resolved_root)
                return folder
    except (ValueError, OSError, RuntimeError) as error:
        # A NUL byte, a name too long for the file system, or a cycle of links. The error's own text may show
        # the folder's place on the server.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ApiError(400, f"'{clipped(path)}' is not a usable path: {reason}", param="lora_path") from error
    raise ApiError(404, f"there is no adapter folder '{clipped(path)}'", param="lora_path")


def _check_entries(folder: Path, path: str, root: Path) -> None:
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number == _MOST_ENTRIES:
                fault = f"'{clipped(path)}' holds over {_MOST_ENTRIES} files: no adapter's"
                raise ApiError(400, fault, param="lora_path")
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root):
                raise ApiError(403, f"'{clipped(path)}' holds a link to a file outside the permitted folder")


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, param=param, kind="InvalidUserInput")


def operations(
    client: EngineClient, settings: ServerSettings, models: Models, lifecycle: Lifecycle, metrics: Metrics
) -> list[Operation]:
    """List the operations /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, and /v1/loras, as in
    Dynamo."""
    lookers = concurrent.futures.ThreadPoolExecutor(_LOOKERS, thread_name_prefix="manylora-adapter-folder")
    callers: weakref.WeakValueDictionary[object, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def is_served(name: str) -> bool:
        return any(card.name == name for card in await client.adapters())

    async def find(path: str) -> Path:
        """Run ``permitted_folder`` beside the event loop. Raises ApiError 503 after ``_LOOK_S``."""
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(lookers, permitted_folder, path, settings.adapter_dir)
        try:
            return await asyncio.wait_for(look, _LOOK_S)
        except TimeoutError as error:
            fault = f"could not be looked at within {_LOOK_S:.0f} s: its disk does not answer"
            raise ApiError(503, f"'{clipped(path)}' {fault}", param="lora_path") from error

    async def add(request: Request, name: str, path: str, in_place: bool) -> None:
        note_model(request, name)
        if fault := adapter_name_fault(name):
            raise _invalid(f"lora_name {fault}", "lora_name")
        if reason := why_reserved(name, settings.names):
            raise _invalid(f"{reason}.", "lora_name")
        replace = client.replace_adapter if in_place and isinstance(client, ReplacesAdapters) else None
        if replace is None and await is_served(name):
            hint = " Replacing it in place is not supported: unload it first." if in_place else ""
            raise _invalid(f"The lora adapter '{name}' has already been loaded.{hint}", "lora_name")
        folder = await find(path)
        caller = getattr(request.state, "api_key", None) or (request.client and request.client.host)
        turn = callers.setdefault(caller, asyncio.Semaphore(_LOADS_OF_A_CALLER))
        # A load whose client has disconnected is not begun.
        async with lifecycle.interruptible(request.receive), turn:
            card = await (replace or client.add_adapter)(name, str(folder))
        models.learn(card)

    async def remove(request: Request, name: str) -> None:
        note_model(request, name)
        if not await is_served(name):
            message = f"The lora adapter '{clipped(name)}' cannot be found."
            raise ApiError(404, message, param="lora_name")
        models.forget(name)
        async with lifecycle.interruptible():
            await client.remove_adapter(name)
        metrics.forget(name)

    async def load(request: Request) -> Response:
        if settings.adapter_dir is None:
            permitted_folder("", None)
        body, _ = await read_body(request, LoadAdapterBody)
        name = body.lora_name
        if not name or not body.lora_path:
            missing = "lora_path" if name else "lora_name"
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.", missing)
        await add(request, name, body.lora_path, bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        body, _ = await read_body(request, UnloadAdapterBody)
        name = body.lora_name
        if not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        await remove(request, name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def list_loras(request: Request) -> Response:
        ids = {card.name: _dynamo_id(card.name) for card in await client.adapters()}
        return JSONResponse({"status": "success", "loras": ids, "count": len(ids)})

    async def load_lora(request: Request) -> Response:
        if settings.adapter_dir is None:
            permitted_folder("", None)
        body, _ = await read_body(request, LoraBody)
        name, uri = body.lora_name, None if body.source is None else body.source.uri
        if not name or not uri:
            missing = "source" if name else "lora_name"
            raise _invalid("Both 'lora_name' and 'source.uri' must be provided.", missing)
        await add(request, name, _path_of(uri), False)
        return _dynamo_answer(name, "loaded")

    async def unload_lora(request: Request) -> Response:
        name = request.path_params["name"]
        await remove(request, name)
        return _dynamo_answer(name, "unloaded")

    ends = "Stop serving an adapter; answers once it is gone"
    begins = "Serve an adapter from the permitted folder"
    rows: list[tuple[str, str, Endpoint, str, type[msgspec.Struct] | None, str]] = [
        ("POST", "/v1/load_lora_adapter", load, begins, LoadAdapterBody, TEXT),
        ("POST", "/v1/unload_lora_adapter", unload, ends, UnloadAdapterBody, TEXT),
        ("GET", "/v1/loras", list_loras, "The adapters that are served, as Dynamo lists them", None, JSON),
        ("POST", "/v1/loras", load_lora, f"{begins}, as Dynamo is asked to", LoraBody, JSON),
        ("DELETE", "/v1/loras/{name:path}", unload_lora, ends, None, JSON),
    ]
    return [
        Operation(method, path, same_origin(endpoint), "adapters", summary, body, (answer,), (404, 409, 429))
        for method, path, endpoint, summary, body, answer in rows
    ]


def _path_of(uri: str) -> str:
    """Return the path on this machine that a URI means. Raises ApiError."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    if scheme.lower() != "file" or not rest.startswith("/"):
        raise _invalid("source.uri must be of this machine: file:///FOLDER", "source")
    return unquote(rest)


def _dynamo_id(name: str) -> int:
    """Compute a number from the name alone, so that it is the same on every server."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") >> 1 or 1


def _dynamo_answer(name: str, done: str) -> JSONResponse:
    message, number = f"LoRA adapter '{name}' {done} successfully", _dynamo_id(name)
    return JSONResponse({"status": "success", "message": message, "lora_name": name, "lora_id": number})
