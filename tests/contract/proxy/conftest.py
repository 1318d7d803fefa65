"""Lets these tests use the tokenizer that the unit tests of sessions make."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "session"))
