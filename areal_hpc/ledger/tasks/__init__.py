"""Tasks of a run: which one each ticket is of, drawn in order or by a curriculum."""
