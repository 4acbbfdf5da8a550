"""Serves the OpenAI-compatible HTTP API: routes, wire shapes, limits, life cycle.

Knows an engine only as an ``EngineClient`` and text only through ``manylora.text``.
"""
