"""Bounds of grammars: what SGLang compiles in seconds, whatever else it is asked meanwhile.

It compiles in threads that no abort ends, and all grammars of a replica share its cores. Measured
with xgrammar 0.2.7 and 50,000 tokens: optional terms cost by the square of their number (64: 0.5 s,
512: over 25 s), counted repeats of wide classes seconds each, and those within one another minutes.
"""

import asyncio
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from areal_hpc.errors import ParserLostError, ProxyRequestError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.proxy.sessions.store import Session

log = logging.getLogger(__name__)
MAX_CHARS_BY_KIND = {
    "regex": 4096,
    "ebnf": 32768,
    "json_schema": 131_072,
    "structural_tag": 262_144,
}
MAX_QUANTIFIERS = 100
"""Signs that make a term optional or repeat it, in one regular expression or EBNF grammar."""
MAX_REPEATS = 4096
"""Repeats of a term: the product of the counts around it."""
MAX_GROUP_DEPTH = 64
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_VALUES = 10_000
"""JSON values of a schema with every reference replaced by what it refers to."""
MAX_CONSTRAINED_STRINGS = 32
"""Strings of a schema with a length or a pattern."""
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_LOGIT_BIASES = 128, 1024, 1024, 16_384
MAX_COMPILING_GRAMMARS_PER_SESSION = 4
"""Grammars of one session that may be compiled at a time."""
MAX_KNOWN_GRAMMARS = 16_384
LANES = ((1, 4), (5, 1))
"""Seconds of a core that a grammar is tried for, and how many are at a time: those that are not
done with the first wait for one another, and nobody else does for them."""

_REQUEST_KEY_BY_GRAMMAR = {"json_schema": "response_format", "structural_tag": "tools"}
"""Parameters of requests that become these grammars; the others keep their names."""
_REPEAT_COUNT_PATTERN = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_STRING_CONSTRAINT_KEYS = ("minLength", "maxLength", "pattern")


def refuse_costly_sampling(sampling: SamplingParams) -> None:
    """Refuse grammars, stops and biases beyond the bounds.

    Raises:
        ProxyRequestError: 400, naming the parameter.
    """
    names = sampling.active_grammar_names
    if not (names or sampling.stop or sampling.stop_token_ids or sampling.logit_bias):
        return
    stops = sampling.stop or ()
    for key, count, most in (
        ("stop", len(stops), MAX_STOP_STRINGS),
        ("stop", max(map(len, stops), default=0), MAX_STOP_CHARS),
        ("stop_token_ids", len(sampling.stop_token_ids or ()), MAX_STOP_TOKENS),
        ("logit_bias", len(sampling.logit_bias or ()), MAX_LOGIT_BIASES),
    ):
        if count > most:
            raise ProxyRequestError(400, f"{key} is too large: {count} (limit {most})", key=key)
    for name in names:
        if problem := _find_grammar_problem(name, getattr(sampling, name)):
            raise _build_refusal(name, problem)


