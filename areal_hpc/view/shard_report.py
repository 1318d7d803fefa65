"""Text output of `areal-hpc shards`: tables of shards, tokens of a row, damage."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import get_recipe_value, read_run_recipe
from areal_hpc.shards.index import SealedShard, read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import VerifyReport
from areal_hpc.view.formatting import format_table
from areal_hpc.view.transcripts.row_search import FoundRow
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion

log = logging.getLogger(__name__)


def format_shard_table(paths: RunPaths) -> str:
    shards = read_index(paths.shard_index_dir)
    if not shards:
        return f"no sealed shards in {paths.shard_index_dir}"
    head = ("shard", "kinds", "rows", "tokens", "tickets", "MiB", "versions", "mean reward")
    rows = [_format_shard_cells(paths.shards_dir / shard.file, shard) for shard in shards]
    total = (
        f"{len(shards)} shards, {sum(shard.rows for shard in shards)} rows, "
        f"{sum(shard.tokens for shard in shards)} tokens, "
        f"{sum(shard.bytes for shard in shards) / 2**20:.1f} MiB"
    )
    return "\n".join(
        [*format_table([head, *rows], right_aligned_columns=range(2, len(head) - 1)), total]
    )


def format_shards_jsonl(paths: RunPaths) -> str:
    """Format one JSON line per sealed shard: its index line, and `versions`."""
    lines = []
    for shard in read_index(paths.shard_index_dir):
        versions = _read_version_range_text(paths.shards_dir / shard.file)
        line = {**msgspec.to_builtins(shard), "versions": versions}
        lines.append(msgspec.json.encode(line).decode())
    return "\n".join(lines)


def format_tokens(found_row: FoundRow, tokenizer_json: Path | None = None) -> str:
    tokenizer = _load_tokenizer(tokenizer_json) if tokenizer_json else None
    trajectory = found_row.read()
    sampled = int(trajectory.loss_mask_T.sum())
    title = (
        f"{found_row.reader.path.name} row {found_row.row}: ticket {trajectory.ticket_id} "
        f"attempt {trajectory.attempt} episode {trajectory.episode} row {trajectory.row}, "
        f"reward {trajectory.reward:g}, temperature {trajectory.temperature:g}, "
        f"{trajectory.num_tokens} tokens, {sampled} sampled"
    )
    head: tuple[str, ...] = ("position", "id", "mask", "logprob", "version")
    lines = [_format_token_cells(trajectory, position) for position in range(trajectory.num_tokens)]
    if tokenizer is not None:
        texts = [
            tokenizer.decode([token], skip_special_tokens=False)
            for token in trajectory.input_ids_T.tolist()
        ]
        head = (*head, "text")
        lines = [(*line, repr(text)) for line, text in zip(lines, texts, strict=True)]
    return "\n".join(
        [title, *format_table([head, *lines], right_aligned_columns=range(1, len(head) - 1))]
    )


def find_tokenizer_file(paths: RunPaths) -> Path | None:
    return next((file for file in _list_possible_tokenizer_files(paths) if file.is_file()), None)


def _list_possible_tokenizer_files(paths: RunPaths) -> Iterator[Path]:
    yield paths.sft_export / "tokenizer.json"
    yield paths.starting_model_dir / "tokenizer.json"
    if not paths.recipe.exists():  # a shard outside of a run directory
        return
    try:
        recipe = read_run_recipe(paths.recipe)
    except RecipeError as error:  # tokens can be shown without their text
        log.warning("the recipe cannot name a tokenizer: %s", error)
        return
    model_path = get_recipe_value(recipe, "model.path")
    if isinstance(model_path, str):
        yield Path(model_path) / "tokenizer.json"


def format_verification(report: VerifyReport) -> str:
    lines = [f"{problem.key}: {problem.message}" for problem in report.problems]
    lines.append(
        f"{report.shards} shards, {report.rows} rows verified, {len(report.problems)} problems"
    )
    return "\n".join(lines)


def _format_shard_cells(path: Path, shard: SealedShard) -> tuple[str, ...]:
    rewards = [reward for ticket in shard.tickets for reward in ticket.rewards]
    trained = [RowKind.TRAIN.label] if shard.tickets else []
    return (
        shard.file,
        "+".join([*trained, *dict.fromkeys(rows.kind for rows in shard.untrained)]),
        str(shard.rows),
        str(shard.tokens),
        str(len(shard.tickets)),
        f"{shard.bytes / 2**20:.2f}",
        _read_version_range_text(path),
        f"{np.mean(rewards):.3f}" if rewards else "-",
    )


def _read_version_range_text(path: Path) -> str:
    try:
        versions = ShardReader(path).read_column("versions")
    except ShardError:
        return "unreadable"
    sampled = versions[versions >= 0]
    if not len(sampled):
        return "-"
    bounds = (int(sampled.min()), int(sampled.max()))
    oldest, newest = map(WeightVersion.unpack, bounds)
    return str(oldest) if oldest == newest else f"{oldest}..{newest}"


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise RecipeError("there is no tokenizer", key=str(path), hint="give a tokenizer.json")
    return Tokenizer.from_file(str(path))


def _format_token_cells(trajectory: TrajectoryRow, position: int) -> tuple[str, ...]:
    version = int(trajectory.versions_T[position])
    sampled = bool(trajectory.loss_mask_T[position])
    return (
        str(position),
        str(trajectory.input_ids_T[position]),
        str(trajectory.loss_mask_T[position]),
        f"{trajectory.logprobs_T[position]:.4f}" if sampled else "-",
        str(WeightVersion.unpack(version)) if version >= 0 else "-",
    )
