"""Appends numbered records to the journal `argv[1]`, rotating now and then, until killed.

Acknowledges each record on standard output once `append` has returned.
"""

import itertools
import os
import sys
from pathlib import Path

from areal_hpc.shards.journal import JournalWriter


def main() -> None:
    writer = JournalWriter(Path(sys.argv[1]), sync_interval_s=0.001)
    for number in itertools.count():
        writer.append(number, b"%d" % number * (number % 4000))
        os.write(1, b"%d\n" % number)
        if number % 25 == 24:
            writer.rotate(lambda record: True)


if __name__ == "__main__":
    main()
