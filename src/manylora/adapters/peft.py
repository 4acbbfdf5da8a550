"""Reads a PEFT adapter's folder: the adapted modules, their ranks and scales, and whether they fit the base
model.

Reads adapter_config.json, the *header* of adapter_model.safetensors, and a few samples of the weights. The
tensors in the file decide which modules are adapted and at which rank; the configuration must agree with
them. Does not know pages. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from manylora.adapters.files import (
    CONFIG_NAME,
    FileStamp,
    adapter_files,
    adapters_fault,
    read_tensors,
    sampled_digest,
    stamp_of,
)
from manylora.adapters.loraconfig import read_config
from manylora.kernels.shapes import AdapterGeometry, Projection
from manylora.protocol.executor import AdapterError
from manylora.tensorfile import StoredTensor, shown
from manylora.text.texts import TEXT_FILES, Texts, read_base
from manylora.text.tokenizer import TokenizerError

Side = Literal["A", "B"]

_KEY = re.compile(
    r"(?P<prefix>base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?P<infix>\.default)?\.weight"
)

_HEAD = "lm_head"
_HEAD_LORA = "lm_head.lora_"

# Parts of the names of unsupported tensors, and what each is. The first match is reported, so the most specific
# come first.
_UNSUPPORTED_TENSORS = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "LoRA on an embedding"),
    ("trainable_tokens", "new or retrained tokens"),
    ("modules_to_save", "modules_to_save"),
    ("embed_tokens", "embeddings saved with the adapter (new tokens)"),
    (_HEAD, "output embeddings saved with the adapter (new tokens)"),
    ("lora_diag", "KaSA"),
    (".bias", "a bias (bias or lora_bias)"),
)  # fmt: skip

# VeLoRA keeps compressed activations for its backward pass; its forward pass is plain LoRA.
IGNORED_TENSORS = ("lora_velora_embed",)


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """The result of inspecting an adapter's folder, checked against a model. Plain data:
    ``from_json(to_json())``.

    ``ranks[p][l]``, ``scales[p][l]``: projection p (in the order of AdapterGeometry.projections) in layer l;
    rank 0 and scale 0 where it is not adapted. A projection that the model has once is at layer 0.
    ``weights``, ``config``: stamps of the two files at inspection. ``digest``: their ``sampled_digest``.
    ``warnings``: where the adapter is served differently from its maker's expectation.
    """

    path: str
    base_model: str | None
    weights: FileStamp
    config: FileStamp
    dtype: str
    rank: int
    use_rslora: bool
    modules: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    scales: tuple[tuple[float, ...], ...]
    layer_prefix: str
    key_prefix: str
    key_infix: str
    digest: str = ""
    warnings: tuple[str, ...] = ()

    def tensor_name(self, layer: int | None, projection: Projection, side: Side) -> str:
        """Return the name of a tensor in the file. ``layer``: None for a projection that the model has
        once."""
        prefix = "" if layer is None else f"{self.layer_prefix}.{layer}."
        return f"{self.key_prefix}{prefix}{projection.module}.lora_{side}{self.key_infix}.weight"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> AdapterSpec:
        """Parse the text that ``to_json`` wrote. Raises ValueError for other fields or other types."""
        try:
            # Decoded by json, not by msgspec: a path that is not UTF-8 contains lone surrogates.
            spec = msgspec.convert(json.loads(text), cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(str(error)) from error
        return dataclasses.replace(spec, ranks=_shared_rows(spec.ranks), scales=_shared_rows(spec.scales))


def text_files(folder: Path) -> list[Path]:
    """Return the files of a folder that concern text (tokenizer, chat template, generation settings)."""
    return [folder / name for name in TEXT_FILES if (folder / name).is_file()]


class TextCheck:
    """A check of an adapter's text files against the base model's folder and its tokenizer's folder. The
    base's tokenizer is loaded when an adapter first has text files."""

    def __init__(self, model: Path, tokenizer: Path) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @functools.cached_property
    def _texts(self) -> Texts:
        base = read_base(self.model, tokenizer_folder=self.tokenizer)
        return Texts(base, self.model, tokenizer_folder=self.tokenizer)

    def warnings(self, folder: Path) -> tuple[str, ...]:
        """Return warnings about the folder's text files. Raises AdapterError where they contradict the
        base's."""
        if not text_files(folder):
            return ()
        try:
            return self._texts.read(folder).warnings
        except TokenizerError as error:
            raise AdapterError(str(error)) from error


