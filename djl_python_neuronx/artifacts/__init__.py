"""Model folders: fetching, formats, tokenizers, conversion, compiled files."""
