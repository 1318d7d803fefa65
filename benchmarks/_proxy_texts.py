"""A tokenizer of realistic size, and conversations of so many tokens, from Python's own sources."""

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import NFC

VOCABULARY = 32_000
FILES = 120
"""About 3 MB."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2.5's split of text before its merges."""
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
NEW_TOKENS = 120
REPLY_TOKENS = 256
FRAME_TOKENS = 6
"""Tokens that the template writes around a message."""
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages up to the first reply, then so many questions with that many replies between."""

    opening: list[Message]
    questions: list[Message]

    def messages(self, turn: int, reply: Message) -> list[Message]:
        """The request of a turn; turn 0 is the opening alone."""
        later = [message for question in self.questions[:turn] for message in (reply, question)]
        return [*self.opening, *later]


class Texts:
    """Source of messages; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
        self._sources = [file.read_text(errors="ignore") for file in files]
        self.tokenizer = _train(self._sources)
        self._ids = self.tokenizer.encode("".join(self._sources), add_special_tokens=False).ids
        self.eos: int = self.tokenizer.token_to_id("<|im_end|>")  # type: ignore[assignment]  # it is there

    def write_model_dir(self, folder: Path, context_tokens: int) -> Path:
        """Write the files of a model that a proxy reads."""
        folder.mkdir()
        self.tokenizer.save(str(folder / "tokenizer.json"))
        tokenizer_config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        config = {
            "vocab_size": self.tokenizer.get_vocab_size(),
            "max_position_embeddings": context_tokens,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def text(self, tokens: int) -> str:
        """Decode about so many tokens, from a random position."""
        start = self._random.randrange(len(self._ids) - tokens)
        return self.tokenizer.decode(self._ids[start : start + tokens])

    def message(self, role: str, tokens: int) -> Message:
        return {"role": role, "content": self.text(tokens - FRAME_TOKENS)}

    def dialogue(self, prompt_tokens: int, turns: int) -> Dialogue:
        """Make a dialogue of `prompt_tokens` on average, and `NEW_TOKENS` more in each turn."""
        growth = NEW_TOKENS + REPLY_TOKENS
        rest = max(prompt_tokens - growth * (turns + 1) // 2, 40)
        opening = [self.message("system", min(rest // 2, 500))]
        rest -= min(rest // 2, 500)
        roles = _alternating(1 + 2 * (rest // 1000))
        opening += [self.message(role, rest // len(roles)) for role in roles]
        return Dialogue(opening, [self.message("user", NEW_TOKENS) for _ in range(turns)])


def _alternating(count: int) -> list[str]:
    return ["user" if number % 2 == 0 else "assistant" for number in range(count)]


def _train(sources: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_parts(sources), trainer)
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        ]
    )
    return tokenizer


def _parts(sources: list[str]) -> Iterator[str]:
    for source in sources:
        for start in range(0, len(source), 20_000):
            yield source[start : start + 20_000]
