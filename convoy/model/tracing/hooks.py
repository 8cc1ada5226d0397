"""The hooks that a user registers on modules and parameters."""

from collections.abc import Mapping
from typing import Any

from torch import nn

KINDS: Mapping[str, str] = {
    "_forward_pre_hooks": "forward-pre hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "full-backward-pre hook",
    "_backward_hooks": "backward hook",
}
"""The tables of hooks of a module, which stay the same objects -> the name of a hook in each."""
ON_PARAMETERS: Mapping[str, str] = {
    "_backward_hooks": "hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
"""The same of a parameter."""


def on_weights(hook: Any) -> bool:
    """Return whether a hook is one of torch's own that compute a weight, or of Convoy's: they read no sample."""
    return type(hook).__module__.startswith(("torch.nn.utils", "convoy.runtime"))


def hooked(module: nn.Module) -> list[str]:
    """Return the kinds of a user's hooks on a module."""
    return [kind for kind in KINDS if not all(map(on_weights, list(getattr(module, kind).values())))]
