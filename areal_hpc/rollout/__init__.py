"""DRIVE: runs the user's agent against the proxy and reports what it earned."""
