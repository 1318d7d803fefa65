"""Router replay: in every pass, tokens visit the experts that they visited when sampled.

If the scores of two experts are close, engine and trainer choose differently. Only the ids are
replayed: the experts' weights, and so the router's gradient, come from the scores of the pass.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.private_apis.megatron_private import ChooseExperts, replace_expert_choice


class RouterReplay:
    """Routes that the routers of a network follow."""

    def __init__(self, arch: Architecture, gpt: Any) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        """Sums over layers and forward passes: tokens with a route (`followed`), and tokens whose
        router would choose other experts (`rerouted`)."""
        self._arch = arch
        self._packs: list[torch.Tensor | None] = []
        """Routes [T, layer, k] of the packs of the current passes, in their order."""
        self._is_forward = False
        self._recomputed_packs = Counter[int]()
        """Number of recomputed packs by layer: backward passes keep the order of forward passes."""
        if not arch.transformers_config:
            for layer in gpt.decoder.layers:
                number = layer.layer_number - 1
                if arch.get_experts(number) is not None:
                    replace_expert_choice(layer.mlp.router, partial(self._choose, number))
            return
        for name, module in gpt.named_modules():
            number = re.search(r"\.layers\.(\d+)\.", name)
            if number and type(module).__name__.endswith("Router"):
                _replace_top_k(module, partial(self._choose, int(number[1])), arch)

    def begin_passes(self) -> None:
        """Forget earlier passes."""
        self.sums = {}
        self._packs.clear()
        self._recomputed_packs.clear()

    @contextmanager
    def follow(self, routes_TLK: torch.Tensor | None) -> Iterator[None]:
        """Follow a pack's routes in its forward pass, and later when its layers are recomputed.

        With None, or with ids of no expert, the router chooses.

        Raises:
            RecipeError: No router called `_choose`.
        """
        if routes_TLK is not None:  # each router gets its part of the tokens
            ranks = parallel_state.get_tensor_model_parallel_group()
            routes_TLK = routes_TLK.chunk(ranks.size())[ranks.rank()]
        self._packs.append(routes_TLK)
        self._is_forward = True
        try:
            yield
        finally:
            self._is_forward = False
        # A stage of Megatron's layers may have no router.
        if routes_TLK is not None and not self.sums and self._arch.transformers_config:
            family = self._arch.family
            raise RecipeError(
                f"the routers of {family} choose experts in a way that is not known here",
                key="trainer.router_replay",
                hint="set trainer.router_replay=false",
            )

    def _choose(
        self, layer: int, scores_TE: torch.Tensor, top_TK: torch.Tensor, own_ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pack = -1
        if not self._is_forward:
            pack = self._recomputed_packs[layer]
            self._recomputed_packs[layer] += 1
        routes_TLK = self._packs[pack]
        if routes_TLK is None:
            return top_TK, own_ids_TK
        ids_TK = routes_TLK[:, layer].long()
        is_known_T1 = (ids_TK < scores_TE.shape[1]).all(1, keepdim=True)
        # A slot that an engine never filled repeats expert 0.
        is_known_T1 &= (ids_TK.sort(1).values.diff(dim=1) != 0).all(1, keepdim=True)
        ids_TK = torch.where(is_known_T1, ids_TK, own_ids_TK)
        if self._is_forward:
            differs_T = (ids_TK.sort(1).values != own_ids_TK.sort(1).values).any(1)
            counts = {"followed": is_known_T1.sum(), "rerouted": differs_T.sum()}
            self.sums = {name: self.sums.get(name, 0) + count for name, count in counts.items()}
        return scores_TE.gather(1, ids_TK), ids_TK


def _replace_top_k(router: torch.nn.Module, choose: ChooseExperts, arch: Architecture) -> None:
    """Make a router of transformers, which chooses experts by `torch.topk`, follow `choose`."""
    forward = router.forward

    def forward_with_choice(*args: Any, **options: Any) -> Any:
        with _ReplacedTopK(choose, arch):
            return forward(*args, **options)

    router.forward = forward_with_choice


class _ReplacedTopK(TorchFunctionMode):
    def __init__(self, choose: ChooseExperts, arch: Architecture) -> None:
        super().__init__()
        assert arch.experts is not None
        self._choose, self._sizes = choose, (arch.experts.count, arch.experts.per_token)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2:
            return result
        if (args[0].shape[1], result.indices.shape[1]) != self._sizes:
            return result  # a choice of groups of experts
        return torch.return_types.topk(self._choose(args[0], *result))
