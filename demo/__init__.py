"""The demo model that ships with manylora: its texts, its training and its files."""
