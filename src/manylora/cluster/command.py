"""``manylora cluster``: what an operator asks of a cluster on this machine, over its admin socket."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manylora.cluster.folder import default_folder, is_in_use, short_path
from manylora.config.declaring import ConfigError

WATCH_S = 1.0
NEXT_S, AGAIN_S = 10.0, 0.1
"""How long the next router is waited for where one has died, and how often it is looked for."""


def add_cluster(commands: Any) -> None:
    """Add the parser of ``manylora cluster``."""
    cluster = commands.add_parser("cluster", help="look at a cluster on this machine, and change it")
    _add_place(cluster, None, 8000)
    actions = cluster.add_subparsers(metavar="ACTION", required=True)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
        _add_place(parser, argparse.SUPPRESS, argparse.SUPPRESS)  # before the action or after it
        parser.set_defaults(run=_run, action=name)
        return parser

    status = action("status", "every process, its state and its load")
    how = status.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="what GET /cluster says")
    how.add_argument("--watch", action="store_true", help="again every second")
    drain = action("drain", "give a replica no more work, and wait until it has none")
    drain.add_argument("replica", type=int)
    drain.add_argument("--migrate", action="store_true", help="move its requests at once")
    action("scale", "another number of replicas").add_argument("replicas", type=int)
    action("remove", "move a replica's requests elsewhere, then end it").add_argument("replica", type=int)
    action("restart", "start all replicas anew, one after the other")
    move = action("move", "have another replica serve a request")
    move.add_argument("request", help="its id, or the answer's")
    move.add_argument("replica", type=int)
    action("trace", "print each decision of the router as it is taken")


def _add_place(parser: argparse.ArgumentParser, folder: str | None, port: int | str) -> None:
    """Add the options that name a cluster, with these defaults."""
    parser.add_argument("--cluster-dir", metavar="DIR", default=folder, help="as given to serve")
    parser.add_argument("--port", type=int, default=port, help="else: the server's port (default: 8000)")


def _run(args: argparse.Namespace) -> int:
    folder = default_folder(args.port) if args.cluster_dir is None else Path(args.cluster_dir)
    question = {"do": args.action}
    names = ("replica", "replicas", "migrate", "request")
    question |= {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        if args.action == "trace":
            for line in _ask(folder, question):
                print(line, end="", flush=True)
            return 0
        while True:
            answer = _answer(folder, question)
            if args.action != "status":
                print(answer["said"])
                return 0
            print(json.dumps(answer) if args.json else _table(answer), flush=True)
            if not args.watch:
                return 0
            time.sleep(WATCH_S)
    except NotThere as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        return 0


class NotThere(Exception):
    """There is no cluster to ask; the message is a line for people."""


def ask(folder: Path, question: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of an answer. Raises NotThere."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            with short_path(folder) as path:
                sock.connect(path)
            sock.sendall(json.dumps(question).encode() + b"\n")
            with sock.makefile("rb") as lines:
                for line in lines:
                    yield line.decode()
        except OSError as error:
            raise NotThere(f"no cluster answers in {folder}: {error.strerror or error}") from error


def _ask(folder: Path, question: dict[str, Any]) -> Iterator[str]:
    """As ``ask``; where a router has just died the next one is waited for."""
    until_s = time.monotonic() + NEXT_S
    while True:
        try:
            yield from ask(folder, question)
            return
        except NotThere:
            if time.monotonic() > until_s or not is_in_use(folder):
                raise
        time.sleep(AGAIN_S)


def _answer(folder: Path, question: dict[str, Any]) -> dict[str, Any]:
    for line in _ask(folder, question):
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return answer
    raise ConfigError("the router has gone before it answered")


def _table(status: dict[str, Any]) -> str:
    """The status for people."""
    router, hint = status["router"], status["scale_hint"]
    lines = [
        f"router {router['policy']:<16} pid {router['pid']:<8} {router['state']:<9} "
        f"{router['requests']} requests, {router['waiting']} of them wait"
    ]
    for each in status["frontends"]:
        lines.append(f"front end {each['id']:<13} pid {each['pid']:<8} {each['state']}")
    for each in status["replicas"]:
        lines.append(
            f"replica {each['id']:<4} epoch {each['epoch']:<4} pid {each['pid']:<8} {each['state']:<9} "
            f"{each['running']} run, {each['waiting']} wait, {each['free_pages']} + "
            f"{each['reclaimable_pages']} of {each['pages']} pages free, "
            f"{each['adapters_on_device']} + {each['adapters_on_host']} adapters, "
            f"cold start {each['cold_start'] or '?'}"
        )
        if each["adapters_lacking"]:
            lines.append(f"             without {', '.join(each['adapters_lacking'])}, which it cannot have")
    lines.append(f"{status['adapters']['listed']} adapters, revision {status['adapters']['revision']}")
    if hint["delta"]:
        lines.append(f"{hint['delta']:+d} replicas would do: {hint['reason']}")
    return "\n".join(lines)
