"""Everything that decides: a pure state machine over ints and tuples. No clock, no randomness, no tensors."""
