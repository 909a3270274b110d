"""What is in a model folder: its format, its facts and its tokenizer."""
