"""Digest of a reply: the same for as long as a journal may hold it."""

from areal_hpc.session.reply_digest import compute_reply_digest
from areal_hpc.session.tree import VersionSpan, pack_counts_as_uint16, pack_ids, pack_logprobs

REPLY = (b"1,2", pack_ids([3, 4]), pack_logprobs([-0.5, -1.0]), [VersionSpan(7, 0, 2)])


def test_a_sampling_mask_counts_and_without_one_the_digest_is_that_of_older_journals() -> None:
    assert compute_reply_digest(*REPLY, b"", b"").hex() == "27719e3f4ea52e4c23fd5d3500c9c766"
    counts = pack_counts_as_uint16([1, 1])
    masked = [compute_reply_digest(*REPLY, counts, pack_ids(ids)) for ids in ([3, 4], [3, 5])]
    assert len({compute_reply_digest(*REPLY, b"", b""), *masked}) == 3
