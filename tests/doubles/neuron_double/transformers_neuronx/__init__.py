"""Stands in for the library where only its being installed counts."""
