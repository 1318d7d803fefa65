"""Program that sets limits on itself and becomes another one, within a sandbox.

Stands alone, with the standard library only: `launcher.py JSON PYTHON SCRIPT`.
"""

import json
import math
import os
import resource
import sys


def main() -> None:
    """Set the limits, say so by one byte, and become the program."""
    limits = json.loads(sys.argv[1])
    set_resource_limits(limits)
    os.write(limits["report_fd"], b"1")
    os.close(limits["report_fd"])
    os.execv(sys.argv[2], [sys.argv[2], "-I", *sys.argv[3:]])


def set_resource_limits(limits: dict[str, float]) -> None:
    """Time of a processor, memory, files and processes of this process and its children."""
    cpu_s = math.ceil(limits["time_s"])
    for which, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, int(limits["memory_bytes"]), int(limits["memory_bytes"])),
        (resource.RLIMIT_FSIZE, int(limits["output_bytes"]), int(limits["output_bytes"])),
        (resource.RLIMIT_NPROC, int(limits["processes"]), int(limits["processes"])),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


if __name__ == "__main__":
    main()
