"""Ablations and baselines of the papers, which the product finds by name where the laboratory is there.

Owns their names, each once, with where its class is. ``pyproject.toml`` names ``POLICIES`` as an entry point.
"""

from __future__ import annotations

from manylora.config.merging import MERGE_MODES
from manylora.config.policy import CACHE_POLICIES
from manylora.config.routing import ROUTERS

_HERE = "manylora_lab.baselines"

POLICIES = {
    "cache": {
        "fastlibra-wom": f"{_HERE}.caches:WithoutDependencies",
        "fastlibra-wos": f"{_HERE}.caches:WithoutValue",
        "fastlibra-wol": f"{_HERE}.caches:WithoutReward",
        "fastlibra-pages": f"{_HERE}.caches:Pages",
        "fastlibra-pages-wom": f"{_HERE}.caches:PagesWithoutDependencies",
        "fastlibra-pages-wos": f"{_HERE}.caches:PagesWithoutValue",
        "fastlibra-pages-wol": f"{_HERE}.caches:PagesWithoutReward",
    },
    "router": {
        "random": f"{_HERE}.routers:RandomReplica",
        "most-idle": f"{_HERE}.routers:MostIdle",
        "first-fit": f"{_HERE}.routers:FirstFit",
        "dlora-rr": f"{_HERE}.routers:DloraRoundRobin",
        "dlora-authors": f"{_HERE}.routers:DloraAuthors",
    },
    "merge": {"merged": f"{_HERE}.merged:AlwaysMerged"},
}
"""By kind and name: ``module:Class``."""

ALL_CACHE_POLICIES = (*CACHE_POLICIES, *POLICIES["cache"])
ALL_ROUTERS = (*ROUTERS, *POLICIES["router"])
ALL_MERGE_MODES = (*MERGE_MODES, *POLICIES["merge"])
"""The product's and these."""
