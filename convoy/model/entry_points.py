"""Imports and calls user functions by name, such as "my_package.my_module:build"."""

import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from convoy.errors import InputError


def names_callable(text: str) -> bool:
    """Return whether a text has the form "package.module:name"."""
    place, _, name = text.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in place.split("."))


def lies_here(text: str) -> bool:
    """Return whether a callable's module is directly in the working folder, without importing it."""
    name, here = text.partition(":")[0].split(".")[0], Path.cwd().resolve()
    # Search as `find_callable` does: installed modules first.
    spec = importlib.util.find_spec(name) or importlib.machinery.PathFinder.find_spec(name, [str(here)])
    if spec is None:
        return False
    places = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    return all(place.is_absolute() and place.parent.resolve() == here for place in places)  # os is at "frozen"


def find_callable(text: str, wanted: str) -> Callable[..., Any]:
    """Import a callable by its name, from an installed module or a module in the working folder.

    Args:
        wanted: an example for the error message, such as "def build(): it returns a data set".

    Raises:
        InputError: the module or callable does not exist (suggests similar names), or the module does not import.
    """
    place, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(place)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise InputError(
                f"{text}: there is no module {error.name!r}; name one that is installed or in the working folder"
            ) from None
        raise InputError(f"{text}: the module does not import ({where(error)}); correct it there") from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name[:80], [n for n, value in vars(module).items() if callable(value)])
        met = "is not there" if found is None else f"is a {type(found).__name__}"
        raise InputError(
            f"{text}: {name} {met}; " + (f"did you mean {' or '.join(near)}?" if near else f"write {wanted}")
        )
    return found  # type: ignore[no-any-return]


def import_package(name: str, extra: str, purpose: str) -> Any:
    """Import an optional package, or a module of it.

    Args:
        extra: Convoy's pip extra that installs the package.
        purpose: the option or feature that needs it, for the message.

    Raises:
        InputError: the package is not installed, or does not import.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise InputError(
            f"{missing} is not installed, and {purpose} needs it: pip install 'convoy-train[{extra}]'"
        ) from error
    except Exception as error:
        # The package's metadata has no build, such as +cu130.
        package, version = name.partition(".")[0], importlib.import_module("torch").__version__
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{package} does not import with torch {version} ({why}), and {purpose} needs it: "
            "torch and torchvision must be builds that belong together; install both at once and from one place, e.g. pip "
            f"install torch torchvision --index-url https://download.pytorch.org/whl/{version.partition('+')[2] or 'cpu'}"
        ) from error


def call(text: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call the function, and convert its exceptions to an InputError with the file and line."""
    try:
        return function(**arguments)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{text} failed ({where(error)}); correct it there") from error


def where(error: Exception) -> str:
    """Describe an error in user code: its type, first line, file and line number."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = (str(error).splitlines() or [""])[0][:160]
    return f"{type(error).__name__}: {line}, {os.path.basename(frame.filename)} line {frame.lineno}"
