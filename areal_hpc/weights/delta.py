"""The changed values of a bucket, and how a cell gets the whole from them. Pure, numpy alone.

Training changes few of the bits that are served: most updates of a bfloat16 value are smaller than
its last bit. What is written of a bucket are the places whose bits differ and their new values.
Places are counted in words of the bucket's smallest element, in blocks of 65,536 words: how many
each block has, then two bytes for each.

    magic | words of the bucket, bytes of a word, changed words | per block | per place | values
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.errors import WeightSyncError

Bytes = npt.NDArray[np.uint8]

MANIFEST = "manifest.json"
_MAGIC = b"ADELTA01"
_HEAD = struct.Struct("<8sQQQ")
_BLOCK_BITS = 16
_BLOCK_WORDS = 1 << _BLOCK_BITS


class FileEntry(msgspec.Struct, frozen=True):
    """One bucket of a folder."""

    name: str
    is_delta: bool
    digest: str
    """SHA-256 of the bucket's bytes when it is whole."""


class FolderManifest(msgspec.Struct, frozen=True):
    """What a cell makes its copy of a version from."""

    version: str
    base: str
    """The version that changes are relative to; empty when every file is whole."""
    files: list[FileEntry]


def encode(old: Bytes, new: Bytes, word_bytes: int) -> bytes | None:
    """What has to be sent to whoever has `old`; None if `new` itself is no longer.

    Args:
        old: A bucket.
        new: The same bucket of a later version.
        word_bytes: Size of its smallest element.
    """
    word = f"<u{word_bytes}"
    new_words = new.view(word)
    places = np.flatnonzero(old.view(word) != new_words)
    blocks = -(-len(new_words) // _BLOCK_WORDS)
    if _HEAD.size + 4 * blocks + len(places) * (2 + word_bytes) >= len(new):
        return None
    per_block = np.bincount(places >> _BLOCK_BITS, minlength=blocks).astype("<u4")
    low = (places & (_BLOCK_WORDS - 1)).astype("<u2")
    head = _HEAD.pack(_MAGIC, len(new_words), word_bytes, len(places))
    return b"".join((head, per_block.tobytes(), low.tobytes(), new_words[places].tobytes()))


def apply(target: Bytes, delta: bytes) -> None:
    """Make the newer bucket of the older one, in place.

    Raises:
        WeightSyncError: The changes are not of this bucket, were cut short or damaged.
    """
    if len(delta) < _HEAD.size:
        raise WeightSyncError(f"expected at least {_HEAD.size} bytes of changes, got {len(delta)}")
    magic, words, word_bytes, count = _HEAD.unpack_from(delta)
    blocks = -(-words // _BLOCK_WORDS)
    expected = (_MAGIC, len(target), _HEAD.size + 4 * blocks + count * (2 + word_bytes))
    if (magic, words * word_bytes, len(delta)) != expected:
        raise WeightSyncError(
            f"expected changes of a bucket of {len(target)} bytes, got {len(delta)} bytes "
            f"for one of {words * word_bytes}"
        )
    start = _HEAD.size
    per_block = np.frombuffer(delta, "<u4", blocks, start)
    low = np.frombuffer(delta, "<u2", count, start + 4 * blocks)
    values = np.frombuffer(delta, f"<u{word_bytes}", count, start + 4 * blocks + 2 * count)
    if (told := int(per_block.sum())) != count:
        raise WeightSyncError(f"expected {count} changed words, its blocks have {told}")
    places = np.repeat(np.arange(blocks, dtype=np.int64) << _BLOCK_BITS, per_block) + low
    if count and places.max() >= words:
        raise WeightSyncError(f"expected changed words below {words}, got {places.max()}")
    target.view(f"<u{word_bytes}")[places] = values
