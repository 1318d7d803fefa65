"""`python -m areal_hpc` is the `areal-hpc` command."""

from areal_hpc.cli.main import main

if __name__ == "__main__":
    main()
