"""Programs of others against the server, as their users run them."""
