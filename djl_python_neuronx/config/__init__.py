"""Options: where they come from, what they mean, what they default to."""
