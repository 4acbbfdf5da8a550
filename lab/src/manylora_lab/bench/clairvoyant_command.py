"""``manylora bench clairvoyant``: what merging lost in a recorded run, beside a switcher that knew the run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError

_EXAMPLES = """\
examples:
  manylora serve ./llama --merge manylora --journal run.journal
  manylora bench clairvoyant run.journal --out lost.json
"""


def add_parser(kinds: Any) -> None:
    """Adds ``clairvoyant`` to the subparsers of ``manylora bench``."""
    parser = kinds.add_parser(
        "clairvoyant",
        help="what merging lost in a recorded run, beside a switcher that knew all of it",
        description="Replay a journal of an engine with --merge through a fresh policy, and report the seconds "
        "beyond the base's own steps that its steps and switches took, the least that a switcher takes with "
        "knowledge of the future, and what both lose over switches that take no time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("journal", type=Path, metavar="JOURNAL", help="what --journal wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from manylora_lab.bench.picture import check_writable

    if args.out is not None:
        check_writable(args.out)
    report = report_of(args.journal)
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name:<{width}}  {'-' if value is None else value}")
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def report_of(path: Path) -> dict[str, float | None]:
    """``Hindsight.report`` of a journal. Raises ConfigError where it cannot be read, or has no merging."""
    from manylora.engine.journal import read_journal
    from manylora_lab.sim.clairvoyant import Clairvoyant
    from manylora_lab.sim.conformance import PolicyFailed, recorded_commands

    try:
        config, events = read_journal(path)
        if not config.merge.is_on:
            raise ConfigError(f"{path} is of an engine that merges nothing")
        if not config.merge.times.steps:
            raise ConfigError(f"{path} is of an engine that has not measured what merging gains")
        clairvoyant = Clairvoyant(config.merge)
        for told in recorded_commands(config, events):
            for command in told.commands:
                clairvoyant.told(command)
    except OSError as error:
        raise ConfigError(f"cannot read the journal {path}: {error.strerror}") from error
    except PolicyFailed as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return clairvoyant.hindsight().report()
