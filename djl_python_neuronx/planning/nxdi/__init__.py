"""Rules and arguments of NxD Inference."""
