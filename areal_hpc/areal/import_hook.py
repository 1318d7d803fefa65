"""Import hook that answers `import areal...` with `areal_hpc.areal...`.

For code whose imports cannot be edited, and always explicit: `python -m areal_hpc.areal script.py`
(or `-m module`) runs a script with it, `import areal_hpc.areal.import_hook` installs it for the
process.
"""

from areal_hpc.areal.names import answer_imports_of_areal

answer_imports_of_areal()
