"""Rules and arguments of transformers-neuronx."""
