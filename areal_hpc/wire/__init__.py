"""WIRE: the HTTP schemas and clients through which roles meet; the fault points of tests."""
