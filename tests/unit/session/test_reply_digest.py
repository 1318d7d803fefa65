"""Digest of a reply: the same for as long as a journal may hold it."""

from areal_hpc.session.call_records import compute_reply_digest
from areal_hpc.session.tree import VersionSpan, pack_counts_as_uint16, pack_ids, pack_logprobs

REPLY = (b"1,2", pack_ids([3, 4]), pack_logprobs([-0.5, -1.0]), [VersionSpan(7, 0, 2)])


def test_the_digest_does_not_move_and_a_sampling_mask_changes_it() -> None:
    assert compute_reply_digest(*REPLY, b"", b"").hex() == "8ce6f13a9e0d97c8ada68e8420a42d26"
    counts = pack_counts_as_uint16([1, 1])
    masked = [compute_reply_digest(*REPLY, counts, pack_ids(ids)) for ids in ([3, 4], [3, 5])]
    assert len({compute_reply_digest(*REPLY, b"", b""), *masked}) == 3
