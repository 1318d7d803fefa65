"""Places in which a foreground launcher starts jobs."""
