"""Client of the tool-call and reasoning parser process.

Importing them takes seconds and 0.4 GB, needs SGLang's environment, and they are stateful while
a reply streams: so one process per proxy, started when the proxy starts, restarted when it dies.
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
"""For one request, which takes milliseconds. Some of SGLang's regular expressions take for ever."""
POLLS_PER_ANSWER_TIMEOUT = 6
PROMPT_END_CHARS = 200
"""How much of the prompt may hold the mark that opens the reasoning."""


class ParserProcessClient:
    """The parsers of one model's formats, by SGLang's names, shared by all replies.

    Their process, of SGLang's Python, starts with the first request, or by `start`. One that works
    on a request for longer than `answer_timeout_s` is ended: all others wait behind that.
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
        """Requests that are not answered in turn, and have limits of their own."""
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
                if not first:  # also if the client that needed it has hung up
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
        watcher = asyncio.ensure_future(self._end_process_when_stuck(process))
        try:
            while line := await lines.readline():
                reply = decoder.decode(line)
                waiting = self._waiting.pop(reply.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, msgspec.DecodeError) as error:  # ValueError: a line without an end
            log.error("SGLang's parsers wrote what is no reply: %s", error)
        finally:
            watcher.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ParserLostError("SGLang's parsers died"))
        self._waiting.clear()

    async def _end_process_when_stuck(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that does not come to the end of a request.

        All but checks are answered in turn, so the oldest is to blame. Polls are counted, because
        after a pause of this whole node no request is late.
        """
        oldest, polls = -1, 0
        while polls < POLLS_PER_ANSWER_TIMEOUT:
            await asyncio.sleep(self._answer_timeout_s / POLLS_PER_ANSWER_TIMEOUT)
            first = next((one for one in self._waiting if one not in self._checks), -1)
            polls = polls + 1 if first == oldest != -1 else 0
            oldest = first
        problem = f"SGLang's parsers took longer than {self._answer_timeout_s:g} s for one request"
        log.error("%s; they are started again", problem)
        if not (waiting := self._waiting.pop(oldest)).done():
            waiting.set_exception(ParserStuckError(problem))
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    def allocate_id(self) -> int:
        self._count += 1
        return self._count

    async def ask(
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
            raise ParserLostError("SGLang's parsers died") from error
        return await waiting

    async def fetch_grammar(
        self, tools: Sequence[dict[str, Any]], prompt: str, tool_choice: ToolChoice
    ) -> ParserReply:
        """Ask which grammar enforces a tool choice, and where it begins."""
        number, end, must_call = (
            self.allocate_id(),
            prompt[-PROMPT_END_CHARS:],
            tool_choice.must_call,
        )
        request = ToolGrammarRequest(
            number, [*tools], end, must_call, tool_choice.name, tool_choice.parallel
        )
        try:
            reply = await self.ask(request)
        except ParserLostError as error:
            raise ProxyRequestError(503, str(error)) from error
        if reply.error:
            key = "tool_choice" if must_call else "parallel_tool_calls"
            raise ProxyRequestError(400, reply.error, key=key)
        return reply

    async def find_grammar_cost(self, grammar_kind: str, text: str, cpu_s: int) -> str:
        """Try a grammar; say why it would hold up an engine, or nothing if it would not.

        It is tried in a process of its own, for `cpu_s` seconds of a core. Cancelling ends that.
        """
        request = GrammarCheckRequest(self.allocate_id(), grammar_kind, text, cpu_s)
        self._checks.add(request.call)
        try:
            reply = await self.ask(request)
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
    """Takes the text of one reply, gives what can be shown of it."""

    def __init__(self, parsers: ParserProcessClient, parse_context: ReplyParseContext) -> None:
        self._parsers = parsers
        self._opening: ReplyParseContext | None = parse_context
        self._number = parsers.allocate_id()

    async def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> ReplyContent:
        """Parse the next text. `is_cut`: the last text was cut, the model did not end there.

        Text that the parsers fail on is shown as it is: the reply is worth more than its form.
        """
        request = ParseChunkRequest(
            self._parsers.allocate_id(), self._number, text, is_last, is_cut, self._opening
        )
        try:
            try:
                reply = await self._parsers.ask(request)
            except ParserLostError as error:
                is_stuck = isinstance(error, ParserStuckError)
                if is_stuck and is_last and self._opening is not None:
                    return ReplyContent(text)  # the next process would not end either
                if is_stuck or self._opening is None:
                    raise
                # Of a reply's first text the lost process has nothing that the next will not have.
                again = msgspec.structs.replace(request, call=self._parsers.allocate_id())
                reply = await self._parsers.ask(again)
        except ParserLostError as error:
            raise ProxyRequestError(503, str(error)) from error
        if reply.is_unknown:  # what the lost process held back of it is gone
            raise ProxyRequestError(503, "SGLang's parsers died in the middle of this reply")
        self._opening = None
        if reply.error:
            log.warning("reply kept as plain text: SGLang's parser failed: %s", reply.error)
        calls = [
            ReplyToolCall(index, one.name, one.arguments) for index, one in enumerate(reply.calls)
        ]
        return ReplyContent(reply.text, reply.reasoning, calls)
