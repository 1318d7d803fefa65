"""Routes of a mixture of experts: the ids of the experts that a token visited in each layer.

They are as SGLang returns them: layers without experts count, too. Ids are uint8, or uint16 where a
layer has more than 255 experts; what is no id of an expert stands where nobody recorded any.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

RouteArray = npt.NDArray[np.unsignedinteger[Any]]


class MixtureShape(msgspec.Struct, frozen=True, array_like=True):
    """Layers of a network, experts that a token visits in each, and experts that there are."""

    layers: int
    per_token: int
    experts: int

    def make_routes(self, tokens: int) -> RouteArray:
        """Routes [tokens, layer, k] that nobody recorded."""
        dtype: np.dtype[Any] = np.dtype(np.uint8 if self.experts < 256 else np.uint16)
        return np.full((tokens, self.layers, self.per_token), np.iinfo(dtype).max, dtype)


class RecordedRoutes(msgspec.Struct, frozen=True, array_like=True):
    """Routes of the tokens before the last one of a sequence, which no pass has read yet."""

    mixture: MixtureShape
    packed: bytes

    def unpack(self) -> RouteArray:
        """Routes [t, layer, k]; the last one is of the sequence's last token but one."""
        empty = self.mixture.make_routes(0)
        return np.frombuffer(self.packed, empty.dtype).reshape(-1, *empty.shape[1:])


def lay_out_routes(
    parts: Iterable[tuple[int, RouteArray | None]], tokens: int
) -> RouteArray | None:
    """Routes [tokens, layer, k], each part from its place on; None without a part."""
    held = [(first, part) for first, part in parts if part is not None]
    if not held:
        return None
    _, one = held[0]
    routes_TLK = np.full((tokens, *one.shape[1:]), np.iinfo(one.dtype).max, one.dtype)
    for first, part in held:
        routes_TLK[first : first + len(part)] = part
    return routes_TLK


def record_engine_routes(mixture: MixtureShape, ids: bytes, tokens: int) -> RecordedRoutes | None:
    """Routes from ids of one or two bytes; None if they are not a sound one for each token."""
    count = tokens * mixture.layers * mixture.per_token
    if len(ids) not in (count, 2 * count):
        return None
    found = np.frombuffer(ids, "u1" if len(ids) == count else "<u2")
    if int(found.max(initial=0)) >= mixture.experts:
        return None
    dtype = mixture.make_routes(0).dtype
    return RecordedRoutes(mixture, found.astype(dtype, copy=False).tobytes())


def read_mixture_shape(model_dir: Path) -> MixtureShape | None:
    """The mixture that a model directory describes; None for a dense model."""
    return parse_mixture_shape(json.loads((model_dir / "config.json").read_bytes()))


def parse_mixture_shape(config: Mapping[str, Any]) -> MixtureShape | None:
    """The same from a parsed `config.json`."""
    text = config.get("text_config") or config
    counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((int(count) for count in counts if count), 0)
    if not experts:
        return None
    return MixtureShape(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), experts)
