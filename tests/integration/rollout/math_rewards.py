"""A user's script, without a guard of its main module: asks for rewards that nobody could compute.

Its arguments: the limit of a comparison, how it asks, then the answers of the model, each with
the right one before it.
Prints, as JSON, the reward of each and that of an easy one after them, and the seconds of each.
"""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

from areal_hpc.reward import math, math_process
from areal_hpc.reward.verifier_pool import VerifierPool

limit_s, how, *answers = sys.argv[1:]
math._VERIFIER_POOL = VerifierPool(
    Path(math_process.__file__),
    str(float(limit_s) + 1.0),
    str(math.MATH_MEMORY_BYTES),
    timeout_s=float(limit_s),
)
questions = [*zip(answers[::2], answers[1::2], strict=True), ("\\frac{1}{2}", "0.5")]
rewards: list[float] = []
seconds: list[float] = []


def ask() -> None:
    for answer, given in questions:
        began = time.monotonic()
        rewards.append(math.math_reward("", f"so $\\boxed{{{given}}}$.", [], [], answer=answer))
        seconds.append(time.monotonic() - began)


async def ask_in_loop() -> None:
    ask()


if how == "event loop":
    asyncio.run(ask_in_loop())
elif how == "threads":
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    ask()
print(json.dumps([rewards, seconds]))
