"""Every setting and seed of the demo model, read from `demo/recipe.json`.

The scripts hold no numbers of their own: what is committed in the recipe is what was run.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parent.parent
MODEL = DEMO / "model"
ADAPTERS = DEMO / "adapters"
CURVES = DEMO / "curves"

BASE_NAME = "manylora-demo"
"""What the adapters name as their base: a name, never a path of the machine that trained them."""


@dataclass(frozen=True)
class Shares:
    """Which part of a domain each split gets; the adapter's split is what the others leave."""

    held_out: float
    validation: float
    base: float


@dataclass(frozen=True)
class Recipe:
    """The settings of one whole run."""

    seed: int
    shares: dict[str, Shares]
    tokenizer: dict[str, Any]
    architecture: dict[str, Any]
    base: dict[str, Any]
    adapter_defaults: dict[str, Any]
    adapters: dict[str, dict[str, Any]]

    def adapter(self, name: str) -> dict[str, Any]:
        """The settings of one adapter, defaults filled in."""
        return self.adapter_defaults | self.adapters[name]


def load_recipe(path: Path = DEMO / "recipe.json") -> Recipe:
    """Read the recipe; an unknown or missing section is an error."""
    raw = json.loads(path.read_text())
    shares = {domain: Shares(**parts) for domain, parts in raw.pop("shares").items()}
    return Recipe(shares=shares, **raw)


def write_json(path: Path, value: object) -> None:
    """Write JSON that reads well in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
