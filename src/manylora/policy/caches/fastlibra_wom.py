"""FastLibra's ablation without its dependency tree (-WOM)."""

from __future__ import annotations

from manylora.policy.caches.fastlibra import FastLibra


class FastLibraWithoutDependencies(FastLibra):
    """The cache may hold invalid KV on the device, and never uses it."""

    name = "fastlibra-wom"
    keeps_dependencies = False
