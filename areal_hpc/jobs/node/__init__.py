"""Hardware of a node: its GPUs, how they and the network are connected, and a probe of it."""
