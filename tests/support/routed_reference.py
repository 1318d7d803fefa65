"""transformers' mixtures with routes given to them, by formulas written out once more."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from areal_hpc.trainer.batch.packing import TrainingRow
from areal_hpc.wire.trajectory import MixtureShape


def give_random_routes(rows: list[TrainingRow], mixture: MixtureShape, seed: int) -> None:
    """Routes that no router would choose; each row's last tokens, and the second row, have none."""
    generator = np.random.default_rng(seed)
    for number, row in enumerate(rows):
        if number == 1:
            continue
        tokens = len(row.input_ids_T)
        routes = mixture.make_routes(tokens)
        for token in range(tokens - 1):
            for layer in range(mixture.layers):
                routes[token, layer] = generator.permutation(mixture.experts)[: mixture.per_token]
        object.__setattr__(row, "routes_TLK", routes)


@contextmanager
def following(model: Any, row: TrainingRow) -> Iterator[None]:
    """Have a model read this row, alone, with the experts that its routes name."""
    hooks = []
    for name, module in model.named_modules():
        if row.routes_TLK is not None and type(module).__name__.endswith("Router"):
            number = re.search(r"\.layers\.(\d+)\.", name)
            assert number is not None
            routes_TK = torch.from_numpy(row.routes_TLK[:, int(number[1])].astype(np.int64))
            unknown = int(np.iinfo(row.routes_TLK.dtype).max)
            hooks.append(module.register_forward_hook(route_by(routes_TK, unknown)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def route_by(routes_TK: torch.Tensor, unknown: int) -> Any:
    def hook(router: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits_TE, weights_TK, own_TK = output
        ids_TK = torch.where(routes_TK == unknown, own_TK, routes_TK)
        family = type(router).__name__
        if family.startswith("GptOss"):
            weights = torch.softmax(logits_TE.gather(1, ids_TK), 1)
        else:
            has_bias = hasattr(router, "e_score_correction_bias")
            scores_TE = logits_TE.sigmoid() if has_bias else logits_TE.softmax(1)
            weights = scores_TE.gather(1, ids_TK)
            if getattr(router, "norm_topk_prob", True):
                weights = weights / weights.sum(1, keepdim=True)
            weights = weights * getattr(router, "routed_scaling_factor", 1.0)
        return logits_TE, weights.to(weights_TK.dtype), ids_TK

    return hook
