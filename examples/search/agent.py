"""Questions that are answered from a local index (BM25, by bm25s): no network needed."""

import json
from pathlib import Path
from typing import Any

import bm25s
from openai import AsyncOpenAI

CORPUS = Path(__file__).with_name("corpus.jsonl")
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "strict": True,
        "description": "Find passages about something.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 60}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


class Index:
    """Passages of a JSON-lines file with `title` and `text`, ranked by BM25."""

    def __init__(self, corpus: Path) -> None:
        self.passages = [json.loads(line) for line in corpus.read_text().splitlines()]
        self.ranking = bm25s.BM25()
        self.ranking.index(self._tokens([f"{p['title']} {p['text']}" for p in self.passages]))

    def search(self, query: str, most: int = 2) -> list[dict[str, Any]]:
        """The best passages; none if no word of the query occurs."""
        found, scores = self.ranking.retrieve(
            self._tokens([query]), k=most, show_progress=False, n_threads=0
        )
        return [self.passages[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]

    @staticmethod
    def _tokens(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


class SearchAgent:
    """Searches as often as it likes, then answers; right if the answer names `data["answer"]`."""

    def __init__(self, corpus: str | None = None, max_turns: int = 4, **request: Any) -> None:
        self.index = Index(Path(corpus) if corpus else CORPUS)
        self.max_turns = max_turns
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        text = await self.ask(client, data["messages"])
        return float(bool(text) and data["answer"].casefold() in text.casefold())

    async def ask(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=[SEARCH], **self.request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                content = self.looked_up(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return ""

    def looked_up(self, arguments: str) -> str:
        """What the model is told: passages, or what is wrong with its call (models err)."""
        try:
            passages = self.index.search(str(json.loads(arguments)["query"]))
        except (ValueError, TypeError, KeyError):
            return "error: give a query"
        return json.dumps(passages) if passages else "nothing found"
