"""Interactions that `ArealOpenAI` exports: replies, rewards and tensors, with AReaL's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.session.chat_template import Message
from areal_hpc.session.export import RowPlan, build_areal_batch
from areal_hpc.session.tree import Interaction, unpack_ids

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """Reply, token by token."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    """Packed weight version of each token of the reply."""
    stop_reason: str


@dataclass(slots=True, eq=False)
class RecordedInteraction:
    """Exported interaction: a training row with the answer and the reward behind it."""

    plan: RowPlan
    """Interactions from the root to this one, and the replies that the row trains."""
    answer: Any
    """`ChatCompletion` or `Response`; None if it was streamed."""
    reward: float | None
    original_reward: float | None
    """Reward at the time of the export; a user may change `reward` later."""
    _tensors: dict[str, torch.Tensor] | None = field(default=None, init=False)

    @property
    def interaction(self) -> Interaction:
        return self.plan.path[-1]

    @property
    def interaction_id(self) -> str:
        return self.interaction.interaction_id

    @property
    def completion(self) -> Any:
        return self.answer if self.interaction_id.startswith("chatcmpl-") else None

    @property
    def response(self) -> Any:
        return self.answer if self.interaction_id.startswith("resp") else None

    @property
    def messages(self) -> list[Message]:
        """Whole conversation of the request, in normal form."""
        *earlier, last = self.plan.path
        history = [m for call in earlier for m in (*call.new_messages, call.reply)]
        return [*history, *last.new_messages]

    @property
    def output_message_list(self) -> list[Message]:
        return [self.interaction.reply]

    @property
    def model_response(self) -> ModelResponse:
        *earlier, last = self.plan.path
        pieces = [ids for call in earlier for ids in (call.new_ids, call.output_ids)]
        spans = last.spans
        return ModelResponse(
            input_tokens=[
                i for piece in (*pieces, last.new_ids) for i in unpack_ids(piece).tolist()
            ],
            output_tokens=unpack_ids(last.output_ids).tolist(),
            output_logprobs=np.frombuffer(last.logprobs, "<f4").tolist(),
            output_versions=[s.version for s in spans for _ in range(s.end - s.start)],
            stop_reason=last.finish_reason,
        )

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Return the row as tensors: those of `build_areal_batch`, and `original_rewards`.

        Later calls return the same tensors. A missing reward is 0.
        """
        if self._tensors is None:
            import torch

            batch = build_areal_batch(dataclasses.replace(self.plan, reward=self.reward or 0.0))
            batch["original_rewards"] = np.array([self.original_reward or 0.0], np.float32)
            self._tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        return self._tensors
