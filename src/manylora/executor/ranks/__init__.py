"""Runs N equal processes as one executor, each an ordinary worker on its share of the model (S-LoRA §6).

``start`` starts the processes, ``executor`` connects the driver to them, ``process`` is the program of each
rank, and ``wire`` defines their messages.
"""
