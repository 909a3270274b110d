"""Serves large language models on AWS Inferentia2 and Trainium, or on a CPU."""
