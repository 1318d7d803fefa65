"""Model families: their sizes, and the names of their weights."""