def inspect_adapter(
    path: Path,
    geometry: AdapterGeometry,
    layer_prefix: str,
    max_rank: int | None,
    texts: TextCheck | None = None,
) -> AdapterSpec:
    """Read an adapter's headers and check that it can be served on this model.

    ``layer_prefix``: the base model's name for its layers ("model.layers"). ``texts``: checks the adapter's
    text files; None: they are not checked. Raises only AdapterError: with status 404 where there is no such
    folder, else 400 with the exact reason. Takes a few seconds and some tens of MiB at most, whatever the
    files hold.
    """
    with adapters_fault():
        spec = _inspect(path, geometry, layer_prefix)
        if texts is not None:
            spec = dataclasses.replace(spec, warnings=(*spec.warnings, *texts.warnings(path)))
    check_rank(spec, max_rank)
    return spec


def _inspect(path: Path, geometry: AdapterGeometry, layer_prefix: str) -> AdapterSpec:
    config_path, weights_path = adapter_files(path)
    config_stamp, weights_stamp = stamp_of(config_path), stamp_of(weights_path)
    settings = read_config(config_path)
    layer_prefix = layer_prefix.rstrip(".")
    tensors = read_tensors(weights_path)
    if not geometry.model:
        _refuse_head(tensors, geometry.fixed_by)
    modules, key_prefix, key_infix = _lora_modules(tensors)
    known = dict(_places(geometry, layer_prefix))
    _refuse_unknown_modules(modules, known, geometry, layer_prefix)
    ranks = [[0] * geometry.page.layers for _ in geometry.projections]
    scales = [[0.0] * geometry.page.layers for _ in geometry.projections]
    adapted = [module for module in known if module in modules]
    checked = {name: _checked_rank(name, modules[name], known[name][2], tensors) for name in adapted}
    for module, stated in zip(adapted, settings.modules(adapted)):
        (layer, index, _), rank = known[module], checked[module]
        # Otherwise PEFT would compute something different.
        if not stated.is_target:
            fault = f"which its {CONFIG_NAME} does not target"
            raise AdapterError(f"the adapter has tensors for {module}, {fault}")
        if stated.rank != rank:
            raise AdapterError(f"{module} has rank {rank} by its tensors, {stated.rank} by {CONFIG_NAME}")
        ranks[index][layer] = rank
        scales[index][layer] = settings.scale(stated.alpha, rank)
    return AdapterSpec(
        path=os.path.abspath(path),
        base_model=settings.base_model,
        weights=weights_stamp,
        config=config_stamp,
        dtype="+".join(sorted({tensors[name].dtype for side in modules.values() for name in side.values()})),
        rank=max(max(row) for row in ranks),
        use_rslora=settings.use_rslora,
        modules=tuple(p.module for p, row in zip(geometry.projections, ranks) if any(row)),
        ranks=_shared_rows(ranks),
        scales=_shared_rows(scales),
        layer_prefix=layer_prefix,
        key_prefix=key_prefix,
        key_infix=key_infix,
        digest=sampled_digest(config_path, weights_path, tensors),
        warnings=settings.warnings,
    )


def check_rank(spec: AdapterSpec, max_rank: int | None) -> None:
    """Raise AdapterError when the adapter's largest rank is over the limit (None: no limit)."""
    if max_rank is not None and spec.rank > max_rank:
        raise AdapterError(f"the adapter has rank {spec.rank}, this server's largest is {max_rank}")


def _places(
    geometry: AdapterGeometry, layer_prefix: str
) -> Iterator[tuple[str, tuple[int, int, Projection]]]:
    """Yield every module that may be adapted: its name, and (layer, index, projection). The layers' modules
    come in layer and projection order, and then the model's, with layer 0."""
    indices = {projection: index for index, projection in enumerate(geometry.projections)}
    for layer, groups in enumerate(geometry.layers):
        for projection in (projection for group in groups for projection in group.projections):
            yield f"{layer_prefix}.{layer}.{projection.module}", (layer, indices[projection], projection)
    for projection in geometry.projections[geometry.num_layer_projections :]:
        yield projection.module, (0, indices[projection], projection)


def _refuse_head(tensors: dict[str, StoredTensor], fixed_by: str) -> None:
    """Raise AdapterError where a tensor is LoRA on the output head. ``fixed_by``: the option that excludes
    such adapters, if any."""
    for name in tensors:
        if _HEAD_LORA in name:
            beside = f" beside {fixed_by}" if fixed_by else ""
            raise AdapterError(f"tensor {shown(name)} is not supported{beside}: LoRA on lm_head")


