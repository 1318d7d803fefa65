"""Interactions as an in-process client hands them out: replies, rewards, tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.session.export import EpisodeKey, RowPlan, build_row
from areal_hpc.session.template import Message
from areal_hpc.session.tree import Interaction, ids_of

if TYPE_CHECKING:
    import torch

NO_EPISODE = EpisodeKey(ticket_id=0, attempt=0, episode=0)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """One reply, token by token."""

    input_tokens: list[int]
    """The whole prompt."""
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    """Packed weight version of each token of the reply."""
    stop_reason: str


@dataclass(slots=True, eq=False)
class RecordedInteraction:
    """One exported interaction: a training row with what it was made of."""

    plan: RowPlan
    """The interactions from the root to this one, and whose replies the row trains."""
    answer: Any
    """The `ChatCompletion` or `Response`; None if it was streamed."""
    reward: float | None
    original_reward: float | None
    """The reward when it was exported, whatever is made of `reward` later."""
    _tensors: dict[str, torch.Tensor] | None = field(default=None, init=False)

    @property
    def interaction(self) -> Interaction:
        """What was recorded."""
        return self.plan.path[-1]

    @property
    def interaction_id(self) -> str:
        """The id of the completion or response."""
        return self.interaction.interaction_id

    @property
    def completion(self) -> Any:
        """The `ChatCompletion`, if it was one."""
        return self.answer if self.interaction_id.startswith("chatcmpl-") else None

    @property
    def response(self) -> Any:
        """The `Response`, if it was one."""
        return self.answer if self.interaction_id.startswith("resp") else None

    @property
    def messages(self) -> list[Message]:
        """The request's whole conversation, in normal form."""
        *before, last = self.plan.path
        history = [m for one in before for m in (*one.new_messages, one.reply)]
        return [*history, *last.new_messages]

    @property
    def output_message_list(self) -> list[Message]:
        """The reply, in normal form."""
        return [self.interaction.reply]

    @property
    def model_response(self) -> ModelResponse:
        """Tokens of prompt and reply."""
        *before, last = self.plan.path
        pieces = [ids for one in before for ids in (one.new_ids, one.output_ids)]
        spans = last.spans
        return ModelResponse(
            input_tokens=[i for piece in (*pieces, last.new_ids) for i in ids_of(piece).tolist()],
            output_tokens=ids_of(last.output_ids).tolist(),
            output_logprobs=np.frombuffer(last.logprobs, "<f4").tolist(),
            output_versions=[s.version for s in spans for _ in range(s.end - s.start)],
            stop_reason=last.finish_reason,
        )

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """The row as tensors with a batch dimension of one; made once.

        Returns:
            `input_ids`, `loss_mask`, `versions` int64 [1, L], `logprobs` float32 [1, L],
            `turn_ids` int32 [1, L] (-1 where nothing is trained), `attention_mask` bool [1, L],
            `rewards` and `original_rewards` float32 [1], 0 where there is no reward.
        """
        if self._tensors is None:
            self._tensors = self._make_tensors()
        return self._tensors

    def _make_tensors(self) -> dict[str, torch.Tensor]:
        import torch

        row = build_row(self.plan, NO_EPISODE, 0, {})
        arrays = {
            "input_ids": row.input_ids_T.astype(np.int64),
            "loss_mask": row.loss_mask_T.astype(np.int64),
            "logprobs": row.logprobs_T,
            "versions": row.versions_T,
            "turn_ids": self._turn_ids(row.num_tokens),
            "attention_mask": np.ones(row.num_tokens, np.bool_),
        }
        tensors = {name: torch.from_numpy(array)[None] for name, array in arrays.items()}
        tensors["rewards"] = torch.tensor([self.reward or 0.0], dtype=torch.float32)
        tensors["original_rewards"] = torch.tensor(
            [self.original_reward or 0.0], dtype=torch.float32
        )
        return tensors

    def _turn_ids(self, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        turn_ids_T = np.full(length, -1, np.int32)
        turn = 0
        for one in self.plan.path:
            if one.interaction_id in self.plan.trained:
                turn_ids_T[one.prompt_tokens : one.sequence_tokens] = turn
                turn += 1
        return turn_ids_T
