"""A profile: what steps, copies and reads took on one machine with one model, as ``manylora profile`` measured it.

Owns the file's form (JSON), its checks, and the refusal of a profile of something else; ``pricing.fit`` makes
costs of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from manylora.config.declaring import LARGEST_NUMBER, ConfigError, check_rules
from manylora.config.policy import PipelineDepth
from manylora.config.sections import LORA_SHARDINGS
from manylora_lab.pricing.costs import EVEN, Spread
from manylora_lab.pricing.ranks import RankLines
from manylora_lab.pricing.shapes import ModelShape

FORMAT = "manylora-profile-3"
UNCOLD_FORMAT = "manylora-profile-2"
"""The form without cold starts. Still read."""
ALONE_FORMAT = "manylora-profile-1"
"""The form for steps run one by one, without an engine around them: an engine's own take longer. Still read."""

_UNTOLD_PIPELINE_DEPTH = {"cpu": 1, "cuda": 2}
"""The depth of profiles that do not tell theirs: the default of the engines they are from."""


def _check_numbers(point: Any) -> None:
    for field in dataclasses.fields(point):
        value = getattr(point, field.name)
        if not 0 <= value <= LARGEST_NUMBER:
            raise ConfigError(f"{field.name} must be a number from 0 to {LARGEST_NUMBER}")
    if not point.seconds > 0:
        raise ConfigError("seconds must be more than 0")


@dataclasses.dataclass(frozen=True, slots=True)
class StepPoint:
    """Batches that are alike, and the mean of their times. The numbers are those of ``costs.StepWork``.

    ``is_held_out``: kept from the fit, to tell its error. ``num_steps``: how many steps it is the mean of.
    """

    num_decodes: int
    num_prefill_tokens: int
    num_kv_tokens: int
    adapter_bytes: int
    num_adapters: int
    num_prefill_pairs: int
    adapter_token_bytes: int
    seconds: float
    is_held_out: bool = False
    num_steps: int = 1

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, got {self.num_steps}")


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPoint:
    """One copy between the tiers, or one read of an adapter from its source, alone on the machine.

    ``to_device``: whether its destination is the device's pages.
    """

    to_device: bool
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, slots=True)
class OverheadPoint:
    """The engine's mean time between a step and the next one, of so many rows. ``num_new``: of sequences that it
    takes up; 0 in older profiles, which do not count them."""

    num_rows: int
    seconds: float
    num_new: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, slots=True)
class SwitchPoint:
    """A change of what is merged into the base's weights: from an adapter, or from the base's own weights, to
    another adapter or back. ``on_host``: the pristine weights come from host memory. ``num_bytes``: of the weights
    that may be merged into."""

    from_adapter: bool
    to_adapter: bool
    on_host: bool
    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ModePoint:
    """A step with one adapter of ``adapter_bytes`` on all rows, as an engine measures it before serving: unmerged
    (``seconds``), and with that adapter merged."""

    num_rows: int
    num_tokens: int
    adapter_bytes: int
    seconds: float
    merged_s: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not self.merged_s > 0:
            raise ConfigError("merged_s must be more than 0")
        if self.num_rows < 1 or self.num_tokens < self.num_rows:
            raise ConfigError("a step has at least one row, and a token for each")


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPoint:
    """An adapter's product of one layer that ``num_workers`` CPU workers share: ``adapter_bytes`` of its rows
    there, and seconds of the busiest one. ``is_held_out``: kept from the fit, to tell its error."""

    num_tokens: int
    adapter_bytes: int
    num_workers: int
    seconds: float
    is_held_out: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.num_tokens < 1 or self.num_workers < 1 or self.adapter_bytes < 1:
            raise ConfigError("a product has at least a token, a byte and a worker")


@dataclasses.dataclass(frozen=True, slots=True)
class ExchangePoint:
    """A sum over all ranks, each of which puts in so many bytes."""

    num_bytes: int
    seconds: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, slots=True)
