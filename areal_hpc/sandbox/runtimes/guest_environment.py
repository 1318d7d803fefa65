"""What every sandbox has: a working folder, variables, accounts."""

from areal_hpc.sandbox.bubblewrap_command_line import NOBODY_UID

WORK_DIR = "/workspace"
"""Working and home directory of commands, at first empty."""
GUEST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORK_DIR,
    "LC_ALL": "C.UTF-8",
    "TMPDIR": "/tmp",
    "USER": "nobody",
}
GUEST_ETC_FILES = {
    "passwd": f"nobody:x:{NOBODY_UID}:{NOBODY_UID}:nobody:{WORK_DIR}:/bin/sh\n",
    "group": f"nogroup:x:{NOBODY_UID}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
"""Of a sandbox that shows this machine's programs: its accounts are nobody's business."""
