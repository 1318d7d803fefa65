"""Process of an answer: it runs the answer's source, then serves requests of the tests.

`answer_main.py LITERALS ANSWER CHANNEL_FD`, in a sandbox, with the standard library only. The tests
trust nothing here: an answer may replace all of it, and can then only send other values.
"""

import importlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.reward.judging import literals
else:  # in a sandbox, which has no package, it lies beside this file
    sys.path.insert(0, str(Path(__file__).parent))
    literals = importlib.import_module("literals")

MAX_ITERATED_ITEMS = 100_000
"""Maximum number of items of an iterable that the tests iterate over."""


class AnswerProgram:
    """Names that an answer defines, and its objects that the tests refer to by number."""

    def __init__(self, answer_source: str) -> None:
        self.names: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        """Numbers by `id`, which stays unique while the list holds the object."""
        exec(compile(answer_source, "answer.py", "exec"), self.names)

    def number_object(self, value: Any) -> int:
        """Return the number of an object, which is assigned once."""
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def execute_request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request of the tests, and return the reply."""
        key = request["target"]
        target = self.names[key] if isinstance(key, str) else self._objects[key]
        arguments = [
            literals.decode(data, self._objects.__getitem__) for data in request["arguments"]
        ]
        keywords = {
            name: literals.decode(data, self._objects.__getitem__)
            for name, data in request["keywords"].items()
        }
        match request["operation"]:
            case "call":
                value = target(*arguments, **keywords)
            case "attribute":
                value = getattr(target, *arguments)
            case "item":
                value = target[arguments[0]]
            case "length":
                value = len(target)
            case "items":
                value = list(itertools.islice(target, MAX_ITERATED_ITEMS))
            case _:
                raise TypeError("there is no such operation")
        # The call may have changed an argument in place, as sorting does.
        changed = [literals.encode(argument, self.number_object) for argument in arguments]
        return {"value": literals.encode(value, self.number_object), "arguments": changed}


def main() -> None:
    """Run the answer, then serve requests until the tests have ended."""
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
            kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
            channel.send({"error": kind.__name__, "message": str(error)[:1000]})


if __name__ == "__main__":
    main()
