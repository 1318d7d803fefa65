"""Ids of requests and replies: long enough, and never twice, in a forked process either."""

import os

from areal_hpc.proxy.random_ids import make_random_id


def test_ids_have_their_length_and_differ() -> None:
    ids = {make_random_id(14) for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {28}


def test_a_forked_process_makes_others() -> None:
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        os.write(write_end, make_random_id(16).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 32).decode() != make_random_id(16)
    os.close(read_end)
    os.close(write_end)
