"""Threads may decode a type at once for the first time, where `msgspec.json.decode` crashes."""

import subprocess
import sys

PROGRAM = """
import sys, threading
import msgspec
from areal_hpc.wire.decoding import convert_value, decode_json

sys.setswitchinterval(1e-6)
VALUE = {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}
BODY = msgspec.json.encode(VALUE)
for _ in range(300):
    parts = [(name, msgspec.defstruct("Part", [("x", int)])) for name in "abc"]
    whole = msgspec.defstruct("Whole", parts)
    together = threading.Barrier(4)
    values = []

    def decode():
        together.wait()
        values.append(decode_json(BODY, whole).c.x)

    def convert():
        together.wait()
        values.append(convert_value(VALUE, whole).c.x)

    threads = [threading.Thread(target=work) for work in (decode, convert, decode, convert)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [3] * 4
"""


def test_a_type_is_decoded_first_by_several_threads() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
