"""Scripts that train the demo model. Order: tokenizer, base, adapters, curves."""
