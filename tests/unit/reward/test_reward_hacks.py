"""Answers that seek a reward without solving the task score 0.

No function passes the tests, or only the right one; an answer that could see or touch them, its
judge or the verdict would score 1.
"""

import pytest

from areal_hpc.reward.code import code_reward

PROGRAM = {"program": "assert solve(20) == 6765\nassert solve(1) == 1\nassert solve(0) == 0\n"}
CASES = {"cases": [{"input": "20\n", "output": "6765\n"}, {"input": "1\n", "output": "1\n"}]}
RIGHT = """
def solve(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
"""
BY_INPUT = f"{RIGHT}print(solve(int(input())))\n"

HACKS = {
    "reads its own file": (
        "import os, sys\n"
        "word = open(sys.argv[0]).read().splitlines()[-1]\n"
        "exec('print()'); exec(word); sys.stdout.flush(); os._exit(0)\n"
    ),
    "equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def solve(n): return Any()\n"
    ),
    "an integer that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def solve(n): return Any(0)\n"
    ),
    "text that equals everything": (
        "class Any(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "def solve(n): return Any()\n"
    ),
    "ends well at once": "import os\nos._exit(0)\n",
    "ends well when it is called": "import os\ndef solve(n): os._exit(0)\n",
    "leaves when it is called": "import sys\ndef solve(n): sys.exit(0)\n",
    "ends well at the end": (
        "import atexit, os\natexit.register(os._exit, 0)\ndef solve(n): return 1\n"
    ),
    "says the verdict": "print('passed', flush=True)\ndef solve(n): print('passed'); return 0\n",
    "says the verdict on every descriptor": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'passed\\n')\n"
        "    except OSError: pass\n"
        "def solve(n): return 0\n"
    ),
    "answers on the channel before it is asked": (
        "import os\n"
        "for fd in range(3, 64):\n"
        '    try: os.write(fd, b\'{"value": true, "arguments": []}\\n\' * 9)\n'
        "    except OSError: pass\n"
        "def solve(n): return 0\n"
    ),
    "redefines what tests use": (
        "import builtins\n"
        "class AssertionError(Exception): pass\n"
        "builtins.AssertionError = AssertionError\n"
        "int = bool = len = lambda *a: True\n"
        "def solve(n): return True\n"
    ),
    "replaces a module of the library": (
        "import sys, types\n"
        "sys.modules['json'] = types.SimpleNamespace(loads=lambda s: {'names': []}, dumps=str)\n"
        "def solve(n): return None\n"
    ),
    "patches the codec": (
        "import sys\n"
        "codec = sys.modules['literals']\n"
        "codec.encode = lambda value, refer: True\n"
        "main = sys.modules['__main__']\n"
        "main.encode = lambda value, refer: True\n"
        "def solve(n): return 0\n"
    ),
    "looks for the expected value on the stack": (
        "import sys\n"
        "def solve(n):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if value == 6765: return value\n"
        "        frame = frame.f_back\n"
        "    return -1\n"
    ),
    "looks for the tests in memory": (
        "import gc, re\n"
        "def solve(n):\n"
        "    for one in gc.get_objects():\n"
        "        found = re.search(r'solve\\(%d\\) == (\\d+)' % n, repr(one)[:10000]) "
        "if isinstance(one, (str, dict, list)) else None\n"
        "        if found: return int(found[1])\n"
        "    return -1\n"
    ),
    "looks for the tests in files": (
        "import os, re\n"
        "def solve(n):\n"
        "    for folder in ('/sandbox', '/tmp', '/proc', '/dev/shm'):\n"
        "        for root, _, names in os.walk(folder):\n"
        "            for name in names[:200]:\n"
        "                path = os.path.join(root, name)\n"
        "                try: text = open(path, errors='replace').read(100000)\n"
        "                except (OSError, ValueError): continue\n"
        "                found = re.search(r'solve\\(%d\\) == (\\d+)' % n, text)\n"
        "                if found: return int(found[1])\n"
        "    return -1\n"
    ),
    "looks into other processes": (
        "import os, re\n"
        "def solve(n):\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        names = [f'/proc/{pid}/{name}' for name in ('cmdline', 'environ')]\n"
        "        try: text = ''.join(open(name).read() for name in names)\n"
        "        except OSError: continue\n"
        "        found = re.search(r'== (\\d+)', text)\n"
        "        if found: return int(found[1])\n"
        "    return -1\n"
    ),
    "raises what a test might expect": "def solve(n): raise AssertionError\n",
    "returns an object that does what it is told": (
        "class Fake:\n"
        "    def __getattr__(self, name): return self\n"
        "    def __call__(self, *a, **k): return self\n"
        "    def __bool__(self): return True\n"
        "    def __len__(self): return 6765\n"
        "    def __iter__(self): return iter([6765])\n"
        "def solve(n): return Fake()\n"
    ),
    "is no number": "def solve(n): return float('nan')\n",
    "stops the judge by signals": (
        "import os, signal\n"
        "for pid in [*range(1, 50), os.getppid()]:\n"
        "    try: os.kill(pid, signal.SIGTERM) if pid != os.getpid() else None\n"
        "    except OSError: pass\n"
        "def solve(n): return 0\n"
    ),
}


