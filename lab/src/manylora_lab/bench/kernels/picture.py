"""``kernels.png``: rooflines, times over floors, and LoRA by popularity, rank and batch. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from manylora.config.declaring import ConfigError
from manylora_lab.bench.kernels.settings import POPULARITIES
from manylora_lab.bench.picture import check_plot

Row = dict[str, Any]


def check_folder(folder: Path) -> None:
    """Make it; raises ConfigError where nothing could be written there, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    check_plot(folder / "kernels.png")


def draw(document: dict[str, Any], path: Path) -> None:
    """Panels of kernels that were not measured stay empty. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: list[Row] = [row for row in document["rows"] if row["us"] is not None and row["us"] > 0]
    figure = Figure(figsize=(17, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{document['machine']}: {document['shape']}, {document['kernels']} kernels, {document['dtype']}",
        fontsize=10,
    )
    axes = figure.subplots(2, 4)
    others = [row for row in rows if row["flop"] and row["kernel"] != "lora"]
    decoding = [row for row in rows if row["kernel"] == "lora" and "prompt" not in row]
    rank = (
        16
        if any(row["rank"] == 16 for row in decoding)
        else max((row["rank"] for row in decoding), default=0)
    )
    of_rank = [row for row in decoding if row["rank"] == rank]
    _roofline(axes[0, 0], "products and attention", others, "kernel", document)
    _roofline(axes[0, 1], f"LoRA, rank {rank}, by popularity", of_rank, "popularity", document)
    _ratios(axes[0, 2], "products and attention: time over floor", others)
    _ratios(axes[0, 3], "the rest: time over floor", [row for row in rows if not row["flop"]])
    for axis, popularity in zip(axes[1], POPULARITIES, strict=True):
        _by_rank(axis, popularity, [row for row in decoding if row["popularity"] == popularity])
    if decoding:
        shown = [row[name] for row in decoding for name in ("us", "floor_us")]
        for axis in axes[1]:
            axis.set_ylim(min(shown) / 1.5, max(shown) * 1.5)
    figure.savefig(path, dpi=100)


def _values(rows: Iterable[Row], of: Callable[[Row], Any]) -> list[Any]:
    return list(dict.fromkeys(map(of, rows)))


def _roofline(axis: Any, title: str, rows: Sequence[Row], series: str, document: dict[str, Any]) -> None:
    """Operations a second over operations a byte, under what was measured of memory and arithmetic."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("FLOP/s")
    axis.grid(alpha=0.3)
    if not rows:
        return
    for name in _values(rows, lambda row: row[series]):
        points = [
            (row["flop"] / row["bytes"], row["flop"] / row["us"] * 1e6) for row in rows if row[series] == name
        ]
        axis.plot([x for x, _ in points], [y for _, y in points], "o", markersize=3, alpha=0.7, label=name)
    intensities = [row["flop"] / row["bytes"] for row in rows]
    ends = [min(intensities) * 0.7, max(intensities) * 1.4]
    axis.plot(ends, [x * document["bytes_per_s"] for x in ends], "k:", label="memory bandwidth")
    axis.axhline(document["flops"], color="k", linestyle="--", linewidth=1, label="matrix product")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.legend(fontsize=7)


def _ratios(axis: Any, title: str, rows: Sequence[Row]) -> None:
    from matplotlib import colormaps

    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens, or rows of attention")
    axis.grid(alpha=0.3)
    if not rows:
        return

    def line_of(row: Row) -> str:
        return " ".join(
            [row["kernel"], *(row[name] for name in ("product", "rows", "sampler") if name in row)]
        )

    axis.set_prop_cycle(color=colormaps["tab20"](range(20)))  # more lines than the usual ten
    for name in _values(rows, line_of):
        points = sorted(
            (row.get("batch", row.get("tokens")), row["ratio"]) for row in rows if line_of(row) == name
        )
        axis.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
    axis.axhline(1, color="k", linestyle="--", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.legend(fontsize=6)


def _by_rank(axis: Any, popularity: str, rows: Sequence[Row]) -> None:
    """What a layer's adapters add, and dotted, its floor."""
    axis.set_title(f"LoRA, {popularity}", fontsize=10)
    axis.set_xlabel("batch")
    axis.set_ylabel("us added to a layer")
    axis.grid(alpha=0.3)
    for rank in _values(rows, lambda row: row["rank"]):
        of_rank = [row for row in rows if row["rank"] == rank]
        batches = [row["batch"] for row in of_rank]
        (line,) = axis.plot(batches, [row["us"] for row in of_rank], marker=".", label=f"rank {rank}")
        axis.plot(batches, [row["floor_us"] for row in of_rank], ":", color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if rows:
        axis.legend(fontsize=7)
