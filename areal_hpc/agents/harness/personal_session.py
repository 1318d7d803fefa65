"""Session of a person: their own program on a run's policy, and their verdict as its reward."""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from areal_hpc.agents.harness.programs import (
    HARNESSES,
    HARNESSES_DIR,
    HarnessTemplateValues,
    TerminalUse,
    find_installed_harness,
    get_harness_program,
    get_program_path,
)
from areal_hpc.errors import ClusterError, HttpStatusError, RecipeError
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rollout.episodes.episode_spec import resolve_limits
from areal_hpc.rollout.execution.agent_sandboxes import build_endpoint_variables
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import write_atomic_private
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe
from areal_hpc.rundir.service_client import ServiceClient
from areal_hpc.view.formatting import format_next_command, say
from areal_hpc.wire import proxy as wire
from areal_hpc.wire.agent_reward import MAX_NOTE_CHARS, Reward
from areal_hpc.wire.ledger import Empty
from areal_hpc.wire.retry import retry

DEFAULT_CONTEXT_TOKENS = 131072
PROXY_TIMEOUT_S = 10.0
MAX_PROXY_OUTAGE_S = 120.0
"""Time for which a verdict waits for a proxy that starts again."""
BEST_VERDICT = 9
_ENDING_SIGNALS = (signal.SIGHUP, signal.SIGTERM)


