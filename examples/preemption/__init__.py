"""A run that is stopped in the middle, and goes on."""
