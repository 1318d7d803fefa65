"""Process of an answer's tests: it runs them, and prints the verdict.

`judge_main.py LITERALS TESTS OPTIONS CHANNEL_FD`, in a sandbox, with the standard library only. A
name that the tests use but do not define is the answer's: its calls go over the channel. Names of
Python and its standard library are never the answer's.
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
else:  # in a sandbox, which has no package, it lies beside this file
    sys.path.insert(0, str(Path(__file__).parent))
    literals = importlib.import_module("literals")

PASSED = "passed"
"""Last line that is printed after all tests have passed."""
_ENDS_OF_ITERATION = (StopIteration, StopAsyncIteration)
"""Exceptions that `all`, `zip` and the like treat as the end of an iterator."""


class AnswerError(Exception):
    """Error for an exception of the answer that is not built-in, or that ends an iteration."""


class RemoteObject:
    """Object of the answer, with calls, attributes, items and iteration, but no equality."""

    def __init__(self, judge: "AnswerClient", target: str | int) -> None:
        self.__dict__.update(_judge=judge, _target=target)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the answer's function or method."""
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
    """The tests' end of the channel.

    With `arguments_change` a function's changes of its arguments are applied to the tests' own.
    """

    def __init__(self, channel: literals.JsonLineSocket, *, arguments_change: bool) -> None:
        self._channel, self._arguments_change = channel, arguments_change
        started = channel.receive()
        self._check_reply(started)
        self.names = {
            name: self._resolve_name(name)
            for name in map(str, started["names"])
            # A name that Python itself looks up, such as `__builtins__`, is never the answer's.
            if not (name.startswith("__") or hasattr(builtins, name))
        }

    def request_operation(
        self,
        target: str | int,
        operation: str,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Request an operation on an object of the answer, and return the value."""
        self._channel.send(
            {
                "target": target,
                "operation": operation,
                "arguments": [literals.encode(item, self._get_remote_number) for item in arguments],
                "keywords": {
                    name: literals.encode(item, self._get_remote_number)
                    for name, item in (keywords or {}).items()
                },
            }
        )
        reply = self._channel.receive()
        self._check_reply(reply)
        if self._arguments_change:
            for argument, changed in zip(arguments, reply["arguments"], strict=True):
                self._update_in_place(argument, literals.decode(changed, self._make_remote))
        return literals.decode(reply["value"], self._make_remote)

    def _resolve_name(self, name: str) -> Any:
        if name in sys.stdlib_module_names:
            with contextlib.suppress(ImportError):  # a module of another system, as `winreg`
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
    """Run the tests, and print `PASSED` if all of them passed."""
    options = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    judge = AnswerClient(literals.JsonLineSocket(int(sys.argv[4])), **options)
    tests = compile(Path(sys.argv[2]).read_text(encoding="utf-8"), "tests.py", "exec")
    module = types.ModuleType("__main__")  # `unittest.main` imports it by this name
    vars(module).update(judge.names)
    sys.modules["__main__"], sys.argv = module, ["tests.py"]
    try:
        exec(tests, vars(module))
    except SystemExit:
        sys.exit("the tests ended before their last line")
    sys.stdout.write(f"\n{PASSED}\n")


if __name__ == "__main__":
    main()
