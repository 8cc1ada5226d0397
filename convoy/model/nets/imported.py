"""Networks from elsewhere, as they are: of torchvision, of timm, or what a callable of one's own gives.

| text | what is called |
|---|---|
| `torchvision:resnet18` | `torchvision.models.get_model("resnet18", weights=None, num_classes=classes)` |
| `timm:convnext_tiny` | `timm.create_model("convnext_tiny", pretrained=False, num_classes=classes, in_chans=channels)` |
| `my_package.my_module:build` | `build(...)` with those of `image`, `classes`, `num_classes` that it has as parameters |

`image` is (channels, height, width). One's own module is looked for among what is installed, then in the working folder.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.entry_points import call, find_callable, import_package, names_callable
from convoy.model.nets.builtin import ImageShape
from convoy.model.tracing.shared_copy import shared_copy
from convoy.model.tracing.trials import first_line, run_on_random, tensors_of


def is_imported(text: str) -> bool:
    """Whether a text names a net of torchvision or timm, or a callable of a module: "package.module:name"."""
    return is_packaged(text) or names_callable(text)


def is_packaged(text: str) -> bool:
    """Whether a text names a net of torchvision or timm."""
    return text.partition(":")[0] in _PACKAGES


def find_imported(text: str, image: ImageShape, classes: int) -> Callable[[], nn.Module]:
    """What makes a network from elsewhere. Its package or module is imported here, before random numbers are seeded.

    Raises:
        InputError: the package or module is missing or does not import, an unknown name (near ones are suggested), a
            callable with other parameters. When it is called: it fails or gives no nn.Module, or a net that does not
            give one number per class for such images.
    """
    place, _, name = text.partition(":")
    find = _PACKAGES.get(place)
    build = find(name, image, classes) if find is not None else _find_own(text, image, classes)

    def make() -> nn.Module:
        model = build()
        if not isinstance(model, nn.Module):
            raise InputError(f"net {text!r}: {name}() gave a {type(model).__name__}: return an nn.Module")
        _check_outputs(text, model, image, classes)
        return model

    return make


def _check_outputs(text: str, model: nn.Module, image: ImageShape, classes: int) -> None:
    size = "x".join(map(str, image))
    try:
        outputs = _outputs(model, torch.empty(2, *image))
    except Exception as error:
        raise InputError(
            f"net {text!r} does not run on images of {size} ({first_line(error)}): give images of the channels and size that "
            "it is made for, or another net"
        ) from error
    shapes = [tuple(t.shape) for t in outputs]
    if not shapes or any(shape != (2, classes) for shape in shapes):
        raise InputError(
            f"net {text!r} gives {', '.join(map(str, shapes)) or 'no tensor'} for two images of {size}: it must give one "
            f"number for each of the {classes} classes, {(2, classes)}"
        )


def _outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    """What a model gives, as shapes; one without weights is not run on numbers, of which its buffers have none."""
    if any(p.is_meta for p in model.parameters()):
        with torch.no_grad(), torch.device("meta"):
            return tensors_of(model(images.to("meta")))
    return tensors_of(run_on_random(shared_copy(model), (images,), {}))


# --- torchvision, timm -----------------------------------------------------------------------------------------------


def _find_in_torchvision(name: str, _image: ImageShape, classes: int) -> Callable[[], Any]:
    models = import_package("torchvision", "models", f"--net torchvision:{name}").models
    _check_name("torchvision", name, models.list_models(module=models))
    return _quietly(lambda: models.get_model(name, weights=None, num_classes=classes))


def _find_in_timm(name: str, image: ImageShape, classes: int) -> Callable[[], Any]:
    timm = import_package("timm", "models", f"--net timm:{name}")
    _check_name(
        "timm", name.partition(".")[0], timm.list_models()
    )  # behind the dot: which weights, of which we take none
    return _quietly(lambda: timm.create_model(name, pretrained=False, num_classes=classes, in_chans=image[0]))


_PACKAGES: Mapping[str, Callable[[str, ImageShape, int], Callable[[], Any]]] = {
    "torchvision": _find_in_torchvision,
    "timm": _find_in_timm,
}


def _check_name(package: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"{package}'s list_models() names all {len(known)}"
        raise InputError(f"{package} has no net {name!r}: {remedy}")


def _quietly(build: Callable[[], Any]) -> Callable[[], Any]:
    """What the packages say of their own future versions is nothing that their callers' user can act on."""

    def quiet() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return build()

    return quiet


# --- one's own -------------------------------------------------------------------------------------------------------


def _find_own(text: str, image: ImageShape, classes: int) -> Callable[[], Any]:
    build = find_callable(text, "a callable that returns a new nn.Module, e.g. def build(image, classes)")
    if isinstance(build, nn.Module):
        raise InputError(
            f"{text} is a {type(build).__name__}: name what makes one, so that its weights come from the seed, e.g. "
            "def build(image, classes)"
        )
    return partial(
        call, text, build, **_arguments(text, build, {"image": image, "classes": classes, "num_classes": classes})
    )


def _arguments(text: str, build: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of what is offered that a callable has as parameters."""
    parameters = call(text, inspect.signature, obj=build).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    arguments = {name: offered[name] for name in named if name in offered}
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in free]
    if unknown := [name for name in needed if name not in arguments]:
        raise InputError(
            f"{text} needs {', '.join(unknown)}: it is given {', '.join(offered)} where it has such parameters; give the "
            "others defaults"
        )
    return arguments
