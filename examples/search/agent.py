"""Questions that are answered from a local index (BM25, by bm25s): no network needed."""

import json
from pathlib import Path
from typing import Any, Self

import bm25s
from openai import AsyncOpenAI

CORPUS = Path(__file__).with_name("corpus.jsonl")
SHORTLY = "Search for what you need to know, then answer in a few words."
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
    """Passages with `title` and `text`, ranked by BM25."""

    def __init__(self, passages: list[dict[str, str]]) -> None:
        self.passages = passages
        self.ranking = bm25s.BM25()
        self.ranking.index(
            self._tokens([f"{row['title']} {row['text']}" for row in passages]),
            show_progress=False,
        )

    @classmethod
    def of_file(cls, corpus: Path) -> Self:
        """The passages of a JSON-lines file."""
        return cls([json.loads(line) for line in corpus.read_text().splitlines()])

    def search(self, query: str, most: int = 2) -> list[dict[str, str]]:
        """The best passages; none if no word of the query occurs."""
        order, scores = self.ranking.retrieve(
            self._tokens([query]),
            k=min(most, len(self.passages)),
            show_progress=False,
            n_threads=0,
        )
        return [self.passages[i] for i, score in zip(order[0], scores[0], strict=True) if score > 0]

    def looked_up(self, arguments: str) -> str:
        """Passages as the model's tool result, or the error of its call (models err)."""
        try:
            passages = self.search(str(json.loads(arguments)["query"]))
        except (ValueError, TypeError, KeyError):
            return "error: give a query"
        return json.dumps(passages, ensure_ascii=False) if passages else "nothing found"

    @staticmethod
    def _tokens(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


class SearchAgent:
    """Agent that searches, then answers; right if the answer names `data["answer"]`.

    It searches the passages of the task, `data["passages"]`, or else those of a file.
    `first_request` goes into the first model call alone, such as `tool_choice: required`.
    """

    def __init__(
        self,
        corpus: str | None = None,
        max_turns: int = 4,
        first_request: dict[str, Any] | None = None,
        **request: Any,
    ) -> None:
        self.index = Index.of_file(Path(corpus) if corpus else CORPUS)
        self.max_turns = max_turns
        self.first_request = first_request or {}
        self.request = request

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
        )
        index = Index(data["passages"]) if "passages" in data else self.index
        text = await self.ask(client, data["messages"], index)
        return float(bool(text) and data["answer"].casefold() in text.casefold())

    async def ask(self, client: AsyncOpenAI, messages: list[Any], index: Index) -> str:
        request = {**self.request, **self.first_request}
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=[SEARCH], **request
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                content = index.looked_up(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            request = self.request
        return ""


def hotpot(row: dict[str, Any]) -> dict[str, Any] | None:
    """`hotpotqa/hotpot_qa`, for `to_task`: a question whose answer lies in two of ten passages.

    Questions of yes or no are left out: they are answered without a search.
    """
    if row["answer"] in ("yes", "no"):
        return None
    context = row["context"]
    passages = [
        {"title": title, "text": "".join(sentences)}
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
    ]
    question = f"{row['question']} {SHORTLY}"
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "answer": row["answer"], "passages": passages}
