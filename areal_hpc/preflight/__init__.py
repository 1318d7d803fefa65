"""CHECK: is this cluster fit for a run? Asked on the login node, before anything is submitted."""