@pytest.mark.parametrize("name", HACKS)
def test_a_hack_is_no_solution(name: str) -> None:
    answer = f"```python\n{HACKS[name]}```"
    assert code_reward("", answer, [], [], PROGRAM) == 0.0
    assert code_reward("", answer, [], [], CASES) == 0.0


def test_an_answer_gives_tests_no_builtins() -> None:
    speaks_for_itself = (
        "import os, sys, literals\n"
        "channel = literals.JsonLineSocket(int(sys.argv[3]))\n"
        "channel.send({'names': ['__builtins__', 'solve']})\n"
        "while True:\n"
        "    try: asked = channel.receive()\n"
        "    except literals.BrokenChannelError: os._exit(0)\n"
        "    value = 0 if asked['operation'] == 'call' else ['object', 1]\n"
        "    channel.send({'value': value, 'arguments': asked['arguments']})\n"
    )
    answer = f"```python\n{speaks_for_itself}```"
    for test in ("assert abs(solve(20) - 6765) < 1", "assert sorted(solve(20)) == sorted([6765])"):
        assert code_reward("", answer, [], [], {"program": test}) == 0.0, test


def test_the_right_answer_is_one() -> None:
    assert code_reward("", f"```python\n{RIGHT}```", [], [], PROGRAM) == 1.0
    assert code_reward("", f"```python\n{BY_INPUT}```", [], [], CASES) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(solve, [20, 1]))",
        "assert not [1 for got, want in zip(map(solve, [20]), [6765]) if got != want]",
        "assert not any(map(lambda n: solve(n) != 6765, [20]))",
    ],
)
def test_what_ends_an_iteration_ends_no_test(test: str) -> None:
    for error in ("StopIteration", "StopAsyncIteration", "type('Mine', (StopIteration,), {})"):
        answer = f"```python\ndef solve(n): raise {error}\n```"
        assert code_reward("", answer, [], [], {"program": test}) == 0.0


def test_arguments_are_copies_where_a_task_does_not_say_that_they_change() -> None:
    emptied = "```python\ndef solve(xs): xs.clear(); return []\n```"
    test = "xs = [3, 1, 2]\nassert solve(xs) == sorted(xs)"
    assert code_reward("", emptied, [], [], {"program": test}) == 0.0
    in_place = "```python\ndef sort_it(x): x.sort()\n```"
    sorts = {"program": "x = [3, 1, 2]\nsort_it(x)\nassert x == [1, 2, 3]"}
    assert code_reward("", in_place, [], [], sorts) == 0.0
    assert code_reward("", in_place, [], [], {**sorts, "arguments_change": True}) == 1.0


@pytest.mark.parametrize(
    "test",
    [
        "assert not is_odd(2)\nassert is_odd(3)",
        "assert all(map(is_odd, [1, 3])), 'a function as an argument of Python\\'s own'",
        "assert pairs({'a': 1}) == [('a', 1)]",
        "assert list(count(3)) == [0, 1, 2]",
        "p = Point(1, 2)\nassert p.norm() == 5 and p.x == 1\nassert add([p, Point(3, 4)]) == 10",
        "import math\nassert math.isclose(third(), 1 / 3)",
        "try:\n    fail()\n    assert False\n"
        "except ValueError as error:\n    assert 'no' in str(error)",
        "def check(candidate):\n    assert candidate(5)\ncheck(is_odd)",
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(pairs({}), [])\n"
        "result = unittest.main(exit=False).result\nassert result.wasSuccessful()",
        "assert same(b'\\x00') == b'\\x00' and same(1j) == 1j and same({1}) == {1}\n"
        "assert same(None) is None and same(10 ** 50) == 10 ** 50 and same((1, [2])) == (1, [2])",
    ],
)
def test_tests_of_the_usual_forms_work_over_the_channel(test: str) -> None:
    answer = (
        "def is_odd(n): return n % 2 == 1\n"
        "def pairs(d): return list(d.items())\n"
        "def count(n): yield from range(n)\n"
        "class Point:\n"
        "    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def norm(self): return self.x ** 2 + self.y ** 2\n"
        "def add(points): return sum(p.x + p.y for p in points)\n"
        "def third(): return 1 / 3\n"
        "def fail(): raise ValueError('no')\n"
        "def same(x): return x\n"
        "nt = turtle = winreg = 'names of modules that this machine has not'\n"
    )
    assert code_reward("", f"```python\n{answer}```", [], [], {"program": test}) == 1.0
