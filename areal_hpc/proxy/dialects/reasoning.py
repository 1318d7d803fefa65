"""How hard to think: requests' ways to say it, as variables that the chat template reads."""

from typing import Any

from areal_hpc.proxy.engine.model_call import ServedModel

_REASONING_SWITCH_VARIABLES = ("enable_thinking", "thinking")
_EFFORTS = ("low", "medium", "high")
"""What templates know of efforts; `_NEAREST_EFFORT` maps what else clients ask for."""
_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}


def build_reasoning_variables(
    model: ServedModel,
    key: str,
    ignored: list[str],
    *,
    effort: object = None,
    thinks: bool | None = None,
) -> dict[str, Any]:
    """Template variables for an effort, or for whether to reason at all; None says nothing.

    Where the template reads none of them nothing follows the wish, and `key` is added to `ignored`.
    """
    known = model.template.variables
    is_asked = effort is not None or thinks is not None
    if thinks is None and isinstance(effort, str):
        thinks = effort != "none"
    variables: dict[str, Any] = {}
    if thinks is not None:
        variables = {name: thinks for name in _REASONING_SWITCH_VARIABLES if name in known}
    nearest = _NEAREST_EFFORT.get(effort, effort) if isinstance(effort, str) else None
    if "reasoning_effort" in known and nearest in _EFFORTS:
        variables["reasoning_effort"] = nearest
    if is_asked and not variables:
        ignored.append(key)
    return variables