class GatePoint:
    """What a copy to the device of ``num_bytes``, in layer groups, costs the step that awaits it, beside what that
    stands still for it: ``issue_s`` before the step, for its command; ``seconds`` of the step, which shares the
    host with the copy's threads."""

    num_bytes: int
    issue_s: float
    seconds: float

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """All of one run. ``versions``: of what was measured with; ``adapter_modules``: what its adapters adapt.
    ``wakes``: steps after the engine had been idle (``costs.IDLE_S``), which ``steps`` are not; older profiles
    do not tell them apart. ``answer_s``: from a step's end until the client has its token; ``copy_drag``,
    ``spread``: see ``costs.StepCosts``. Older profiles have neither of these three: 0, and no spread.
    ``pipeline_depth``: of the engine that was watched; older profiles do not tell it (``steps_in_flight``).
    ``switches``, ``modes``: of merging, where it was measured. ``ranks``: steps by the ranks of
    their adapters. Older profiles have none of these. ``tensor_parallel_size``: ranks of the engine that was
    watched, ``lora_sharding``: how adapters were cut among them; ``exchanges``: sums over them. Older profiles are
    of one rank, which has neither. Of cold starts ``cores``: of the machine; ``cpu_products``; ``handover_s``: of
    one product to the CPU workers and back, beside what these compute, of ``num_products`` a step;
    ``group_shares``: of a step's time by layer groups. Older profiles, and those of several ranks, have none of
    these. ``gates``: of an engine whose steps may await copies, uncaptured."""

    format: str
    machine: str
    model: ModelShape
    fingerprint: str
    dtype: str
    page_tokens: int
    adapter_modules: tuple[str, ...]
    reads_at_once: int
    versions: dict[str, str]
    commit: str
    steps: tuple[StepPoint, ...]
    copies: tuple[TransferPoint, ...]
    reads: tuple[TransferPoint, ...]
    overheads: tuple[OverheadPoint, ...]
    wakes: tuple[StepPoint, ...] = ()
    answer_s: float = 0.0
    copy_drag: float = 0.0
    spread: Spread = EVEN
    pipeline_depth: PipelineDepth | None = None
    switches: tuple[SwitchPoint, ...] = ()
    modes: tuple[ModePoint, ...] = ()
    ranks: RankLines | None = None
    tensor_parallel_size: int = 1
    lora_sharding: str = ""
    exchanges: tuple[ExchangePoint, ...] = ()
    cores: int = 0
    cpu_products: tuple[CpuPoint, ...] = ()
    handover_s: float = 0.0
    num_products: int = 0
    group_shares: tuple[float, ...] = ()
    gates: tuple[GatePoint, ...] = ()

    def __post_init__(self) -> None:
        formats = (FORMAT, UNCOLD_FORMAT, ALONE_FORMAT)
        if self.format not in formats:
            raise ConfigError(f"its format is {self.format!r}, not one of {', '.join(formats)}")
        if self.cpu_products and len({point.is_held_out for point in self.cpu_products}) < 2:
            raise ConfigError("some of its cpu_products must be held out, and some not")
        for name in ("cores", "num_products"):
            if not 0 <= getattr(self, name) <= LARGEST_NUMBER:
                raise ConfigError(f"{name} must be a number from 0 to {LARGEST_NUMBER}")
        if not all(0 < share < 1 for share in self.group_shares):
            raise ConfigError("each of group_shares must lie between 0 and 1")
        if self.fingerprint != self.model.fingerprint:
            raise ConfigError(f"its fingerprint {self.fingerprint} is not that of its model, {self.model}")
        for name in ("reads_at_once", "page_tokens", "tensor_parallel_size"):
            if not 1 <= getattr(self, name) <= LARGEST_NUMBER:
                raise ConfigError(f"{name} must be a number from 1 to {LARGEST_NUMBER}")
        if self.tensor_parallel_size == 1 and (self.lora_sharding or self.exchanges):
            raise ConfigError("it is of one rank, which shares and exchanges nothing")
        if self.lora_sharding not in ("", *LORA_SHARDINGS):
            raise ConfigError(
                f"lora_sharding must be one of {', '.join(LORA_SHARDINGS)}, got {self.lora_sharding!r}"
            )
        if not self.adapter_modules:
            raise ConfigError("it names no adapter_modules: what its adapters adapt")
        for name in ("copies", "reads"):
            ways = {point.to_device for point in getattr(self, name)}
            if len(ways) < 2:
                raise ConfigError(f"its {name} must go both to the device and to the host")
        for name in ("answer_s", "copy_drag", "handover_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a number from 0, got {getattr(self, name)}")
        check_rules(self)
        if not self.overheads:
            raise ConfigError("it names no overhead")
        if not any(point.is_held_out for point in self.steps):
            raise ConfigError("none of its steps is held out")
        if all(point.is_held_out for point in self.steps):
            raise ConfigError("all of its steps are held out")

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The profile's device, by the machine's name."""
        return "cpu" if self.machine.startswith("cpu") else "cuda"

    @property
    def steps_in_flight(self) -> int:
        """At most, in the engine that was watched: with two, the host's time between steps is hidden in steps."""
        return self.pipeline_depth or _UNTOLD_PIPELINE_DEPTH[self.kind]

    def expect(
        self,
        model: ModelShape | None = None,
        machine: str | None = None,
        tensor_parallel_size: int | None = None,
    ) -> None:
        """Raise ConfigError, with both names, where it is of another model, machine or tensor-parallel size."""
        if model is not None and model.fingerprint != self.fingerprint:
            raise ConfigError(f"the profile is of {self.model} and does not fit {model}")
        if machine is not None and machine != self.machine:
            raise ConfigError(f"the profile is of the machine {self.machine!r}, not of {machine!r}")
        mine, asked = self.tensor_parallel_size, tensor_parallel_size
        if asked not in (None, mine):
            raise ConfigError(f"the profile is of tensor-parallel size {mine}, not of {asked}")


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """Points in a file: the names of their fields once, and their values."""

    columns: list[str]
    rows: list[list[int | float | bool]]

    def points(self, name: str) -> list[dict[str, int | float | bool]]:
        """By field; raises ConfigError with the table's name."""
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ConfigError(f"{name}[{number}] has {len(row)} values for {len(self.columns)} columns")
        return [dict(zip(self.columns, row)) for row in self.rows]


def load_profile(path: Path) -> Profile:
    """Read a profile; raises ConfigError, in one line that names the file."""
    try:
        return profile_of(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"the profile {path} is not valid: {error}") from error


def profile_of(data: bytes) -> Profile:
    """A profile from its file's bytes. Points are tables, or, in older files, one object each."""
    fields = msgspec.json.decode(data)
    if isinstance(fields, dict):
        for name, value in fields.items():
            if isinstance(value, dict) and set(value) == {"columns", "rows"}:
                fields[name] = msgspec.convert(value, _Table).points(name)
    return msgspec.convert(fields, Profile)


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile, one point a line; raises ConfigError where it cannot be written."""
    lines = []
    for name, value in msgspec.to_builtins(profile).items():
        if value and isinstance(value, list | tuple) and isinstance(value[0], dict):
            rows = ",\n   ".join(json.dumps(list(row.values()), separators=(",", ":")) for row in value)
            columns = json.dumps(list(value[0]))
            lines.append(f' "{name}": {{"columns": {columns}, "rows": [\n   {rows}\n ]}}')
        else:
            lines.append(f' "{name}": {json.dumps(value)}')
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error
