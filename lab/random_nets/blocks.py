"""Ways to embed a part of a net: submodules in loops, checkpointed, hooked, frozen, called by keyword."""

from collections.abc import Callable
from random import Random

from lab.random_nets.writer import STEPS, Writer

Wrapper = Callable[[Writer, Writer, Random], None]
"""Writes the call of a finished block, given the writer outside, the one inside, and chance."""
WRAPPERS: dict[str, Wrapper] = {}


def wrapper(function: Wrapper) -> Wrapper:
    WRAPPERS[function.__name__] = function  # type: ignore[attr-defined]
    return function


def _make(w: Writer, inner: Writer) -> str:
    return w.make(f"{inner.name}()", "block")


@wrapper
def plain(w: Writer, inner: Writer, _rng: Random) -> None:
    w.line(f"x = {_make(w, inner)}(x)")


@wrapper
def keyword(w: Writer, inner: Writer, rng: Random) -> None:
    """Write a block with optional arguments, given or not."""
    inner.arguments.append("mask=None, *, scale=1.0, **other")
    inner.line("if mask is not None: x = x * mask", "x = x * scale")
    mask = "torch.sigmoid(x)" if inner.shape == w.shape else "None"
    given = rng.choice(("x", "x=x", "x, scale=0.5", f"x, {mask}", "x, mask=None, other=1"))
    w.line(f"x = {_make(w, inner)}({given})")


@wrapper
def checkpointed(w: Writer, inner: Writer, _rng: Random) -> None:
    w.line(f"x = checkpoint({_make(w, inner)}, x, use_reentrant=False)")


@wrapper
def checkpointed_in_training(w: Writer, inner: Writer, _rng: Random) -> None:
    name = _make(w, inner)
    w.line(f"x = checkpoint({name}, x, use_reentrant=False) if self.training else {name}(x)")


@wrapper
def checkpointed_in_turn(w: Writer, inner: Writer, _rng: Random) -> None:
    name = w.make(f"nn.Sequential({inner.name}(), nn.ReLU())", "stage")
    w.line(f"x = checkpoint_sequential({name}, 2, x, use_reentrant=False)")


@wrapper
def hooked(w: Writer, inner: Writer, rng: Random) -> None:
    _, rows = STEPS["of a layer"]
    hook = rows[0].rpartition("$a.")[2]
    name = _make(w, inner)
    w.write(f"init: {name}.{hook} ;; x = {name}(x)", rng)


@wrapper
def in_a_sequence(w: Writer, inner: Writer, rng: Random) -> None:
    block = f"{inner.name}()"
    calls = {
        f"nn.Sequential({block}, nn.ReLU())": "x = {}(x)",
        f"nn.ModuleDict({{'a': {block}}})": "x = {}['a'](x)",
        f"nn.ModuleList([{block}])": "for layer in {}: x = layer(x)",
    }
    made = rng.choice(list(calls))
    w.line(calls[made].format(w.make(made, "stage")))


@wrapper
def twice(w: Writer, inner: Writer, _rng: Random) -> None:
    name = _make(w, inner)
    w.line(f"x = {name}(x)")
    if inner.shape == w.shape:
        w.line(f"x = {name}(x)")


@wrapper
def residual_block(w: Writer, inner: Writer, _rng: Random) -> None:
    w.line(f"x = x + {_make(w, inner)}(x)" if inner.shape == w.shape else f"x = {_make(w, inner)}(x)")


@wrapper
def without_gradient(w: Writer, inner: Writer, rng: Random) -> None:
    name = _make(w, inner)
    w.line("with torch.no_grad():", f"    y = {name}(x)")
    w.line("x = x + y" if inner.shape == w.shape else "x = y", *(["x = x.detach()"] if rng.random() < 0.3 else []))


@wrapper
def frozen_block(w: Writer, inner: Writer, rng: Random) -> None:
    name = _make(w, inner)
    w.inits.append(f"{name}.requires_grad_(False)" + (".eval()" if rng.random() < 0.5 else ""))
    w.line(f"x = {name}(x)")


@wrapper
def by_size(w: Writer, inner: Writer, rng: Random) -> None:
    if inner.shape != w.shape:
        return plain(w, inner, rng)
    w.line(f"if x.shape[0] > {rng.choice((1, 3, 4))}: x = {_make(w, inner)}(x)")
    return None


@wrapper
def several_outputs(w: Writer, inner: Writer, rng: Random) -> None:
    """Write a block that returns a tuple, a dict, a list or a named tuple."""
    forms = {
        "(x, x * 0.5)": "[0]",
        "{'main': x, 'other': [x, None]}": "['main']",
        "[x, (x, x)]": "[0]",
        "Pair(x, x)": ".main",
        "Both(x)": ".main",
        "dict(main=x, n=3)": "['main']",
        "(x, None, 1)": "[0]",
    }
    inner.returns = rng.choice(list(forms))
    w.line(f"x = {_make(w, inner)}(x){forms[inner.returns]}")


@wrapper
def past_its_call(w: Writer, inner: Writer, rng: Random) -> None:
    """Write a block called without `__call__`, or as a function of parameters."""
    name = _make(w, inner)
    functional = f"torch.func.functional_call({name}, dict({name}.named_parameters()), (x,))"
    w.line("x = " + rng.choice((f"{name}.forward(x)", functional, f"functools.partial({name})(x)")))
