"""Clients: what sends requests, and what it must get."""