@lru_cache(maxsize=256)
def _find_grammar_problem(grammar_kind: str, text: str) -> str:
    """Why a grammar is refused; empty if it is not."""
    if len(text) > MAX_CHARS_BY_KIND[grammar_kind]:
        return f"{len(text)} characters (limit {MAX_CHARS_BY_KIND[grammar_kind]})"
    if grammar_kind in ("regex", "ebnf"):
        return _find_repeat_problem(text, grammar_kind)
    try:
        schema = msgspec.json.decode(text)
        measure = _SchemaMeasure(schema)
        measure.add(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return measure.problem


def _find_repeat_problem(text: str, syntax: str, max_nested_repeats: int = MAX_REPEATS) -> str:
    """Why the repeats of a regular expression or an EBNF grammar are refused."""
    quantifiers, at = 0, 0
    last, last_is_group = 1, False  # repeats within the term just read
    groups = [1]  # the largest repeats within each open group
    while at < len(text):
        char = text[at]
        counted = _REPEAT_COUNT_PATTERN.match(text, at) if char == "{" else None
        if counted is not None:
            digits = counted[2] or counted[1]
            count = int(digits) if len(digits) < 7 else MAX_REPEATS + 1
            quantifiers, at = quantifiers + 1, counted.end()
            is_nested = last_is_group and last > 1 and count > 1
            last *= max(count, 1)
            groups[-1] = max(groups[-1], last)
            if last > (max_nested_repeats if is_nested else MAX_REPEATS):
                return f"a term is repeated {last} times"
            continue
        if char in "?*+":
            quantifiers += at > 0 and text[at - 1] != "("  # `(?:` begins a group
            at += 1
            continue
        last, last_is_group = 1, False
        if char == "(":
            groups.append(1)
            if len(groups) > MAX_GROUP_DEPTH:
                return f"groups nest deeper than {MAX_GROUP_DEPTH}"
        elif char == ")" and len(groups) > 1:
            last, last_is_group = groups.pop(), True
            groups[-1] = max(groups[-1], last)
        at = _find_term_end(text, at, syntax)
    if quantifiers > MAX_QUANTIFIERS:
        return f"{quantifiers} terms are optional or repeated (limit {MAX_QUANTIFIERS})"
    return ""


def _find_term_end(text: str, start: int, syntax: str) -> int:
    """The place behind the character, class or quoted text that begins at `start`."""
    closing = (
        {"[": "]", '"': '"'}.get(text[start]) if text[start] == "[" or syntax == "ebnf" else ""
    )
    if text[start] == "\\":
        return start + 2
    if not closing:
        return start + 1
    at = start + 1
    while at < len(text) and text[at] != closing:
        at += 2 if text[at] == "\\" else 1
    return at + 1


class _SchemaMeasure:
    """Size of a JSON schema, or of a structural tag with schemas in it, as it is compiled."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open_refs: list[str] = []
        self._values = 0
        self._counted_strings = 0
        self.problem = ""
        """Why it is refused; empty while it is not."""

    def add(self, value: Any, depth: int = 0) -> None:
        """Count a value and all below it."""
        self._values += 1
        if self._values > MAX_SCHEMA_VALUES:
            self.problem = f"more than {MAX_SCHEMA_VALUES} values, references replaced"
        elif depth > 2 * MAX_SCHEMA_DEPTH:  # a schema within a schema is two levels of JSON
            self.problem = f"schemas nest deeper than {MAX_SCHEMA_DEPTH}"
        if self.problem:
            return
        if isinstance(value, Mapping):
            self._check_string_constraints(value)
            self._add_reference(value.get("$ref"), depth)
            below = [one for key, one in value.items() if key not in ("$defs", "definitions")]
        else:
            below = value if isinstance(value, list) else []
        for one in below:
            self.add(one, depth + 1)  # nothing once there is a problem

    def _check_string_constraints(self, value: Mapping[str, Any]) -> None:
        is_counted = any(isinstance(value.get(key), int | str) for key in _STRING_CONSTRAINT_KEYS)
        self._counted_strings += is_counted
        if self._counted_strings > MAX_CONSTRAINED_STRINGS:
            most = MAX_CONSTRAINED_STRINGS
            self.problem = f"more than {most} strings have a length or a pattern"
        for key, syntax in (("pattern", "regex"), ("grammar", "ebnf")):
            if isinstance(text := value.get(key), str) and not self.problem:
                if len(text) > MAX_CHARS_BY_KIND[syntax]:
                    self.problem = (
                        f"a {key} has {len(text)} characters (limit {MAX_CHARS_BY_KIND[syntax]})"
                    )
                elif syntax == "ebnf":
                    self.problem = _find_repeat_problem(text, "ebnf")
                else:
                    self.problem = _find_repeat_problem(text, "regex", max_nested_repeats=1)

    def _add_reference(self, reference: object, depth: int) -> None:
        """Count what is referred to; a reference back to where it stands repeats nothing."""
        if not isinstance(reference, str) or reference in self._open_refs:
            return
        target = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            if part:
                target = target.get(part) if isinstance(target, Mapping) else None
        if target is not None:
            self._open_refs.append(reference)
            self.add(target, depth + 1)
            self._open_refs.pop()


class GrammarChecks:
    """What is known of grammars: one is tried beside the replicas before any of them gets it.

    Without `parsers` none is.
    """

    def __init__(self, parsers: ParserProcessClient | None) -> None:
        self._parsers = parsers
        self._problems: dict[bytes, str] = {}
        """By digest, oldest first; empty for a grammar that replicas may have."""
        self._tries: dict[bytes, asyncio.Task[str]] = {}
        self._waiters: Counter[bytes] = Counter()
        self._lanes = [(cpu_s, asyncio.Semaphore(tries)) for cpu_s, tries in LANES]

    async def refuse_costly_grammar(self, session: Session, sampling: SamplingParams) -> None:
        """Wait until it is known what the call's grammar costs.

        Raises:
            ProxyRequestError: 400: too much. 429: the session has too many new ones under way.
                503: the process that tries them died.
        """
        if self._parsers is None or not sampling.active_grammar_names:
            return
        name = sampling.active_grammar_names[0]
        text = getattr(sampling, name)
        digest = hashlib.blake2b(f"{name}={text}".encode(), digest_size=16).digest()
        problem = self._problems.get(digest)
        if problem is None:
            with _hold_slot(session, digest):
                problem = await self._await_try(self._parsers, digest, name, text)
        if problem:
            raise _build_refusal(name, problem)

    async def _await_try(
        self, parsers: ParserProcessClient, digest: bytes, grammar_kind: str, text: str
    ) -> str:
        """The result of the one try of a grammar, which ends when nobody waits for it any more."""
        if digest not in self._tries:
            trying = self._try_in_lanes(parsers, digest, grammar_kind, text)
            self._tries[digest] = asyncio.ensure_future(trying)
        task = self._tries[digest]
        self._waiters[digest] += 1
        try:
            return await asyncio.shield(task)
        except ParserLostError as error:
            raise ProxyRequestError(503, str(error)) from error
        finally:
            self._waiters[digest] -= 1
            if not self._waiters[digest]:
                del self._waiters[digest], self._tries[digest]
                task.cancel()

    async def _try_in_lanes(
        self, parsers: ParserProcessClient, digest: bytes, grammar_kind: str, text: str
    ) -> str:
        try:
            await parsers.start()
        except ParserLostError as error:  # as where a proxy alone has no SGLang
            log.warning("replicas get grammars that were not tried: %s", error)
            return ""
        problem = ""
        for cpu_s, lane in self._lanes:
            async with lane:
                problem = await parsers.find_grammar_cost(grammar_kind, text, cpu_s)
            if not problem:
                break
        self._problems[digest] = problem
        while len(self._problems) > MAX_KNOWN_GRAMMARS:
            del self._problems[next(iter(self._problems))]
        return problem


@contextmanager
def _hold_slot(session: Session, digest: bytes) -> Iterator[None]:
    """Count a new grammar of a session for as long as the context lasts."""
    new, most = session.new_grammars, MAX_COMPILING_GRAMMARS_PER_SESSION
    if digest not in new and len(new) >= most:
        raise ProxyRequestError(429, f"{most} new grammars of this session are being compiled")
    new[digest] += 1
    try:
        yield
    finally:
        new[digest] -= 1
        if not new[digest]:
            del new[digest]


def _build_refusal(grammar_kind: str, problem: str) -> ProxyRequestError:
    key = _REQUEST_KEY_BY_GRAMMAR.get(grammar_kind, grammar_kind)
    return ProxyRequestError(400, f"the grammar takes too long to compile: {problem}", key=key)
