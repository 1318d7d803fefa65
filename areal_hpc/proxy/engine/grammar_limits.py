"""Bounds of grammars: what SGLang compiles in seconds, whatever else it is asked meanwhile.

It compiles in threads that no abort ends, and all grammars of a replica share its cores. Measured
with xgrammar 0.2.7 and 50,000 tokens: optional terms cost by the square of their number (64: 0.5 s,
512: over 25 s), counted repeats of wide classes seconds each, and those within one another minutes.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.sessions.store import Session

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
            key = _REQUEST_KEY_BY_GRAMMAR.get(name, name)
            raise ProxyRequestError(
                400, f"the grammar takes too long to compile: {problem}", key=key
            )


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


class CompilingGrammarQuota:
    """Grammars that replicas may be compiling, by session; one that was used is compiled."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], None] = {}
        """Oldest first; by name and hash, as a set that forgets."""

    @contextmanager
    def hold_slot_if_new_grammar(
        self, session: Session, sampling: SamplingParams
    ) -> Iterator[None]:
        """Count the call's grammar, if nobody has used it yet, for as long as the context lasts.

        Raises:
            ProxyRequestError: 429, the session has too many new ones under way.
        """
        names = sampling.active_grammar_names
        key = (names[0], hash(getattr(sampling, names[0]))) if names else None
        if key is None or key in self._known:
            yield
            return
        new = session.new_grammars
        if key not in new and len(new) >= MAX_COMPILING_GRAMMARS_PER_SESSION:
            most = MAX_COMPILING_GRAMMARS_PER_SESSION
            raise ProxyRequestError(429, f"{most} new grammars of this session are being compiled")
        new[key] += 1
        try:
            yield
            self._known[key] = None
            while len(self._known) > MAX_KNOWN_GRAMMARS:
                del self._known[next(iter(self._known))]
        finally:
            new[key] -= 1
            if not new[key]:
                del new[key]
