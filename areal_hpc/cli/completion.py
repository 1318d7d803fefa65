"""`areal-hpc completion`: completion scripts of shells, made from the command line's own parser."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from areal_hpc.cli.arguments import CommandGroup, find_subparsers

SHELLS = ("bash", "zsh")


@dataclass(frozen=True, slots=True)
class CommandCompletions:
    help: str
    words: tuple[str, ...]
    """Its options, and the names of its actions."""
    takes_keys: bool


def add_commands(commands: CommandGroup) -> None:
    completion = commands.add_command(
        "completion",
        _print_completion_script,
        help="print a completion script for a shell",
        description="Print a script that completes commands, options and recipe keys.",
        example='eval "$(areal-hpc completion bash)"\n'
        "areal-hpc completion zsh > ~/.zfunc/_areal-hpc",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell that will read it")


def _print_completion_script(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.reference import list_keys

    commands = dict(_list_command_completions(arguments.all_commands))
    # A key with `<name>` cannot be written as it is, and shells read a redirection from it.
    keys = [f"{key}=" for key in list_keys() if "<" not in key]
    render = _render_bash_script if arguments.shell == "bash" else _render_zsh_script
    print(render(commands, keys), end="")
    return 0


def _list_command_completions(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, CommandCompletions]]:
    for name, command in find_subparsers(parser).items():
        options = [word for action in command._actions for word in action.option_strings]
        takes_keys = any(action.dest == "overrides" for action in command._actions)
        words = (*sorted(find_subparsers(command)), *options)
        first = (command.description or name).split(". ")[0].rstrip(".")
        yield name, CommandCompletions(first, words, takes_keys)


def _render_bash_script(commands: Mapping[str, CommandCompletions], keys: list[str]) -> str:
    cases = "\n".join(
        f"    {name}) words={shlex.quote(' '.join(one.words))}; takes_keys={int(one.takes_keys)} ;;"
        for name, one in commands.items()
    )
    return f"""\
# Completion of areal-hpc for bash: eval "$(areal-hpc completion bash)"
_areal_hpc() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words takes_keys=0 keys
  keys={shlex.quote(" ".join(keys))}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W {shlex.quote(" ".join(commands))} -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  [ "$takes_keys" = 1 ] && words="$words $keys"
  COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word"))
  case ${{COMPREPLY[0]-}} in *=) compopt -o nospace ;; esac
}}
complete -F _areal_hpc areal-hpc
"""


def _render_zsh_script(commands: Mapping[str, CommandCompletions], keys: list[str]) -> str:
    names = "\n".join("    " + shlex.quote(f"{name}:{one.help}") for name, one in commands.items())
    cases = "\n".join(
        f"    {name}) words_=({' '.join(map(shlex.quote, one.words))}); "
        f"takes_keys={int(one.takes_keys)} ;;"
        for name, one in commands.items()
    )
    return f"""\
#compdef areal-hpc
# Completion of areal-hpc for zsh: areal-hpc completion zsh > a folder of $fpath/_areal-hpc
_areal_hpc() {{
  local -a commands keys words_
  local takes_keys=0
  commands=(
{names}
  )
  keys=({" ".join(map(shlex.quote, keys))})
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case $words[2] in
{cases}
  esac
  compadd -- $words_
  (( takes_keys )) && compadd -S '' -- $keys
  _files
}}
# Loaded from $fpath, this file is the function that the first Tab calls; else it is sourced.
if [[ $funcstack[1] == _areal-hpc ]]; then _areal_hpc "$@"; else compdef _areal_hpc areal-hpc; fi
"""
