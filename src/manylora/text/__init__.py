"""Turns text into token ids and back: tokenizer, chat templates, stop strings, text generation.

Knows an engine only as an ``EngineClient``; knows no HTTP, no torch and no transformers.
"""
