"""N equal processes that are one executor: each an ordinary worker on its share of the model (S-LoRA §6).

``start`` makes them, ``executor`` is the door to them, ``process`` is one of them, ``wire`` is what they say.
"""
