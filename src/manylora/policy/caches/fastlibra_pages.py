"""FastLibra's policy and its ablations with nodes of one page: KV moves a page at a time, as in every other policy
here."""

from __future__ import annotations

from manylora.policy.caches.fastlibra import FastLibra
from manylora.policy.caches.fastlibra_wol import FastLibraWithoutReward
from manylora.policy.caches.fastlibra_wom import FastLibraWithoutDependencies
from manylora.policy.caches.fastlibra_wos import FastLibraWithoutValue


class FastLibraPages(FastLibra):
    """A page of KV is worth what a page costs, so that an adapter of many pages outweighs any."""

    name = "fastlibra-pages"
    keeps_turns = False


class FastLibraPagesWithoutDependencies(FastLibraWithoutDependencies):
    """-WOM by pages."""

    name = "fastlibra-pages-wom"
    keeps_turns = False


class FastLibraPagesWithoutValue(FastLibraWithoutValue):
    """-WOS by pages: a plain LRU that frees pages ahead of demand."""

    name = "fastlibra-pages-wos"
    keeps_turns = False


class FastLibraPagesWithoutReward(FastLibraWithoutReward):
    """-WOL by pages."""

    name = "fastlibra-pages-wol"
    keeps_turns = False
