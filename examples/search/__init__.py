"""An agent that looks things up in a local index."""
