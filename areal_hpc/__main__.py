"""The `areal-hpc` command, which `python -m areal_hpc` is too."""

import signal
import sys


def main() -> None:
    try:
        from areal_hpc.cli.main import main as run_command  # takes a while: Ctrl-C may come then

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
