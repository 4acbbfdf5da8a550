"""The command line. Parses, prints, returns exit codes; the work is done elsewhere and imported on use.

Bad input: one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from manylora import __version__
from manylora.config import ConfigError
from manylora.flags import FLAGS, Flag, build_settings, read_config_file

_SERVE_EXAMPLES = """\
examples:
  manylora serve ./llama-3-8b --adapter-dir ./adapters
      every adapter in a folder of ./adapters is a model of its own, beside the base
  manylora serve ./llama-3-8b --adapter german=./adapters/de --adapter legal=./adapters/legal-v2
  manylora serve --config serve.yaml
      the same names in YAML or JSON: {model: ./llama-3-8b, adapter_dir: ./adapters, port: 8080}

then, with any OpenAI client:
  curl localhost:8000/v1/completions -H 'content-type: application/json' \\
       -d '{"model": "german", "prompt": "Guten", "max_tokens": 20}'

sizes are written as 512MiB or 10GB. The command line wins over the config file.
"""


_BENCH_EXAMPLES = """\
examples:
  manylora bench serve --trace-file chat_5rps.jsonl.gz --url http://localhost:8000 --out result.json
      a running server, manylora's or another with OpenAI's API, whose adapters are adapter-0, adapter-1, ...
  manylora bench serve --trace-file chat_5rps.jsonl.gz --model ./llama --load-format dummy \\
       --adapter-dir ./adapters --device-pool 12GB --warm-adapters
      an engine in this process; takes the engine's settings of manylora serve
"""


class _Parser(argparse.ArgumentParser):
    """argparse, but an error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"manylora: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="manylora",
        description="Serve thousands of LoRA adapters on one base model, each request naming its own.",
    )
    parser.add_argument("--version", action="version", version=f"manylora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_adapters(commands)
    _add_bench(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a base model and its adapters over an OpenAI-compatible API",
        description="Serve a base model and its adapters over an OpenAI-compatible API.",
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help="a local folder, or a hub id")
    serve.add_argument("--config", metavar="FILE", help="a YAML or JSON file that sets the same names")
    for flag in FLAGS:
        _add_flag(serve, flag)
    serve.set_defaults(run=_serve)


def _add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    # Values stay text, and absent ones None, so that a config file and the command line convert alike.
    shown = "" if flag.default is None else f" (default: {flag.default})"
    options: dict[str, Any] = {"help": flag.help + shown, "default": None, "dest": flag.name}
    if flag.repeats:
        options["action"] = "append"
    if flag.choices:
        options["choices"] = flag.choices
    elif flag.metavar:
        options["metavar"] = flag.metavar
    parser.add_argument(flag.option, **options)


def _serve(args: argparse.Namespace) -> int:
    values = read_config_file(args.config) if args.config else {}
    given = {name: getattr(args, name) for name in ("model", *(flag.name for flag in FLAGS))}
    values.update({name: value for name, value in given.items() if value is not None})
    engine, http = build_settings(values)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from manylora.main import run_server

    return run_server(engine, http)


def _leave(number: int, frame: object) -> NoReturn:
    """Told to stop before there was anything to stop.

    Not by an exception: it would be raised within whatever import is running, and some of those lose it.
    """
    os._exit(0)


def _add_adapters(commands: Any) -> None:
    adapters = commands.add_parser("adapters", help="say what adapters are and whether they fit a model")
    actions = adapters.add_subparsers(required=True, metavar="ACTION")
    about_check = "what the adapter in PATH is, whether it fits, how many pages it takes"
    for name, help_text, path_help in (
        ("list", "one line for every adapter in the folders of PATH", "a folder of adapter folders"),
        ("check", about_check, "an adapter's folder"),
    ):
        action = actions.add_parser(name, help=help_text, description=help_text.capitalize() + ".")
        action.add_argument("path", metavar="PATH", help=path_help)
        action.add_argument("--model", required=True, metavar="MODEL", help="the base: a folder, or a hub id")
        action.add_argument("--page-tokens", metavar="N", default="16", help="tokens a page (default: 16)")
        action.add_argument(
            "--dtype",
            choices=("auto", "float32", "float16", "bfloat16"),
            default="auto",
            help="type in which weights are held; auto is float32, as on a CPU (default: auto)",
        )
        action.add_argument("--max-adapter-rank", metavar="N", help="refuse larger ranks")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_adapters, action=name)


def _adapters(args: argparse.Namespace) -> int:
    from manylora.inspection import check_adapter, list_adapters

    settings, _ = build_settings(
        {
            "model": args.model,
            "dtype": args.dtype,
            "page_tokens": args.page_tokens,
            "max_adapter_rank": args.max_adapter_rank,
        }
    )
    report = list_adapters if args.action == "list" else check_adapter
    print(report(settings, args.path, as_json=args.json))
    return 0


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure a server or an engine")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    serve = kinds.add_parser(
        "serve",
        help="replay a chat trace and report times to the first token, between tokens, and what was reused",
        description="Replay a multi-turn chat trace, greedily and with exact lengths, and report. Exits 1 "
        "where a turn failed.",
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, metavar, help_text in (
        ("--url", "URL", "a running OpenAI-compatible server"),
        ("--model", "DIR", "or an engine in this process, on this model"),
        ("--trace-file", "FILE", "JSON lines of turns, perhaps gzipped"),
        ("--rate-scale", "X", "replay X times as fast (default: 1)"),
        ("--limit", "N", "only the first N turns"),
        ("--seed", "N", "of the prompts' random tokens (default: 0)"),
        ("--vocab-size", "N", "draw prompt tokens below N (default: 1000)"),
        ("--adapter-name", "TEMPLATE", "name of the trace's adapter {} (default: adapter-{})"),
        ("--out", "FILE", "write the report and every turn's times as JSON"),
    ):
        serve.add_argument(option, metavar=metavar, help=help_text, required=option == "--trace-file")
    serve.add_argument("--warm-adapters", action="store_true", help="request every adapter once before")
    serve.add_argument("--progress", action="store_true", help="a line on stderr every two seconds")
    serve.add_argument("--api-key", metavar="KEY", help="for the server at --url")
    engine = serve.add_argument_group("settings of an engine in this process, as for manylora serve")
    for flag in FLAGS:
        if not flag.is_http:
            _add_flag(engine, flag)
    serve.set_defaults(run=_bench_serve)


def _bench_serve(args: argparse.Namespace) -> int:
    from manylora.bench.serve import run, settings_from

    names = ("model", *(flag.name for flag in FLAGS if not flag.is_http))
    engine = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return run(settings_from(vars(args), engine))


if __name__ == "__main__":
    sys.exit(main())
