"""Client of the process that runs SGLang's parsers of tool calls and reasoning.

Importing the parsers takes seconds and 0.4 GB, needs SGLang's environment, and they keep state
while a reply streams. So each proxy has one process for them, which is restarted when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import (
    ClusterError,
    ParserLostError,
    ParserStuckError,
    ProxyRequestError,
)
from areal_hpc.proxy.engine.model_call import ReplyContent, ReplyToolCall, ToolChoice
from areal_hpc.wire.parsers import (
    GrammarCheckKill,
    GrammarCheckRequest,
    ParseChunkRequest,
    ParserReply,
    ParserRequest,
    ReplyParseContext,
    ToolGrammarRequest,
)

log = logging.getLogger(__name__)
PARSER_MODULE = "areal_hpc.inference.parser_process"
MAX_LINE_BYTES = 1 << 28
START_TIMEOUT_S = 600.0
RESTART_PAUSE_S = 0.5
ANSWER_TIMEOUT_S = 30.0
"""Limit for a request, which takes milliseconds: some of SGLang's regular expressions never end."""
POLLS_PER_ANSWER_TIMEOUT = 6
PROMPT_END_CHARS = 200
"""Length of the prompt's end that may contain the mark that opens the reasoning."""


class ParserProcessClient:
    """Client of the parsers of one model's formats, by SGLang's names, which all replies share.

    Their process, of SGLang's Python, starts with the first request, or by `start`. It is killed if
    a request takes longer than `answer_timeout_s`, because all others wait behind it.
    """

    def __init__(
        self,
        python: str,
        tool_parser: str | None,
        reasoning_parser: str | None,
        model_dir: Path | None = None,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self._answer_timeout_s = answer_timeout_s
        formats = (tool_parser or "", reasoning_parser or "")
        self._argv = (python, "-m", PARSER_MODULE, *formats, str(model_dir or ""))
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[ParserReply]] = {}
        self._checks: set[int] = set()
        """Requests that are not answered in order, and have limits of their own."""
        self._count = 0

    async def start(self) -> None:
        async with self._starting:
            if self._reader is not None and not self._reader.done():
                return
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                limit=MAX_LINE_BYTES,
            )
            assert process.stdout is not None
            first, problem = b"", "ended at their start: the log has their error"
            try:
                first = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
            except TimeoutError:
                problem = f"did not start within {START_TIMEOUT_S:g} s: is their storage slow?"
            finally:
                if not first:  # also after a cancellation, as the client hung up
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            if not first:
                raise ParserLostError(f"SGLang's parsers {problem}")
            self._process = process
            self._reader = asyncio.ensure_future(self._deliver_replies(process, process.stdout))

    async def run(self) -> None:
        try:
            while True:
                await self.start()
                assert self._process is not None
                code = await self._process.wait()
                log.error("SGLang's parsers ended with exit code %d", code)
                await asyncio.sleep(RESTART_PAUSE_S)
        except ParserLostError as error:
            hint = "see inference.tool_call_parser and inference.reasoning_parser"
            raise ClusterError(str(error), hint=hint) from error
        finally:
            await self.close()

    async def _deliver_replies(
        self, process: asyncio.subprocess.Process, lines: asyncio.StreamReader
    ) -> None:
        decoder = msgspec.json.Decoder(ParserReply)
        watcher = asyncio.ensure_future(self._kill_stuck_process(process))
        try:
            while line := await lines.readline():
                reply = decoder.decode(line)
                waiting = self._waiting.pop(reply.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, msgspec.DecodeError) as error:  # ValueError: a line without an end
            log.error("SGLang's parsers wrote what is no reply: %s", error)
        finally:
            stuck_call = watcher.result() if watcher.done() else None
            watcher.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # Nothing is awaited from here on, so a woken caller starts another process.
        for call, waiting in self._waiting.items():
            if waiting.done():
                continue
            if call == stuck_call:
                waiting.set_exception(ParserStuckError(self._stuck_problem))
            else:
                waiting.set_exception(ParserLostError("SGLang's parsers died"))
        self._waiting.clear()

    @property
    def _stuck_problem(self) -> str:
        return f"SGLang's parsers took longer than {self._answer_timeout_s:g} s for one request"

    async def _kill_stuck_process(self, process: asyncio.subprocess.Process) -> int:
        """Kill a process that does not finish a request in time; return the request's id.

        All requests but checks are answered in order, so the oldest is the stuck one. This counts
        polls, not time, because after a pause of the whole node no request is late.
        """
        oldest, polls = -1, 0
        while polls < POLLS_PER_ANSWER_TIMEOUT:
            await asyncio.sleep(self._answer_timeout_s / POLLS_PER_ANSWER_TIMEOUT)
            first = next((call for call in self._waiting if call not in self._checks), -1)
            polls = polls + 1 if first == oldest != -1 else 0
            oldest = first
        log.error("%s; they are started again", self._stuck_problem)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return oldest

    def allocate_id(self) -> int:
        self._count += 1
        return self._count

    async def send_request(
        self, request: ParseChunkRequest | ToolGrammarRequest | GrammarCheckRequest
    ) -> ParserReply:
        await self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        waiting: asyncio.Future[ParserReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.call] = waiting
        try:
            self._write(request)
            await self._process.stdin.drain()
        except ConnectionError as error:
            self._waiting.pop(request.call, None)
            assert self._reader is not None
            await asyncio.wait([self._reader])  # so that a retry starts another process
            raise ParserLostError("SGLang's parsers died") from error
        return await waiting

    async def fetch_grammar(
        self, tools: Sequence[dict[str, Any]], prompt: str, tool_choice: ToolChoice
    ) -> ParserReply:
        """Return the grammar that enforces a tool choice, and whether it begins after reasoning."""
        number, end, must_call = (
            self.allocate_id(),
            prompt[-PROMPT_END_CHARS:],
            tool_choice.must_call,
        )
        request = ToolGrammarRequest(
            number, [*tools], end, must_call, tool_choice.name, tool_choice.parallel
        )
        try:
            reply = await self.send_request(request)
        except ParserLostError as error:
            raise ProxyRequestError(503, str(error)) from error
        if reply.error:
            key = "tool_choice" if must_call else "parallel_tool_calls"
            raise ProxyRequestError(400, reply.error, key=key)
        return reply

    async def find_grammar_cost(self, grammar_kind: str, text: str, cpu_s: int) -> str:
        """Compile a grammar as a trial; return why it would block an engine, or an empty text.

        The trial has a process of its own and `cpu_s` seconds of a core. Cancelling ends it.
        """
        request = GrammarCheckRequest(self.allocate_id(), grammar_kind, text, cpu_s)
        self._checks.add(request.call)
        try:
            reply = await self.send_request(request)
        except asyncio.CancelledError:
            if request.call in self._waiting:
                self._write(GrammarCheckKill(request.call))
            raise
        finally:
            self._checks.discard(request.call)
        if reply.is_unknown:
            raise ParserLostError(reply.error)
        return reply.error

    def _write(self, request: ParserRequest) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")

    def build_reply_parser(self, tools: Sequence[dict[str, Any]], prompt: str) -> RemoteReplyParser:
        return RemoteReplyParser(self, ReplyParseContext([*tools], prompt[-PROMPT_END_CHARS:]))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