@contextmanager
def _exit_at_signals() -> Iterator[None]:
    """Let SIGHUP (a closed terminal) and SIGTERM raise `SystemExit`, so that `finally` runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        for ending in _ENDING_SIGNALS:
            signal.signal(ending, signal.SIG_IGN)  # the session is being ended
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@_exit_at_signals()
def hold_session(
    paths: RunPaths, use: TerminalUse, arguments: Sequence[str], *, only_prints: bool
) -> None:
    """Open a session, run a program in it, and end it with a person's verdict.

    `arguments` follow the command of `use`. With `only_prints` the person starts the program
    elsewhere, with the printed variables. The session is ended even if the terminal is closed.
    """
    recipe = Recipe.model_validate(read_run_recipe(paths.recipe))
    proxy, opened = open_session_at_any_cell(paths, recipe)
    opened_at, limit_s = time.monotonic(), float("inf")
    verdict: Reward | None = None
    try:
        url = proxy.url
        if opened.task is not None:
            limit_s = resolve_limits(recipe.rollout, opened.task).timeout_s
            say(f"an episode of the run; its task: {str(opened.task)[:MAX_NOTE_CHARS]}")
            say(f"it is trained if you give your verdict within {limit_s:g} s")
        with tempfile.TemporaryDirectory(prefix="areal-hpc-start-") as home:
            context_tokens = recipe.inference.context_length or DEFAULT_CONTEXT_TOKENS
            values = HarnessTemplateValues(url, opened.api_key, home, "", context_tokens)
            for name, text in use.files.items():
                path = Path(home, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic_private(path, values.fill(text).encode())
            variables = {
                **build_endpoint_variables(f"{url}/v1", opened.api_key),
                **{name: values.fill(value) for name, value in use.variables.items()},
            }
            command = [*map(values.fill, use.command), *arguments]
            if only_prints:
                _print_variables(command, variables)
            else:
                _run_in_terminal(command, variables)
        verdict = ask_verdict()
    finally:
        ended = end_session(proxy, opened, verdict)
        proxy.close()
    if ended is None:
        say("the session is over: nothing is kept")
        return
    is_late = time.monotonic() - opened_at > limit_s
    fate = _describe_fate(ended, opened, paths, is_late=is_late)
    say(f"replies: {ended.interaction_count}, {fate}")


def find_terminal_use(harness_name: str, arguments: Sequence[str]) -> TerminalUse:
    """Return how a harness is opened, with the path of the program; a person's own comes first.

    Without a harness the command is that of `arguments`.

    Raises:
        RecipeError: The harness is not known, cannot be opened by a person, or is not installed;
            or there is no such command.
    """
    if not harness_name:
        if arguments and shutil.which(arguments[0]) is None:
            raise RecipeError(
                f"there is no program {arguments[0]}", key="COMMAND", hint="name one on PATH"
            )
        return TerminalUse(())
    program = get_harness_program(harness_name, "HARNESS")
    if program.terminal is None:
        known = [name for name, program in HARNESSES.items() if program.terminal]
        raise RecipeError(
            f"areal-hpc start knows no way to open {harness_name} at a terminal",
            key="HARNESS",
            hint=f"choose from {', '.join(known)}, or name a run, `--` and a command",
        )
    executable, *words = program.terminal.command
    path = shutil.which(executable)
    if path is None:
        installed_dir = find_installed_harness(harness_name, HARNESSES_DIR, "HARNESS")
        path = str(get_program_path(program, installed_dir))
    return msgspec.structs.replace(program.terminal, command=(path, *words))


def open_session_at_any_cell(
    paths: RunPaths, recipe: Recipe
) -> tuple[ServiceClient, wire.StartSessionReply]:
    """Open a session at the first cell that serves and has room, or an episode that waits.

    Raises:
        ClusterError: No cell serves, or each that serves refused.
    """
    service_key = rendezvous.read_service_key(paths.service_key)
    refused: ClusterError | None = None
    for index in range(recipe.inference.cells):
        name = rendezvous.format_proxy_name(rendezvous.format_cell_name(index))
        proxy = ServiceClient(paths.rendezvous_dir, name, service_key, timeout_s=PROXY_TIMEOUT_S)
        serves = False
        with suppress(ClusterError):  # it does not run
            serves = proxy.call("/healthz", None, wire.ProxyHealth).replicas_serving > 0
        if serves:
            try:
                return proxy, open_session(proxy, recipe)
            except HttpStatusError as refusal:
                refused = ClusterError(
                    refusal.peer_message, key=proxy.url, hint="try it again soon"
                )
        proxy.close()
    if refused is not None:
        raise refused
    raise ClusterError(
        f"none of the {recipe.inference.cells} cells of this run serves its model now",
        key=str(paths.root),
        hint="areal-hpc status says what runs; a finished run serves again if it is resumed with "
        "a larger trainer.total_steps",
    )


def open_session(proxy: ServiceClient, recipe: Recipe) -> wire.StartSessionReply:
    """Open a session whose program gets a key for model calls alone."""
    agent = recipe.rollout.agent
    request = wire.StartSessionRequest(
        "personal",
        sampling=wire.SamplingDefaults(**recipe.rollout.sampling.model_dump()),
        sampling_from=agent.sampling,
        export=agent.build_export_settings(is_credited=False),
        seed=secrets.randbits(31),
        rights="calls",
        is_personal=True,
    )
    return proxy.call("/rl/start_session", request, wire.StartSessionReply)


def end_session(
    proxy: ServiceClient, opened: wire.StartSessionReply, verdict: Reward | None
) -> wire.EndSessionReply | None:
    """Give the verdict and end the session; return None if the proxy has deleted the session."""
    key = opened.control_key

    def set_reward() -> None:
        if verdict is not None:
            request = wire.SetRewardRequest(verdict)
            proxy.call("/rl/set_reward", request, wire.SetRewardReply, key=key)

    try:
        retry(set_reward, MAX_PROXY_OUTAGE_S)
    except HttpStatusError as refusal:  # it has no reply, or is deleted
        say(f"the verdict was refused: {refusal.peer_message}")
    try:
        return retry(
            lambda: proxy.call("/rl/end_session", Empty(), wire.EndSessionReply, key=key),
            MAX_PROXY_OUTAGE_S,
        )
    except HttpStatusError as refusal:
        if refusal.status != 401:
            raise
        return None


def ask_verdict() -> Reward | None:
    """Ask a person for 0 to 9, and for a note; None if they give no verdict."""
    try:
        while text := input(f"verdict, 0 (bad) to {BEST_VERDICT} (good), Enter for none: ").strip():
            if len(text) == 1 and text in "0123456789":
                note = input("note, Enter for none: ").strip()
                return Reward(int(text) / BEST_VERDICT, note=note[:MAX_NOTE_CHARS])
            say(f"expected one digit, got {text!r}")
    except (EOFError, KeyboardInterrupt):
        say("")
    return None


def _run_in_terminal(command: Sequence[str], variables: Mapping[str, str]) -> None:
    previous = signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is the program's
    try:
        subprocess.run(command, env={**os.environ, **variables}, check=False)
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_variables(command: Sequence[str], variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        say(f"export {name}={shlex.quote(value)}")
    if command:
        say(f"# {shlex.join(command)}")
    say("# press Enter or Ctrl-C when the program has ended")
    with suppress(KeyboardInterrupt):
        sys.stdin.readline()


def _describe_fate(
    ended: wire.EndSessionReply,
    opened: wire.StartSessionReply,
    paths: RunPaths,
    *,
    is_late: bool,
) -> str:
    if ended.reward is None:
        return "no verdict: nothing is kept"
    if is_late:
        return f"reward {ended.reward:.3g}: not trained, as it came after the episode's time"
    if opened.task is not None:
        return f"reward {ended.reward:.3g}: trained when the group of its task is complete"
    show = f"{format_next_command('shards show', paths)} --where kind=personal"
    return f"reward {ended.reward:.3g}: kept and never trained. In a minute:\n  {show}"
