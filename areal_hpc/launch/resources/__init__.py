"""Resources of a run: GPUs of each process, shares of a node, memory of GPUs and hosts."""
