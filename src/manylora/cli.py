"""Runs the command line: parses, prints and returns exit codes. The work is done elsewhere and imported on use.

Bad input gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from manylora import flags
from manylora._version import VERSION
from manylora.aliases import ALIASES, CLUSTER_ALIASES, FOREIGN, REMOVED, add_removed, check_removed
from manylora.cluster.command import add_cluster
from manylora.config.cluster import TLS_OPTIONS
from manylora.config.declaring import ConfigError, naming_what_is_missing
from manylora.config.named import LAB, AddParser, find_commands
from manylora.flags import CLUSTER_FLAGS, FLAGS, SIZING
from manylora.progress import announce_compilation

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


_WARMUP_FLAGS = (*SIZING, "max_adapter_rank", "cuda_graphs")
_WARMUP_REMOVED = ("export", "import", "pipeline_depth")
_ADAPTERS_FLAGS = ("dtype", "page_tokens", "max_adapter_rank", "tensor_parallel_size", "lora_sharding")


_HTTP_FLAGS = tuple(flag.name for flag in FLAGS if flag.is_http)
_OWN = ("serve", "frontend", "cluster", "adapters", "warmup")


class _Parser(argparse.ArgumentParser):
    """A parser of argparse that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    words = [_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        return _run(words)
    except ConfigError as error:
        print(f"manylora: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmanylora: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        # Python flushes the rest of the output when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@naming_what_is_missing()
def _run(words: Sequence[str]) -> int:
    """Run a command, and return its exit code. Raises ConfigError."""
    # Our own commands need no import of other distributions' commands.
    others = {} if words and words[0] in _OWN else find_commands()
    if words and words[0] in LAB and words[0] not in others:
        raise ConfigError(f"manylora {words[0]} is part of manylora-lab: pip install manylora-lab")
    args = _parser(others).parse_args(words)
    if args.run not in (_serve, _frontend):  # these two set up the engine's log
        announce_compilation()
    code = int(args.run(args))
    sys.stdout.flush()
    return code


def _dashed(word: str) -> str:
    """Replace underscores in an option's name by dashes, as vLLM does."""
    option, equals, value = word.partition("=")
    return option.replace("_", "-") + equals + value if word.startswith("--") else word


def _parser(others: Mapping[str, AddParser]) -> argparse.ArgumentParser:
    """Build the parser of all commands. ``others``: the commands of other distributions."""
    about = "Serve thousands of LoRA adapters on one base model, each request naming its own."
    parser = _Parser(prog="manylora", description=about)
    parser.add_argument("--version", action="version", version=f"manylora {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_frontend(commands)
    add_cluster(commands)
    _add_adapters(commands)
    _add_warmup(commands)
    for name in sorted({*LAB, *others}):
        if name in others:
            others[name](commands)
        else:
            commands.add_parser(name, help="with manylora-lab, which is not installed")
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
    same = "vLLM, SGLang: the same as MODEL"
    serve.add_argument("--model", "--model-path", dest="named", metavar="MODEL", help=same)
    serve.add_argument("--config", metavar="FILE", help="a YAML or JSON file that sets the same names")
    for flag in FLAGS:
        flags.add_flag(serve, flag)
    for alias in ALIASES:
        if alias.of is None:
            text = f"{alias.engines}: always on, {alias.means}"
            serve.add_argument(alias.option, action=argparse.BooleanOptionalAction, help=text)
    cluster = serve.add_argument_group("several replicas behind one port")
    for flag in CLUSTER_FLAGS:
        flags.add_flag(cluster, flag)
    cluster.add_argument("--router-help", metavar="NAME", help="name a router's parameters, and end")
    others = serve.add_argument_group("flags of other engines that do nothing here, or cannot be had")
    for foreign in FOREIGN:
        action = argparse.BooleanOptionalAction if foreign.is_switch else "store"
        text = f"{foreign.engines}: {foreign.because}"
        others.add_argument(foreign.option, action=action, help=text)
    add_removed(serve, REMOVED)
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    if args.router_help is not None:
        from manylora.router.policies.policy import router_help

        print(router_help(args.router_help))
        return 0
    if args.model is not None and args.named is not None:
        raise ConfigError("MODEL and --model are one setting: give one of them")
    args.model = args.model or args.named
    settings = flags.read_config_file(args.config) if args.config else {}
    names = (
        "model",
        *(flag.name for flag in (*FLAGS, *CLUSTER_FLAGS)),
        *(alias.name for alias in (*ALIASES, *CLUSTER_ALIASES)),
        *(foreign.name for foreign in FOREIGN),
        *REMOVED,
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "model" not in {*settings, *given} and len(given.get("served_model_name", ())) > 1:
        given["model"] = given["served_model_name"].pop()  # MODEL, written after the names
    check_removed({**settings, **given})
    cluster, layers = flags.split_cluster(flags.key_of_environment(settings, given), settings, given)
    engine, http = flags.build_settings(flags.canonical(*layers))
    _leave_when_told()
    if cluster is not None:
        from manylora.cluster.supervisor import run_cluster

        return run_cluster(engine, http, cluster)
    from manylora.main import run_server

    return run_server(engine, http)


def _add_frontend(commands: Any) -> None:
    frontend = commands.add_parser(
        "frontend",
        help="join a cluster as one more front end, here or on another machine",
        description="Join a cluster that manylora serve --replicas has started, as one more front end.",
    )
    model, secret = "the cluster's model on this machine (default: the path there)", "the cluster's folder"
    frontend.add_argument("model", nargs="?", metavar="MODEL", help=model)
    frontend.add_argument("--connect", required=True, metavar="HOST:PORT", help="the cluster's router")
    frontend.add_argument("--secret-file", required=True, metavar="FILE", help=f"the secret of {secret}")
    for flag in CLUSTER_FLAGS:
        if flag.option in TLS_OPTIONS:
            flags.add_flag(frontend, flag)
    flags.add_settings(frontend, _HTTP_FLAGS)
    frontend.set_defaults(run=_frontend)


def _frontend(args: argparse.Namespace) -> int:
    given = flags.settings_of(args, _HTTP_FLAGS)
    http = flags.build_http({**flags.key_of_environment(given), **given})
    _leave_when_told()
    from manylora.cluster.frontend import run_frontend

    return run_frontend(args, http)


def _leave_when_told() -> None:
    from manylora.processes import stop_signals

    for number in stop_signals():
        signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    """End the process at a signal that arrives before there is anything to stop.

    An exception would be raised inside whatever import is running, and some imports swallow it.
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
        about = f"{help_text[0].upper()}{help_text[1:]}. Weights are held as on a CPU."
        action = actions.add_parser(name, help=help_text, description=about)
        action.add_argument("path", metavar="PATH", help=path_help)
        action.add_argument("--model", required=True, metavar="MODEL", help="the base: a folder, or a hub id")
        flags.add_settings(action, _ADAPTERS_FLAGS)
        action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_adapters, action=name)


def _adapters(args: argparse.Namespace) -> int:
    from manylora.inspection import check_adapter, list_adapters

    settings, _ = flags.build_settings(flags.settings_of(args, ("model", *_ADAPTERS_FLAGS)))
    report = list_adapters if args.action == "list" else check_adapter
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A folder's path may contain bytes that the terminal cannot show, or that are no text.
        sys.stdout.reconfigure(errors="backslashreplace")
    print(report(settings, args.path, as_json=args.json))
    return 0


def _add_warmup(commands: Any) -> None:
    warmup = commands.add_parser(
        "warmup",
        help="compile all that serving a model needs, so that later starts are quick",
        description="Start an engine, run requests of every kind with random adapters on all modules, and end. "
        "What was compiled stays in the caches of Triton and FlashInfer, which image builds can keep.",
    )
    warmup.add_argument("model", nargs="?", metavar="MODEL", help="a local folder, or a hub id")
    add_removed(warmup, _WARMUP_REMOVED)
    engine = warmup.add_argument_group("settings of the engine, as for manylora serve")
    flags.add_settings(engine, _WARMUP_FLAGS)
    warmup.set_defaults(run=_warmup)


def _warmup(args: argparse.Namespace) -> int:
    from manylora.warmup import run

    check_removed({name: getattr(args, name) for name in _WARMUP_REMOVED})
    if args.model is None:
        raise ConfigError("warmup needs a MODEL")
    run(flags.settings_of(args, ("model", *_WARMUP_FLAGS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