def _lora_modules(tensors: dict[str, StoredTensor]) -> tuple[dict[str, dict[Side, str]], str, str]:
    """Group tensor names by module and side, and find the (prefix, infix) that all names share."""
    for part, kind in _UNSUPPORTED_TENSORS:
        for name in tensors:
            if part in name and not (part == _HEAD and _HEAD_LORA in name):
                raise AdapterError(f"tensor {shown(name)} is not supported: {kind}")
    modules: dict[str, dict[Side, str]] = {}
    forms = set()
    for name in tensors:
        if name.endswith(IGNORED_TENSORS):
            continue
        key = _KEY.fullmatch(name)
        if key is None:
            raise AdapterError(f"tensor {shown(name)} is not supported: not a LoRA weight")
        forms.add((key["prefix"] or "", key["infix"] or ""))
        modules.setdefault(key["module"], {})["A" if key["side"] == "A" else "B"] = name
    if not modules:
        raise AdapterError("the adapter holds no LoRA tensors")
    if len(forms) > 1:
        raise AdapterError("the tensor names mix several forms (with and without prefix or adapter name)")
    for module, sides in modules.items():
        if len(sides) < 2:
            there, missing = ("A", "B") if "A" in sides else ("B", "A")
            raise AdapterError(f"{shown(module)} has lora_{there} but no lora_{missing}")
    return modules, *forms.pop()


def _refuse_unknown_modules(
    modules: dict[str, dict[Side, str]], known: dict[str, Any], geometry: AdapterGeometry, layer_prefix: str
) -> None:
    unknown = [module for module in modules if module not in known]
    if not unknown:
        return
    pattern = re.compile(re.escape(layer_prefix) + r"\.(\d{1,9})\.(.+)")
    everywhere = [projection.module for projection in geometry.projections]
    supported, once = everywhere[: geometry.num_layer_projections], everywhere[geometry.num_layer_projections :]

    def order(module: str) -> tuple[int, int, str]:
        match = pattern.fullmatch(module)
        if match is None:
            return -1, 0, module
        return int(match[1]), supported.index(match[2]) if match[2] in supported else -1, module

    first = min(unknown, key=order)
    tensor = shown(modules[first]["A"])
    match = pattern.fullmatch(first)
    if match and f"{int(match[1])}" == match[1] and int(match[1]) < geometry.page.layers:
        own = [p.module for group in geometry.layers[int(match[1])] for p in group.projections]
        if match[2] in supported:
            raise AdapterError(
                f"the adapter does not fit: tensor {tensor} is for a module that layer {match[1]} of the base "
                f"model lacks; these can be adapted there: {', '.join(own)}"
            )
    elif match and match[2] in supported:
        raise AdapterError(
            f"the adapter does not fit: tensor {tensor} is for layer {match[1]}, "
            f"the base model has {geometry.page.layers} layers"
        )
    can = ", ".join([f"{layer_prefix}.N.[{', '.join(supported)}]", *once])
    raise AdapterError(
        f"the adapter does not fit: tensor {tensor} is for a module that the base model lacks or that "
        f"cannot be adapted; these can: {can}"
    )


def _checked_rank(
    module: str, names: dict[Side, str], projection: Projection, tensors: dict[str, StoredTensor]
) -> int:
    """Return the rank of a module after checking that its two tensors fit the base model's weight."""
    base = [projection.out_features, projection.in_features]
    for side in ("A", "B"):
        shape = list(tensors[names[side]].shape)
        if len(shape) != 2 or 0 in shape:
            raise AdapterError(
                f"tensor {names[side]} has shape {shape}, not two positive dimensions "
                "(weights saved without gathering their shards?)"
            )
        fits, form = (
            (shape[1] == base[1], f"[rank, {base[1]}]")
            if side == "A"
            else (shape[0] == base[0], f"[{base[0]}, rank]")
        )
        if not fits:
            raise AdapterError(
                f"the adapter does not fit: tensor {names[side]} has shape {shape}, but the base model's "
                f"{module} has shape {base} and needs {form}"
            )
    rank, rank_b = tensors[names["A"]].shape[0], tensors[names["B"]].shape[1]
    if rank != rank_b:
        raise AdapterError(f"{module}: lora_A has rank {rank}, lora_B has rank {rank_b}")
    return rank


def _shared_rows(rows: Any) -> tuple[tuple[Any, ...], ...]:
    """Return rows as tuples, equal rows as one object, so that thousands of specs stay small."""
    seen: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    return tuple(seen.setdefault(row, row) for row in map(tuple, rows))
