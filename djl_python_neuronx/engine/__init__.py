"""The engine: continuous batching over one backend, and the threads around it."""
