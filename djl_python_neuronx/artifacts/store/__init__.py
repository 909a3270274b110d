"""What was compiled: found, proved to fit, and reused."""
