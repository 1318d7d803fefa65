"""Entry of the command `areal-hpc` and of `python -m areal_hpc`."""

import signal
import sys


def main() -> None:
    try:
        from areal_hpc.cli.main import main as run_command  # slow: Ctrl-C may come during it

        run_command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
