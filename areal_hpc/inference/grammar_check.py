"""Check of grammars in forks of the parser process, before a replica gets them.

SGLang compiles a grammar in a thread that no abort ends, and computes the mask of each token in the
loop that serves all requests. A fork has limits of its own and can be killed.
"""

import logging
import os
import random
import re
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_hpc.jobs.processes.process_ties import die_with_parent
from areal_hpc.wire.parsers import GrammarCheckRequest, ParserReply

log = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 2 << 30
NICENESS = 5
"""Niceness of a check, so that the node's servers come first."""
SAMPLED_TOKENS, SAMPLING_TIME_S = 512, 2.0
"""Limits of one sampling test, which stops at the first it reaches."""
MAX_TOKEN_S, MAX_GROWTH, MAX_GROWING_TOKEN_S = 0.05, 8, 0.005
"""Maximum processor seconds per token, for which all replies of a replica wait. The lower maximum
applies if the last tokens take `MAX_GROWTH` times as long as the first."""
MAX_CHECK_S = 60
"""Maximum wall time of a check, which occupies a lane."""
COSTLY_EXIT_CODE, UNMEASURED_EXIT_CODE = 1, 2
_PROBLEM_BY_EXIT_CODE = {
    0: "",
    COSTLY_EXIT_CODE: "each token of a reply takes too long",
    -signal.SIGXCPU: "it takes more than {cpu_s} s of a core",
    -signal.SIGABRT: f"it takes more than {MAX_MEMORY_BYTES >> 30} GiB",
    -signal.SIGSEGV: f"it takes more than {MAX_MEMORY_BYTES >> 30} GiB",
}
"""Problem of a grammar by the exit code of its check. All other codes, such as that of a kill for
lack of memory, leave the grammar unjudged."""
_RULE_PATTERN = re.compile(r"^([\w.-]+)(?:\(.*\))? ::=", re.MULTILINE)


class GrammarChecker:
    """Checker of grammars with one model's tokens; it passes results to `send`, from any thread.

    A thread of its own starts the checks: the imports of the first take seconds, and few proxies
    need them. If they fail, as SGLang may have tokenizers that this lacks, nothing is checked.
    """

    def __init__(self, model_dir: str, send: Callable[[ParserReply], None]) -> None:
        self._model_dir, self._send = model_dir, send
        self._starter = ThreadPoolExecutor(1)
        self._backend: Any = None
        self._has_failed = False
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()

    def begin(self, request: GrammarCheckRequest) -> None:
        self._starter.submit(self._begin, request)

    def _begin(self, request: GrammarCheckRequest) -> None:
        if self._backend is None and not self._has_failed:
            try:
                self._backend = _load_backend(self._model_dir)
            except Exception:  # boundary: SGLang's code and its imports
                log.exception("replicas get grammars that were not tried")
                self._has_failed = True
        if self._has_failed:
            self._send(ParserReply(call=request.call))
            return
        try:
            pid = os.fork()
        except OSError as error:  # no process can be started now
            self._send(ParserReply(call=request.call, error=str(error), is_unknown=True))
            return
        if not pid:
            code = UNMEASURED_EXIT_CODE
            try:
                code = COSTLY_EXIT_CODE if _is_costly(self._backend, request) else 0
            except Exception:  # boundary: SGLang's and xgrammar's code, on any grammar
                traceback.print_exc()
            finally:
                os._exit(code)
        self._pids[request.call] = pid
        threading.Thread(target=self._await_end, args=(request, pid), daemon=True).start()

    def kill(self, call: int) -> None:
        with self._lock:
            if call in self._pids:
                os.kill(self._pids[call], signal.SIGKILL)

    def _await_end(self, request: GrammarCheckRequest, pid: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # no other process gets its id until it is reaped
            del self._pids[request.call]
            _, status = os.waitpid(pid, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        problem = _PROBLEM_BY_EXIT_CODE.get(
            exit_code, f"the grammar could not be tried: its try ended with {exit_code}"
        )
        problem = problem.format(cpu_s=request.cpu_s)
        is_unknown = exit_code not in _PROBLEM_BY_EXIT_CODE
        self._send(ParserReply(call=request.call, error=problem, is_unknown=is_unknown))


def _load_backend(model_dir: str) -> Any:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return XGrammarGrammarBackend(get_tokenizer(model_dir), vocab_size=None)


def _is_costly(backend: Any, request: GrammarCheckRequest) -> bool:
    import xgrammar
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MAX_CHECK_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_s, request.cpu_s + 1))
    data_pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(
        resource.RLIMIT_DATA, (data_pages * resource.getpagesize() + MAX_MEMORY_BYTES,) * 2
    )
    compiled = getattr(backend, f"dispatch_{request.kind.removesuffix('_schema')}")(request.text)
    if isinstance(compiled, InvalidGrammarObject):  # SGLang's own error is clearer
        if "alloc" in compiled.error_message:
            os.abort()
        return False
    if _is_slow_to_sample(compiled.ctx):
        return True
    if request.kind != "ebnf" and '"grammar"' not in request.text:
        return False
    rules = str(compiled.ctx.grammar)  # a rule that the samples reach late, or never, may be slow
    names = " | ".join(_RULE_PATTERN.findall(rules))
    every_rule = xgrammar.Grammar.from_ebnf(
        f"{rules}\nevery_rule ::= {names}\n", root_rule_name="every_rule"
    )
    return _is_slow_to_sample(backend.grammar_compiler.compile_grammar(every_rule))


def _is_slow_to_sample(grammar: Any) -> bool:
    import numpy as np
    import xgrammar

    vocab_size, stops = grammar.tokenizer_info.vocab_size, grammar.tokenizer_info.stop_token_ids
    matcher, rng = xgrammar.GrammarMatcher(grammar), random.Random(0)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    spent_s: list[float] = []
    while len(spent_s) < SAMPLED_TOKENS and sum(spent_s) < SAMPLING_TIME_S:
        began_s = time.process_time()
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:vocab_size]
        bits[stops] = 0
        if not bits.any():
            break
        matcher.accept_token(int(rng.choice(bits.nonzero()[0])))
        spent_s.append(time.process_time() - began_s)
    quarter = max(len(spent_s) // 4, 2)
    first_s, last_s = (sum(part) / quarter for part in (spent_s[:quarter], spent_s[-quarter:]))
    limit_s = MAX_TOKEN_S if last_s < MAX_GROWTH * first_s else MAX_GROWING_TOKEN_S
    return last_s > limit_s
