"""From settings to a model that is ready to load."""
