"""Notices changes of what a trace has read once of modules: attributes, modes, submodules, values outside of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.kinds import replaced_by_hand
from convoy.model.tracing.outside import Outside
from convoy.model.tracing.state import OF_TORCH, PLAIN, comparable


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Of the modules that may do something else in training than in evaluation, by path: whether they are in training."""
    return {path: module.training for path, module in model.named_modules() if _minds_its_mode(module)}


def _minds_its_mode(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn"):
        return True
    name, held = type(module).__name__, vars(module) | module._buffers
    return "Dropout" in name or name == "RReLU" or held.get("running_mean") is not None or bool(held.get("dropout"))


class StateWatch:
    """Notices changes of what a trace read of modules that it sees through: it would not follow them.

    Args:
        model: this device's copy, as it was traced.
        seen: paths of the modules that the trace sees through.
        modes: see `TracedModel.modes`.
    """

    def __init__(self, model: nn.Module, seen: Sequence[str], modes: Mapping[str, bool]) -> None:
        self._modes = [(path, model.get_submodule(path), training) for path, training in modes.items()]
        self._values: list[tuple[str, dict[str, Any], str, Any]] = []
        self._nested: list[tuple[str, dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[str, dict[str, Any], int]] = []
        self._modules: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
        self._methods = [(path, m, len(vars(m)), replaced_by_hand(m)) for path, m in model.named_modules()]
        self._outside = Outside(model.get_submodule(path) for path in seen)
        self._read = self._outside.values()
        for path in seen:
            module = model.get_submodule(path)
            attributes = vars(module)
            self._modules.append((path, module._modules, dict(module._modules)))
            self._sizes.append((path, attributes, len(attributes)))
            for key, value in attributes.items():
                if key not in OF_TORCH and not isinstance(value, Tensor):
                    simple = isinstance(value, PLAIN) or callable(value)
                    row = (path, attributes, key, value if simple else comparable(value))
                    (self._values if simple else self._nested).append(row)

        for path, module in model.named_modules():
            if "Dropout" in type(module).__name__ and getattr(module, "p", 1.0) == 0:
                self._values.append((path, vars(module), "p", module.p))

    def check(self) -> None:
        """Refuse to go on after a change.

        Raises:
            InputError: an attribute, a submodule or a mode is another one than when the model was distributed.
        """
        for path, module, training in self._modes:
            if module.training != training:
                raise InputError(
                    f"module {path or 'the model itself'!r} was {'frozen' if training else 'thawed'} after distribute(): set "
                    "module.eval() or train() before, and freeze it again after model.train(), as the original was"
                )
        for path, module, size, name in self._methods:
            if len(vars(module)) != size and (method := replaced_by_hand(module)) != name:
                raise self._changed(path, method or name)
        for path, attributes, key, value in self._values:
            found = attributes.get(key, self)
            if found is not value and (found != value or type(found) is not type(value)):
                raise self._changed(path, key)
        for path, attributes, key, value in self._nested:
            if comparable(attributes.get(key, self)) != value:
                raise self._changed(path, key)
        for path, attributes, size in self._sizes:
            if len(attributes) != size:
                raise self._changed(path, next(reversed(attributes)))
        if self._read and (now := self._outside.values()) != self._read:
            name = next(name for name, value in self._read.items() if now[name] != value)
            raise InputError(
                f"{name}, which the forward of the model reads, changed after distribute(), which has read it: set it before, "
                "or distribute the model again"
            )
        for path, found, children in self._modules:
            if found != children:
                raise self._changed(path, "its submodules")

    def _changed(self, path: str, key: str) -> InputError:
        return InputError(
            f"{key!r} of module {path or 'the model itself'!r} changed after distribute(), which has read it: set it before, "
            "or distribute the model again"
        )
