"""Report on runs as one HTML file that needs nothing else: `areal-hpc report`."""
