"""Deployment beyond the package: what calls the APIs of a cloud."""
