"""A random net as a small tree of steps and blocks from a seed, its source, and smaller versions of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from lab.random_nets.blocks import WRAPPERS
from lab.random_nets.ends import INPUTS, OUTPUTS, write_inputs, write_outputs
from lab.random_nets.writer import STEPS, File, Writer

_CHANCE = {"layer": 14, "in-place": 2, "state": 2, "hook": 2, "flow": 3, "batch": 2}
"""How often a group is drawn."""


@dataclass(frozen=True)
class Part:
    """A step, or a block of several parts.

    Attributes:
        name: of a step, or of how a block stands in the net.
        seed: of what is left to chance in it: it does not depend on the other parts.
        parts: of a block.
    """

    name: str
    seed: int
    parts: tuple["Part", ...] = ()


@dataclass(frozen=True)
class Recipe:
    """A random net.

    Attributes:
        inputs, outputs: kinds of `ends.py`.
        seed: of the ends.
    """

    parts: tuple[Part, ...]
    inputs: str
    outputs: str
    seed: int
    shape: tuple[int, int, int] = (3, 6, 6)

    def source(self) -> str:
        """Return the source of the class `Net`, the functions `build` and `before_step`, and the inputs."""
        file = File()
        w = Writer(file, "Net", self.shape)
        rng = Random(self.seed)
        inputs = write_inputs(w, self.inputs, rng)
        _write(w, self.parts)
        write_outputs(w, self.outputs, rng)
        w.finish()
        return file.text(inputs)

    def smaller(self) -> Iterator["Recipe"]:
        """Yield every recipe with one thing removed."""
        for parts in _smaller(self.parts):
            yield replace(self, parts=parts)
        if self.outputs != "logits":
            yield replace(self, outputs="logits")
        if self.inputs != "images":
            yield replace(self, inputs="images")


def draw(seed: int) -> Recipe:
    rng = Random(seed)
    names = [*STEPS, *_SKIPS]
    groups = [STEPS[name][0] if name in STEPS else "layer" for name in names]
    weights = [_CHANCE[group] / groups.count(group) for group in groups]

    def parts(count: int, depth: int) -> tuple[Part, ...]:
        made = []
        for _ in range(count):
            own = rng.randrange(1 << 30)
            if depth < 2 and rng.random() < 0.22:
                made.append(Part(rng.choice((*WRAPPERS, "plain")), own, parts(rng.randint(1, 3), depth + 1)))
            else:
                made.append(Part(rng.choices(names, weights)[0], own))
        return tuple(made)

    channels = rng.choice((3, 4))
    outputs = ["logits"] * 10 + [*OUTPUTS]
    return Recipe(
        parts(rng.randint(2, 5), 0), rng.choice(INPUTS), rng.choice(outputs), rng.randrange(1 << 30), (channels, 6, 6)
    )


def _write(w: Writer, parts: tuple[Part, ...]) -> None:
    for part in parts:
        rng = Random(part.seed)
        if part.name in STEPS:
            w.choose(STEPS[part.name][1], rng)
            continue
        if part.name in _SKIPS:
            _SKIPS[part.name](w, rng)
            continue
        inner = Writer(w.file, w.fresh("Block"), w.shape)
        _write(inner, part.parts)
        WRAPPERS[part.name](w, inner, rng)
        if not inner.lines:
            inner.line("pass")
        inner.finish()
        w.shape = inner.shape


def _keep(w: Writer, _rng: Random) -> None:
    w.kept.append((w.fresh("skip"), w.shape))
    w.line(f"{w.kept[-1][0]} = x")


def _take(w: Writer, rng: Random) -> None:
    """Reuse an earlier value of the same size."""
    c, *size = w.shape
    fitting = [(name, shape) for name, shape in w.kept if [*shape[1:]] == size]
    if not fitting:
        return
    name, shape = rng.choice(fitting)
    if shape == w.shape and rng.random() < 0.7:
        form = rng.choice(_SUMS)
    else:
        form = rng.choice(_JOINED)
        w.shape = (c + shape[0], *w.shape[1:])
    w.line(f"x = {form.replace('S', name)}")


_SUMS = (
    *("x + S", "torch.add(x, S, alpha=0.5)", "x * torch.sigmoid(S)", "sum([x, S])"),
    *("torch.stack([x, S], 0).sum(0)", "torch.stack([x, S], 1).mean(1)"),
)
_JOINED = ("torch.cat([x, S], 1)", "torch.cat((S, x), dim=-3)", "torch.concat([x, S], axis=1)")
_SKIPS = {"keep": _keep, "take": _take}


def _smaller(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    for i, part in enumerate(parts):
        before, behind = parts[:i], parts[i + 1 :]
        yield before + behind
        if part.parts:
            yield before + part.parts + behind
            yield from ((*before, replace(part, parts=inner), *behind) for inner in _smaller(part.parts))
