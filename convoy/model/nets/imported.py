"""Imports networks unchanged from torchvision, timm or a user function.

| text | call |
|---|---|
| `torchvision:resnet18` | `torchvision.models.get_model("resnet18", weights=None, num_classes=classes)` |
| `timm:convnext_tiny` | `timm.create_model("convnext_tiny", pretrained=False, num_classes=classes, in_chans=channels)` |
| `my_package.my_module:build` | `build(...)` with `image`, `classes` and `num_classes`, if it has these parameters |

`image` is (channels, height, width). Installed modules are searched before the working folder.
"""

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from convoy.errors import InputError
from convoy.model.entry_points import call, find_callable, import_package
from convoy.model.nested import tensors_of
from convoy.model.nets.builtin import ImageShape
from convoy.model.tracing.trials import first_line, run_on_random


def is_packaged(text: str) -> bool:
    """Return whether a text names a net of torchvision or timm."""
    return text.partition(":")[0] in ("torchvision", "timm")


def find_imported(text: str, image: ImageShape, classes: int) -> Callable[[], nn.Module]:
    """Import the package, and return a function that makes the network. (An import must not change seeded random numbers.)

    Raises:
        InputError: the package or module is missing or does not import, the name is unknown, or the function has other
            parameters. The returned function raises it for a failure, no nn.Module, or not one output per class.
    """
    name = text.partition(":")[2]
    build = _find_in_package(text, image, classes) if is_packaged(text) else _find_own(text, image, classes)

    def make() -> nn.Module:
        model = build()
        if not isinstance(model, nn.Module):
            raise InputError(f"net {text!r}: {name}() gave a {type(model).__name__}: return an nn.Module")
        if not any(p.is_meta for p in model.parameters()):
            _check_outputs(text, model, image, classes)
        return model

    return make


def _check_outputs(text: str, model: nn.Module, image: ImageShape, classes: int) -> None:
    images = torch.empty(2, *image, device="meta")
    try:
        given = [str(tuple(t.shape)) for t in tensors_of(run_on_random(model, (images,), {}))]
    except Exception as error:
        given = [first_line(error)]
    if not given or any(each != str((2, classes)) for each in given):
        raise InputError(
            f"net {text!r} does not fit images of {'x'.join(map(str, image))} and {classes} classes: two images give "
            f"{', '.join(given) or 'no tensor'}, not {(2, classes)}; give images of the channels and size that it is "
            "made for, or another net"
        )


def _find_in_package(text: str, image: ImageShape, classes: int) -> Callable[[], Any]:
    package, _, name = text.partition(":")
    imported = import_package(package, "models", f"--net {text}")
    if package == "timm":
        names, plain = imported.list_models(), name.partition(".")[0]  # after the dot: weights, which are not loaded
        build = partial(imported.create_model, name, pretrained=False, num_classes=classes, in_chans=image[0])
    else:
        names, plain = imported.models.list_models(module=imported.models), name
        build = partial(imported.models.get_model, name, weights=None, num_classes=classes)
    if plain not in names:
        near = difflib.get_close_matches(plain, names)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"{package}'s list_models() names all {len(names)}"
        raise InputError(f"{package} has no net {plain!r}: {remedy}")
    return build


def _find_own(text: str, image: ImageShape, classes: int) -> Callable[[], Any]:
    build = find_callable(text, "a callable that returns a new nn.Module, e.g. def build(image, classes)")
    offered = {"image": image, "classes": classes, "num_classes": classes}
    parameters = call(text, inspect.signature, obj=build).parameters.values()
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    arguments = {p.name: offered[p.name] for p in named if p.name in offered}
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in free]
    if unknown := [name for name in needed if name not in arguments]:
        raise InputError(
            f"{text} needs {', '.join(unknown)}: Convoy passes only {', '.join(offered)}; give the other parameters "
            "defaults"
        )
    return partial(call, text, build, **arguments)
