"""Model folders that lie elsewhere: fetched once, whole or not at all."""
