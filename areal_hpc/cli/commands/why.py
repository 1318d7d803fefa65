"""`areal-hpc why`: why a run failed or waits, and answers to other questions about it."""

from __future__ import annotations

import argparse
import shlex

from areal_hpc.cli.arguments import UNHEALTHY_EXIT_CODE, CommandGroup, parse_run_dir


def add_commands(commands: CommandGroup) -> None:
    why = commands.add_command(
        "why",
        _explain_run,
        ["run"],
        help="explain why a run failed or waits, is slow, or learns badly",
        description="Explain the last failure: Slurm states, exit codes, signals, memory, nodes, "
        "and the first traceback of all ranks. Or answer a question from the run's files alone: "
        "why it is slow, what differs at a step, does it collapse. Exits with 1 if you have to "
        "act.",
        example="areal-hpc why runs/quickstart/demo\n"
        "areal-hpc why runs/quickstart/demo --slow\n"
        "areal-hpc why runs/quickstart/demo --step 30",
    )
    question = why.add_mutually_exclusive_group()
    help_ = "what the steps' time goes to, and which cell, tool or episode is to blame"
    question.add_argument("--slow", action="store_true", help=help_)
    help_ = "what differs at this step from the ten before it"
    question.add_argument("--step", type=int, metavar="N", help=help_)
    help_ = "trends of entropy, lengths, repetition and distinct replies"
    question.add_argument("--collapse", action="store_true", help=help_)


def _explain_run(arguments: argparse.Namespace) -> int:
    if arguments.slow or arguments.collapse or arguments.step is not None:
        return _answer_question(arguments)
    return _explain_failure(arguments)


def _answer_question(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.answers.answer import format_answer
    from areal_hpc.view.answers.collapse import diagnose_collapse
    from areal_hpc.view.answers.slow_run import explain_slow_run
    from areal_hpc.view.answers.step_change import explain_step_difference

    paths = parse_run_dir(arguments.run)
    if arguments.slow:
        answer = explain_slow_run(paths)
    elif arguments.collapse:
        answer = diagnose_collapse(paths)
    else:
        answer = explain_step_difference(paths, arguments.step)
    print("\n".join(format_answer(answer, shlex.quote(str(arguments.run)))))
    return 0 if answer.is_well else UNHEALTHY_EXIT_CODE


def _explain_failure(arguments: argparse.Namespace) -> int:
    from areal_hpc.slurm.queue import QueuePoller
    from areal_hpc.view.diagnosis import diagnose, format_diagnosis
    from areal_hpc.view.inspection import inspect_run
    from areal_hpc.view.state.summary import describe_quarantined_batches

    paths = parse_run_dir(arguments.run)
    diagnosis = diagnose(inspect_run(paths, QueuePoller()))
    lines = format_diagnosis(diagnosis, shlex.quote(str(arguments.run)))
    lines += [f"quarantined: {one}" for one in describe_quarantined_batches(paths)]
    print("\n".join(lines))
    return 0 if diagnosis.is_well else UNHEALTHY_EXIT_CODE
