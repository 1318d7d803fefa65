"""SGLang's own server, with keys that no command line shows, and scoring while it is paused.

SGLang spawns its schedulers, which import this module as `__mp_main__`.
This module runs in SGLang's environment and imports nothing that is missing there.
"""

import os
import sys

from areal_hpc.inference.server.paused_scoring import install_paused_scoring
from areal_hpc.inference.server.server_keys import consume_keys_file_as_arguments


def main() -> None:
    """Serve until told to stop."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args([*sys.argv[1:], *consume_keys_file_as_arguments()]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):
    install_paused_scoring()
if __name__ == "__main__":
    main()
