"""The models room: what a base model's folder says, and the decoder that it becomes.

``config``, ``source`` and the family files load no torch; ``load`` turns a folder into a ``Decoder``.
"""
