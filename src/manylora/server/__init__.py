"""The OpenAI-compatible HTTP server: routes, wire shapes, limits, life cycle.

Knows an engine only as an ``EngineClient`` and text only through ``manylora.text``.
"""
