"""``python -m manylora.cluster.process FD``: a process of a cluster, which its starter tells over FD what to
be."""

from __future__ import annotations

import sys

from manylora.cluster import messages
from manylora.cluster.children import REFUSED, Launch, PairedStarter, ignore_signals_of_terminals, leave
from manylora.config import ConfigError
from manylora.engine.wire import Failed
from manylora.main import configure_logging
from manylora.missing import naming_what_is_missing


def main(descriptor: int) -> int:
    """Be that process; the exit code."""
    ignore_signals_of_terminals()
    configure_logging()
    starter = PairedStarter(descriptor)
    launch = starter.read_launch()
    if launch is None:
        return 1
    try:
        return _run(launch, starter)
    except ConfigError as error:
        starter.say(Failed(str(error), is_user_error=True))
        return REFUSED


@naming_what_is_missing()
def _run(launch: Launch, starter: PairedStarter) -> int:
    if launch.role == messages.REPLICA:
        from manylora.cluster import replica

        return replica.run(launch, starter)
    if launch.role == messages.FRONTEND:
        from manylora.cluster import frontend

        return frontend.run(launch, starter)
    if launch.role == messages.RAY:
        from manylora.cluster import ray_driver

        return ray_driver.run(launch, starter)
    from manylora.cluster import routing

    return routing.run(launch, starter)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
