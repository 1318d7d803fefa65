"""`areal-hpc proxy`: the recording proxy without a run."""

import argparse
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup
from areal_hpc.errors import RecipeError


def add_commands(commands: CommandGroup) -> None:
    proxy = commands.add_command(
        "proxy",
        _run_standalone_proxy,
        help="run the recording proxy without training",
        description="Serve the recording OpenAI-compatible endpoint in front of running SGLang "
        "servers. SIGTERM or Ctrl-C finishes open calls, then exits.",
        example="areal-hpc proxy --upstream http://127.0.0.1:30000 --tokenizer MODEL_DIR "
        "--port 8080 --admin-key-file my.key",
    )
    add = proxy.add_argument
    upstream = "address of an SGLang server; may be repeated"
    add("--upstream", action="append", required=True, metavar="URL", help=upstream)
    tokenizer = "directory of the model, or of its tokenizer alone"
    add("--tokenizer", type=Path, required=True, metavar="DIR", help=tokenizer)
    add("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    add("--port", type=int, required=True, help="port to listen on; 0 takes a free one")
    admin_key = "file with the admin key that opens sessions (created with mode 0600 if missing)"
    add("--admin-key-file", type=Path, required=True, metavar="FILE", help=admin_key)
    add("--tool-call-parser", metavar="NAME", help="SGLang tool-call parser, for example qwen25")
    add("--reasoning-parser", metavar="NAME", help="SGLang reasoning parser, for example qwen3")
    journal = "directory of the journal, so that sessions survive a restart"
    add("--journal", type=Path, metavar="DIR", help=journal)
    add("--context-length", type=int, metavar="N", help="maximum prompt plus reply, in tokens")
    serve_python = "Python environment with SGLang, for its parsers"
    add("--serve-python", default="auto", metavar="PATH", help=serve_python)
    drain = "seconds to wait for open calls at shutdown (%(default)s)"
    add("--drain-timeout-s", type=int, default=30, metavar="S", help=drain)
    key = "a limit, such as request_timeout_s=60 or max_sessions=100; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=key)


def _run_standalone_proxy(arguments: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from areal_hpc.jobs.environment import get_interpreter
    from areal_hpc.jobs.processes.process_setup import EscapingFormatter
    from areal_hpc.proxy.standalone import StandaloneProxyConfig, run
    from areal_hpc.recipe.base import explain_validation_errors

    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    given = vars(arguments)
    values = {name: given[name] for name in StandaloneProxyConfig.model_fields.keys() & given}
    values["upstreams"] = arguments.upstream
    values["serve_python"] = get_interpreter("serve", arguments.serve_python)
    values["proxy"] = dict(pair.partition("=")[::2] for pair in arguments.set)
    try:
        config = StandaloneProxyConfig.model_validate(values)
    except ValidationError as error:
        found = explain_validation_errors(error.errors(), StandaloneProxyConfig)
        raise RecipeError.from_problems(
            one if one.key.startswith("proxy.") else replace(one, hint="areal-hpc proxy --help")
            for one in found
        ) from error
    run(config, partial(print, flush=True))
    return 0
