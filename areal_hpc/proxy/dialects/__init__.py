"""One module per HTTP dialect an agent may speak."""
