"""Import hook that resolves `import areal...` to `areal_hpc.areal...`.

It is for code whose imports cannot be edited, and must be requested: `python -m areal_hpc.areal
script.py` (or `-m module`) runs a script with it, and `import areal_hpc.areal.import_hook` installs
it for the process.
"""

from areal_hpc.areal.names import answer_imports_of_areal

answer_imports_of_areal()
