"""WIRE: the HTTP schemas and clients through which roles meet."""
