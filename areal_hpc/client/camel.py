"""Model for CAMEL agents that sends its requests through an `ArealOpenAI` (camel-ai 0.2.90)."""

from typing import Any

from camel.models.openai_compatible_model import OpenAICompatibleModel
from camel.utils import BaseTokenCounter

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.in_process_engine import load_tokenizer
from areal_hpc.errors import AgentError
from areal_hpc.session.message_matching import normalize_chat_message


class AReaLOpenAICompatibleModel(OpenAICompatibleModel):  # type: ignore[misc]
    """CAMEL's OpenAI-compatible model on a recording client. Agents must use `astep`.

    Args:
        openai_client: Client that records the agent's calls.
        tokenizer: Tokenizer of the model; CAMEL counts tokens with it.
        model_type: CAMEL's label of the model.
        model_config_dict: Parameters of every request.
        options: Other arguments of CAMEL's model.
    """

    def __init__(
        self,
        openai_client: ArealOpenAI,
        tokenizer: Any,
        model_type: str = "areal",
        model_config_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model_type,
            model_config_dict,
            token_counter=options.pop("token_counter", None) or SessionTokenCounter(tokenizer),
            client=_NoSyncClient(),
            async_client=openai_client,
            **options,
        )


class SessionTokenCounter(BaseTokenCounter):  # type: ignore[misc]
    def __init__(self, tokenizer: Any) -> None:
        self._template, self._encoder = load_tokenizer(tokenizer)

    def count_tokens_from_messages(self, messages: list[dict[str, Any]]) -> int:
        normalized = [normalize_chat_message(message) for message in messages]
        return len(self.encode(self._template.render_prompt(normalized)))

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self._encoder.decode(token_ids)


class _NoSyncClient:
    """Placeholder for CAMEL's blocking client, which raises on use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `copy` and `hasattr` look these up
        raise AgentError(
            "ArealOpenAI is asynchronous: call it with `await`", hint="call agent.astep"
        )
