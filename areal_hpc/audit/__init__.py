"""CHECK: what became of every ticket, judged from the run directory alone."""
