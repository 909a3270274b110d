"""Options: their sources, definitions and defaults."""
