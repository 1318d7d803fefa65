"""HTTP schemas (some are formats of files too) and clients of the services; fault points."""
