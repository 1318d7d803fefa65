"""SGLang servers of one cell, which generate tokens. Start with `job.py`."""
