"""Dashboard: runs of a file root as pages of a browser, read from their files alone."""
