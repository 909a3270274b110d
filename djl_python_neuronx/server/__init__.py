"""HTTP server for machines without DJL Serving. Needs the `server` extra."""