class RemoteReplyParser:
    """Incremental parser of one reply's text."""

    def __init__(self, parsers: ParserProcessClient, parse_context: ReplyParseContext) -> None:
        self._parsers = parsers
        self._opening: ReplyParseContext | None = parse_context
        self._number = parsers.allocate_id()

    async def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> ReplyContent:
        """Parse the next text; `is_cut` if the model did not end the reply itself.

        If a parser fails on a text, the reply stays plain text.
        """
        request = ParseChunkRequest(
            self._parsers.allocate_id(), self._number, text, is_last, is_cut, self._opening
        )
        try:
            try:
                reply = await self._parsers.send_request(request)
            except ParserLostError as error:
                is_stuck = isinstance(error, ParserStuckError)
                if is_stuck and is_last and self._opening is not None:
                    return ReplyContent(text)  # the next process would not end either
                if is_stuck or self._opening is None:
                    raise
                # The lost process kept no state before a reply's first text: send it again.
                again = msgspec.structs.replace(request, call=self._parsers.allocate_id())
                reply = await self._parsers.send_request(again)
        except ParserLostError as error:
            raise ProxyRequestError(503, str(error)) from error
        if reply.is_unknown:  # the lost process held back text of the reply
            raise ProxyRequestError(503, "SGLang's parsers died in the middle of this reply")
        self._opening = None
        if reply.error:
            log.warning("reply kept as plain text: SGLang's parser failed: %s", reply.error)
        calls = [
            ReplyToolCall(index, call.name, call.arguments)
            for index, call in enumerate(reply.calls)
        ]
        return ReplyContent(reply.text, reply.reasoning, calls)
