"""Program that lets SGLang parse command lines, to find unknown options.

Input and output are JSON. It runs in SGLang's environment, and needs no GPU.
"""

import argparse
import json
import sys
from typing import Any, NoReturn

import areal_hpc.inference.cpu.sglang_cpu  # noqa: F401  # stand-ins for modules that need a GPU

# isort: split
from sglang.srt.server_args import ServerArgs


class _RaisingArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check_sglang_command_lines(lines: list[list[str]]) -> dict[str, Any]:
    """Return SGLang's known options, and of each line its unknown words and the parser's error."""
    parser = _RaisingArgumentParser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    known = sorted(option for action in parser._actions for option in action.option_strings)
    readings = []
    for words in lines:
        try:
            readings.append({"unknown": parser.parse_known_args(words)[1], "complaint": ""})
        except ValueError as error:
            readings.append({"unknown": [], "complaint": str(error)})
    return {"known": known, "readings": readings}


def main() -> None:
    sys.stdout.write(json.dumps(check_sglang_command_lines(json.load(sys.stdin))) + "\n")


if __name__ == "__main__":
    main()
