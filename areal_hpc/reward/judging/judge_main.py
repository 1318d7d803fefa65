"""Process of the tests of an answer: prints the verdict.

`judge_main.py LITERALS TESTS OPTIONS CHANNEL_FD`, in a sandbox, with the standard library only. A
name that the tests use and do not define is the answer's: calls of it go over the channel. Names of
Python and of its library never are.
"""

import builtins
import contextlib
import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.reward.judging import literals
else:  # it lies beside this file, of a sandbox that has no package
    sys.path.insert(0, str(Path(__file__).parent))
    literals = importlib.import_module("literals")

PASSED = "passed"
"""The last line that is printed when all tests have passed."""
_ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)
"""What `all`, `zip` and the like take for the end of what they go through."""


class AnswerError(Exception):
    """The answer raised what is not one of Python's own exceptions, or what ends an iteration."""


class RemoteObject:
    """An object of the answer: it can be called, asked and gone through, but equals nothing."""

    def __init__(self, judge: "AnswerClient", target: str | int) -> None:
        self.__dict__.update(_judge=judge, _target=target)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the answer's function or method returns."""
        return self._judge.request_operation(self._target, "call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._judge.request_operation(self._target, "attribute", (name,))

    def __getitem__(self, key: Any) -> Any:
        return self._judge.request_operation(self._target, "item", (key,))

    def __len__(self) -> int:
        length: int = self._judge.request_operation(self._target, "length")
        return length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._judge.request_operation(self._target, "items"))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            return bool(self._target == other._target)
        raise TypeError("an object of the answer is compared with a value")

    def __bool__(self) -> bool:
        raise TypeError("an object of the answer is neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class AnswerClient:
    """The tests' side of the channel.

    `arguments_change`: what a function does to its arguments is done to those of the tests.
    """

    def __init__(self, channel: literals.JsonLineSocket, *, arguments_change: bool) -> None:
        self._channel, self._arguments_change = channel, arguments_change
        started = channel.receive()
        self._check_reply(started)
        self.names = {
            name: self._resolve_name(name)
            for name in map(str, started["names"])
            # What Python itself looks up, such as `__builtins__`, is never the answer's.
            if not (name.startswith("__") or hasattr(builtins, name))
        }

    def request_operation(
        self,
        target: str | int,
        operation: str,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Have the answer do something; what came of it."""
        self._channel.send(
            {
                "target": target,
                "operation": operation,
                "arguments": [literals.encode(one, self._get_remote_number) for one in arguments],
                "keywords": {
                    name: literals.encode(one, self._get_remote_number)
                    for name, one in (keywords or {}).items()
                },
            }
        )
        reply = self._channel.receive()
        self._check_reply(reply)
        if self._arguments_change:
            for mine, changed in zip(arguments, reply["arguments"], strict=True):
                self._update_in_place(mine, literals.decode(changed, self._make_remote))
        return literals.decode(reply["value"], self._make_remote)

    def _resolve_name(self, name: str) -> Any:
        if name in sys.stdlib_module_names:
            with contextlib.suppress(ImportError):  # one of another system, as `winreg`
                return importlib.import_module(name)
        return RemoteObject(self, name)

    @staticmethod
    def _update_in_place(own_value: Any, changed_value: Any) -> None:
        if type(own_value) is not type(changed_value):
            return
        if isinstance(own_value, list):
            own_value[:] = changed_value
        elif isinstance(own_value, (dict, set)):
            own_value.clear()
            own_value.update(changed_value)

    @staticmethod
    def _get_remote_number(value: Any) -> int:
        if isinstance(value, RemoteObject) and isinstance(value._target, int):
            return value._target
        raise TypeError(f"{type(value).__name__} is no value that an answer can be given")

    def _make_remote(self, object_number: int) -> RemoteObject:
        return RemoteObject(self, int(object_number))

    @staticmethod
    def _check_reply(reply: dict[str, Any]) -> None:
        if "error" in reply:
            kind: Any = getattr(builtins, str(reply["error"]), None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            if not is_error or issubclass(kind, _ENDS_OF_ITERATION):
                kind = AnswerError
            raise kind(str(reply.get("message", "")))


def main() -> None:
    """Run the tests, and say so if all of them passed."""
    options = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    judge = AnswerClient(literals.JsonLineSocket(int(sys.argv[4])), **options)
    tests = compile(Path(sys.argv[2]).read_text(encoding="utf-8"), "tests.py", "exec")
    module = types.ModuleType("__main__")  # as `unittest.main` looks for it
    vars(module).update(judge.names)
    sys.modules["__main__"], sys.argv = module, ["tests.py"]
    try:
        exec(tests, vars(module))
    except SystemExit:
        sys.exit("the tests ended before their last line")
    sys.stdout.write(f"\n{PASSED}\n")


if __name__ == "__main__":
    main()
