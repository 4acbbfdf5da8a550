"""The router's process: which adapters there are at its start, and its end."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from manylora.adapters.sources import discover
from manylora.cluster import children, messages
from manylora.cluster.admin import Admin
from manylora.cluster.operations import Operations
from manylora.cluster.registry import AdapterLog
from manylora.cluster.switchboard import Switchboard
from manylora.cluster.tasks import Tasks
from manylora.config import ConfigError, EngineSettings
from manylora.engine.wire import Failed
from manylora.main import warn_of_shares
from manylora.protocol import AdapterError
from manylora.types import why_reserved

log = logging.getLogger(__name__)


def run(launch: children.Launch, starter: children.Starter) -> int:
    """Until it is told to stop."""
    try:
        adapter_log = AdapterLog(Path(launch.folder) / "registry.sqlite")
        adapter_log.restore(launch.listings, launch.last_adapter)
        process = Switchboard(
            launch, adapter_log, [] if launch.takes_over else _named_adapters(launch.engine)
        )
    except (AdapterError, ConfigError) as error:
        starter.say(Failed(str(error), is_user_error=True))
        return children.REFUSED
    if not launch.takes_over:
        _warn_of_shares(launch, adapter_log)

    async def serve() -> int:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(stopped.set)

        await process.start(launch)
        operations = Operations(process, launch.cluster)
        tasks.spawn(operations.watch())
        admin = Admin(process, operations, Path(launch.folder))
        await admin.start()
        tasks.spawn(admin.keep())
        starter.watch(stop, stop)
        starter.say(messages.ChildReady())
        await stopped.wait()
        tasks.cancel()
        process.close()
        children.leave(0)  # links end by it
        return 0

    tasks = Tasks()
    return asyncio.run(serve())


def _warn_of_shares(launch: children.Launch, adapter_log: AdapterLog) -> None:
    queue = launch.engine.scheduler.queue
    if queue.fair_by == "key":
        known = [str(place) for place in range(len(launch.http.api_keys))]
    else:
        listed = (each.name for each in adapter_log.current.values() if each.state == "listed")
        known = [launch.engine.model.name, *listed]
    warn_of_shares(queue, known)


def _named_adapters(settings: EngineSettings) -> list[tuple[str, str]]:
    """Adapters that the start names, and those of the folder. Raises ConfigError."""
    adapters = settings.adapters
    named = dict(adapters.adapters)
    if adapters.adapter_dir is not None:
        try:
            found = discover(Path(adapters.adapter_dir))
        except AdapterError as error:
            raise ConfigError(str(error)) from error
        for name, folder in found:
            if reason := why_reserved(name, settings.model.names):
                log.warning("adapter %r in %s is skipped: %s", name, adapters.adapter_dir, reason)
            else:
                named.setdefault(name, str(folder))
    return list(named.items())
