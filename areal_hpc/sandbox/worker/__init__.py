"""Program of others' scorers and gyms: the standard library, and what it is to run."""
