"""The other side of an online run: a program that people talk to."""
