"""Small Python modules with faults to put into them, for repair tasks."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RepairModule:
    """A function that is right, and ways to make it wrong."""

    name: str
    """Name of the module and of its function."""
    purpose: str
    source: str
    faults: tuple[tuple[str, str], ...]
    """Pairs of right source text and its faulty replacement."""
    draw_arguments: Callable[[random.Random], list[Any]]
    """Arguments of a call."""


def _draw_numbers(rng: random.Random, low: int = -20, high: int = 20) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(3, 9))]


def _draw_word(rng: random.Random, alphabet: str = "abcde", max_letters: int = 9) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(3, max_letters)))


REPAIR_MODULES = (
    RepairModule(
        "running_total",
        "returns the sums of the first 1, 2, 3, ... numbers of a list",
        "def running_total(numbers):\n"
        "    totals, total = [], 0\n"
        "    for number in numbers:\n"
        "        total += number\n"
        "        totals.append(total)\n"
        "    return totals\n",
        (
            ("total += number", "total = number"),
            ("total += number", "total -= number"),
            ("totals.append(total)", "totals.append(number)"),
            ("return totals", "return totals[:-1]"),
        ),
        lambda rng: [_draw_numbers(rng)],
    ),
    RepairModule(
        "largest_gap",
        "returns the largest difference between neighbors of a list that is put in order",
        "def largest_gap(numbers):\n"
        "    ordered = sorted(numbers)\n"
        "    gap = 0\n"
        "    for left, right in zip(ordered, ordered[1:]):\n"
        "        gap = max(gap, right - left)\n"
        "    return gap\n",
        (
            ("sorted(numbers)", "list(numbers)"),
            ("max(gap, right - left)", "right - left"),
            ("ordered[1:]", "ordered[2:]"),
            ("right - left", "right + left"),
        ),
        lambda rng: [_draw_numbers(rng)],
    ),
    RepairModule(
        "count_words",
        "counts the words of a text, whatever their case, as a dict",
        "def count_words(text):\n"
        "    counts = {}\n"
        "    for word in text.lower().split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n"
        "    return counts\n",
        (
            ("text.lower().split()", "text.split()"),
            ("counts.get(word, 0) + 1", "1"),
            ("counts.get(word, 0)", "counts.get(word, 1)"),
            ("text.lower().split()", "text.lower()"),
        ),
        lambda rng: [" ".join(rng.choice(("To", "to", "be", "Be", "or")) for _ in range(8))],
    ),
    RepairModule(
        "is_palindrome",
        "tells whether the letters of a text read the same backwards, whatever their case",
        "def is_palindrome(text):\n"
        "    letters = [letter.lower() for letter in text if letter.isalpha()]\n"
        "    return letters == letters[::-1]\n",
        (
            ("letter.lower()", "letter"),
            (" if letter.isalpha()", ""),
            ("letters[::-1]", "letters[::1]"),
            ("letters == letters", "letters != letters"),
        ),
        lambda rng: [rng.choice(("Abb, a", "Ab ca", "a b A", "xyz", "Noon!", "No on x"))],
    ),
    RepairModule(
        "run_lengths",
        "returns [letter, count] for each run of one letter in a text",
        "def run_lengths(text):\n"
        "    runs = []\n"
        "    for letter in text:\n"
        "        if runs and runs[-1][0] == letter:\n"
        "            runs[-1][1] += 1\n"
        "        else:\n"
        "            runs.append([letter, 1])\n"
        "    return runs\n",
        (
            ("runs[-1][1] += 1", "runs[-1][1] = 1"),
            ("[letter, 1]", "[letter, 0]"),
            ("runs[-1][0] == letter", "runs[0][0] == letter"),
            ("return runs", "return runs[1:]"),
        ),
        lambda rng: [_draw_word(rng, "ab", 12)],
    ),
    RepairModule(
        "clamp_all",
        "returns the numbers of a list, each at least `low` and at most `high`",
        "def clamp_all(numbers, low, high):\n"
        "    return [min(max(number, low), high) for number in numbers]\n",
        (
            ("min(max(number, low), high)", "max(number, low)"),
            ("min(max(number, low), high)", "min(number, high)"),
            ("min(max(number, low), high)", "max(min(number, low), high)"),
            ("for number in numbers", "for number in numbers if number > low"),
        ),
        lambda rng: [_draw_numbers(rng), -7, 8],
    ),
    RepairModule(
        "merge_sorted",
        "merges two ordered lists into one",
        "def merge_sorted(left, right):\n"
        "    merged, i, j = [], 0, 0\n"
        "    while i < len(left) and j < len(right):\n"
        "        if left[i] <= right[j]:\n"
        "            merged.append(left[i])\n"
        "            i += 1\n"
        "        else:\n"
        "            merged.append(right[j])\n"
        "            j += 1\n"
        "    return merged + left[i:] + right[j:]\n",
        (
            ("left[i] <= right[j]", "left[i] >= right[j]"),
            (" + left[i:] + right[j:]", ""),
            (" + right[j:]", ""),
            ("merged + left[i:]", "merged + left[i + 1:]"),
        ),
        lambda rng: [sorted(_draw_numbers(rng)), sorted(_draw_numbers(rng))],
    ),
    RepairModule(
        "to_digits",
        "returns the digits of a whole number of at least 0 in a base, the highest first",
        "def to_digits(number, base):\n"
        "    digits = [number % base]\n"
        "    while number >= base:\n"
        "        number //= base\n"
        "        digits.append(number % base)\n"
        "    return digits[::-1]\n",
        (
            ("number >= base", "number > base * base"),
            ("digits[::-1]", "digits"),
            ("number % base]", "number // base]"),
            ("return digits[::-1]", "return digits[::-1][1:]"),
        ),
        lambda rng: [rng.randint(30, 9000), rng.choice((2, 5, 10))],
    ),
    RepairModule(
        "group_by_similar_length",
        "groups words by their length, as a list of [length, words] in order",
        "def group_by_similar_length(words):\n"
        "    groups = {}\n"
        "    for word in words:\n"
        "        groups.setdefault(len(word), []).append(word)\n"
        "    return [[length, groups[length]] for length in sorted(groups)]\n",
        (
            ("sorted(groups)", "sorted(groups, reverse=True)"),
            ("groups.setdefault(len(word), []).append(word)", "groups[len(word)] = [word]"),
            ("len(word)", "word[0]"),
            ("[length, groups[length]]", "[length, len(groups[length])]"),
        ),
        lambda rng: [[_draw_word(rng) for _ in range(7)]],
    ),
    RepairModule(
        "rotate",
        "moves the items of a list to the left by `places`, around its end",
        "def rotate(items, places):\n"
        "    cut = places % len(items)\n"
        "    return items[cut:] + items[:cut]\n",
        (
            ("items[cut:] + items[:cut]", "items[:cut] + items[cut:]"),
            ("places % len(items)", "places"),
            ("items[cut:]", "items[cut + 1:]"),
            ("places % len(items)", "-places % len(items)"),
        ),
        lambda rng: [_draw_numbers(rng), rng.randint(10, 25)],
    ),
    RepairModule(
        "greatest_divisor",
        "returns the greatest common divisor of two whole numbers above 0",
        "def greatest_divisor(first, second):\n"
        "    while second:\n"
        "        first, second = second, first % second\n"
        "    return first\n",
        (
            ("return first", "return second"),
            ("first % second", "first - first % second and first // second % second"),
            ("while second:", "if second:"),
            ("return first", "return first * 2"),
        ),
        lambda rng: [rng.randint(2, 12) * 6, rng.randint(2, 12) * 4],
    ),
    RepairModule(
        "second_largest",
        "returns the second largest of the different numbers of a list, or None",
        "def second_largest(numbers):\n"
        "    ordered = sorted(set(numbers))\n"
        "    return ordered[-2] if len(ordered) > 1 else None\n",
        (
            ("sorted(set(numbers))", "sorted(numbers)"),
            ("ordered[-2]", "ordered[1]"),
            ("ordered[-2]", "ordered[-1]"),
            ("len(ordered) > 1", "len(ordered) > 9"),
        ),
        lambda rng: [[*_draw_numbers(rng), 21, 21]],
    ),
    RepairModule(
        "transpose",
        "swaps rows and columns of a table, a list of rows",
        "def transpose(rows):\n"
        "    return [[row[place] for row in rows] for place in range(len(rows[0]))]\n",
        (
            ("range(len(rows[0]))", "range(len(rows))"),
            ("row[place]", "row[0]"),
            ("for row in rows]", "for row in rows[1:]]"),
            ("range(len(rows[0]))", "range(1, len(rows[0]))"),
        ),
        lambda rng: [[[rng.randint(0, 9) for _ in range(4)] for _ in range(3)]],
    ),
    RepairModule(
        "balanced",
        "tells whether the brackets ( ) and [ ] of a text match",
        "def balanced(text):\n"
        "    open_ones = []\n"
        "    for letter in text:\n"
        "        if letter in '([':\n"
        "            open_ones.append(letter)\n"
        "        elif letter in ')]':\n"
        "            if not open_ones or open_ones.pop() + letter not in ('()', '[]'):\n"
        "                return False\n"
        "    return not open_ones\n",
        (
            ("return not open_ones", "return True"),
            ("('()', '[]')", "('()', '[]', '[)', '(]')"),
            ("not open_ones or ", "open_ones and "),
            ("return False", "return True"),
        ),
        lambda rng: [rng.choice(("([])", "([)]", "(", ")(", "[[]]()", "a(b]c", "]", "[(])"))],
    ),
)
