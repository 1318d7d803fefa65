"""Process of an answer: runs its source, then does what the tests ask.

`answer_main.py LITERALS ANSWER CHANNEL_FD`, in a sandbox, with the standard library only. Nothing
here is trusted: an answer may replace all of it, and can then say other values, and no more.
"""

import importlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.reward.judging import literals
else:  # it lies beside this file, of a sandbox that has no package
    sys.path.insert(0, str(Path(__file__).parent))
    literals = importlib.import_module("literals")

MAX_ITERATED_ITEMS = 100_000
"""Of an iterator that the tests go through."""


class AnswerProgram:
    """The names that an answer defines, and its objects that the tests know by number."""

    def __init__(self, answer_source: str) -> None:
        self.names: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """By `id`, which nothing else gets while the list holds the object."""
        exec(compile(answer_source, "answer.py", "exec"), self.names)

    def number_object(self, value: Any) -> int:
        """The number of an object; the same for the same one."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def execute_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request of the tests."""
        target = request["target"]
        found = self.names[target] if isinstance(target, str) else self._objects[target]
        arguments = [
            literals.decode(one, self._objects.__getitem__) for one in request["arguments"]
        ]
        keywords = {
            name: literals.decode(one, self._objects.__getitem__)
            for name, one in request["keywords"].items()
        }
        match request["operation"]:
            case "call":
                value = found(*arguments, **keywords)
            case "attribute":
                value = getattr(found, *arguments)
            case "item":
                value = found[arguments[0]]
            case "length":
                value = len(found)
            case "items":
                value = list(itertools.islice(found, MAX_ITERATED_ITEMS))
            case _:
                raise TypeError("there is no such operation")
        # An argument may have been changed in place, as sorting does.
        changed = [literals.encode(one, self.number_object) for one in arguments]
        return {"value": literals.encode(value, self.number_object), "arguments": changed}


def main() -> None:
    """Run the answer, then work until the tests have ended."""
    channel = literals.JsonLineSocket(int(sys.argv[3]))
    try:
        answer = AnswerProgram(Path(sys.argv[2]).read_text(encoding="utf-8"))
        channel.send({"names": [name for name in answer.names if not name.startswith("__")]})
    except Exception as error:  # boundary: the model's code
        channel.send({"error": type(error).__name__, "message": str(error)[:1000]})
        return
    while True:
        try:
            request = channel.receive()
        except literals.BrokenChannelError:
            return
        try:
            channel.send(answer.execute_request(request))
        except literals.BrokenChannelError:
            return
        except Exception as error:  # boundary: the model's code
            kind = next(one for one in type(error).__mro__ if one.__module__ == "builtins")
            channel.send({"error": kind.__name__, "message": str(error)[:1000]})


if __name__ == "__main__":
    main()
