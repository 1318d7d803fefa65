"""Evidence that a policy cheats its reward, and the episodes to read (`why RUN --hacking`)."""

from collections import Counter

from areal_hpc.errors import ShardError
from areal_hpc.metrics.alerts import ALERT_WINDOW_ROWS
from areal_hpc.metrics.reward_hacking import FACT_METRICS, MIN_WATCHED_STEPS, find_hacking_evidence
from areal_hpc.metrics.step_metrics import read_metrics, select_trained_rows
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.batch.batch_metrics import get_row_answer, summarize_episodes
from areal_hpc.view.batch_episodes import BatchEpisode, read_batch_episodes, read_first_rows
from areal_hpc.view.formatting import Answer, Finding, build_page_url_fragment

MAX_SHOWN_EPISODES = 10
MAX_EARLIER_WINDOWS = 100


def diagnose_reward_hacking(paths: RunPaths) -> Answer:
    """Tell the evidence that holds now, the step since which, and the suspect episodes."""
    rows = read_metrics(paths.metrics)
    trained, run = select_trained_rows(rows), paths.run_name
    found = find_hacking_evidence(rows[-ALERT_WINDOW_ROWS:])
    if found is None:
        return Answer(
            f"nothing that is watched disagrees with the reward of {len(trained)} steps; at least "
            f"{MIN_WATCHED_STEPS} show a disagreement"
        )
    (before, after), evidence = found
    first = len(rows)
    earliest = max(1, first - MAX_EARLIER_WINDOWS)
    # Each look reads a window, and a browser shows this answer anew at each step.
    while first > earliest and find_hacking_evidence(
        rows[max(0, first - 1 - ALERT_WINDOW_ROWS) : first - 1]
    ):
        first -= 1
    or_before = " or before" if first == earliest else ""
    problems: list[str] = []
    step = trained[-1]["step"]
    episodes = _choose_suspect_episodes(paths, step, problems)
    names = ",".join(episode.first_row_name for episode in episodes)
    page = build_page_url_fragment("side_by_side", run, rows=names) if names else ""
    return Answer(
        f"the reward may be cheated since step {rows[first - 1]['step']}{or_before}: it rises "
        f"from {before:.3g} to {after:.3g}, and something disagrees",
        (
            *(Finding(text) for text, _ in evidence),
            Finding(f"suspect episodes of step {step}, side by side", page),
            *(
                Finding(
                    f"{episode.title}, reward {episode.mean_row_reward:g}",
                    build_page_url_fragment("trajectory", run, row=episode.first_row_name),
                )
                for episode in episodes
            ),
            *(Finding(f"not read: {problem}") for problem in problems[:3]),
        ),
        ("mend the reward, then start again from weights that do not cheat",),
        is_well=False,
    )


def _choose_suspect_episodes(paths: RunPaths, step: int, problems: list[str]) -> list[BatchEpisode]:
    """Choose one episode of each task: by reported facts, then reward, then a frequent answer."""
    episodes = read_batch_episodes(paths, [step], problems)
    try:
        answers = [get_row_answer(row) for row in read_first_rows(paths, episodes)]
    except ShardError as error:
        problems.append(str(error))
        return []
    frequency = Counter(answers)
    pairs = zip(episodes, answers, strict=True)
    best_of_ticket: dict[int, BatchEpisode] = {}
    for episode, _ in sorted(
        pairs,
        key=lambda pair: (_has_facts(pair[0]), pair[0].mean_row_reward, frequency[pair[1]]),
        reverse=True,
    ):
        best_of_ticket.setdefault(episode.ticket_id, episode)
    return list(best_of_ticket.values())[:MAX_SHOWN_EPISODES]


def _has_facts(episode: BatchEpisode) -> bool:
    numbers = summarize_episodes([episode.record])
    return any(numbers.get(metric, 0.0) > 0 for metric in FACT_METRICS)
