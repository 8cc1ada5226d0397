"""Train a random net on one device and on several, and classify the difference: none, refused, or wrong."""

import dataclasses
import linecache
import math
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import convoy.runtime.module
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import box
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.runtime.module import Distributed
from lab.random_nets.recipe import Recipe
from lab.random_nets.writer import CLASSES
from tests.support.threads import run_on_threads, work_shared

EXACT = 1e-10
SPEEDS = (Speeds((3.0, 2.0)), Speeds((2.0, 1.0, 1.0)), Speeds((3.0, 0.0, 2.0)), Speeds((1.0, 4.0)))
SIZES = ((5, 5, 5), (5, 4, 5), (6, 2, 6), (4, 4, 3))


@dataclass(frozen=True)
class Outcome:
    """The result of a net.

    Attributes:
        kind: "exact", "refused" (a clear error), "wrong" (a silent difference), "crash" (another error), "invalid" (plain
            PyTorch does not train it), "unstable" (rounding alone changes the training of one device about as much).
        what: the error, or what differs.
    """

    kind: str
    what: str = ""


@dataclass
class Left:
    """The result of a training: all numbers by name, and other values to compare.

    Attributes:
        forms: of what the net returned.
        graded: the tensors of it through which gradients went.
    """

    numbers: dict[str, Tensor]
    forms: list[str]
    graded: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Way:
    """The options of a net's training.

    Attributes:
        together: batches whose losses are added before one backward.
        evaluating: it is trained in evaluation mode, as people finetune.
        to_none: how gradients are cleared.
        looking: before each step, a forward in training mode without gradients.
    """

    together: int = 1
    evaluating: bool = False
    to_none: bool = True
    looking: bool = False


WAYS = (*[Way()] * 6, Way(together=2), Way(evaluating=True), Way(to_none=False), Way(looking=True))


def load(source: str, name: str) -> dict[str, Any]:
    """Run the source of a net so that tracebacks show its lines."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    space: dict[str, Any] = {"__name__": "random_net"}
    exec(compile(source, filename, "exec"), space)
    return space


def attempt(recipe: Recipe, seed: int) -> Outcome:
    """Train the net of a recipe; the seed selects devices, plan and batches."""
    rng = Random(seed)
    speeds, sizes, plan = rng.choice(SPEEDS), rng.choice(SIZES), rng.choice((*PLANS, "model", "hybrid"))
    way = rng.choice(WAYS)
    space = load(recipe.source(), f"net {seed}")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            # Built twice: a copy would be without the hooks on tensors.
            reference, model = (_built(space, seed) for _ in range(2))
            given = [_batch(space["INPUTS"], n) for n in sizes]
            state = torch.get_rng_state()
            expected = _train(reference, given, space, way, lambda m, x: m(*x), lambda m: m.state_dict())
        except Exception as error:
            return Outcome("invalid", _line(error))
        if not all(bool(t.isfinite().all()) for t in expected.numbers.values() if t.is_floating_point()):
            return Outcome("invalid", "not a number")
        before = {k: v.clone() for k, v in model.state_dict().items()}
        torch.set_rng_state(state)
        try:
            found = _distributed(model, given, plan, speeds, space, way)
        except Exception as error:
            # A program that does not fit the other devices' is no net that is refused.
            if isinstance(error, InputError) and not str(error).startswith("device program"):
                return Outcome("refused", _line(error))
            return Outcome("crash", _line(error) + "\n" + "".join(traceback.format_exception(error)[-4:]))
        wrong = {} if torch.equal(torch.get_rng_state(), state) else {"the caller's random state": math.inf}
        changed = (k for k, v in model.state_dict().items() if not torch.equal(v, before[k]))
        wrong |= {f"the model that was given, {k}": math.inf for k in changed}
        for device, left in enumerate(found):
            wrong |= {f"device {device}: {what}": by for what, by in differences(left, expected).items()}
        if not wrong:
            return Outcome("exact")
        told = "; ".join(f"{what} (by {by:.2g})" for what, by in [*wrong.items()][:6])
        return Outcome(
            "unstable" if max(wrong.values()) <= 100 * _rounding(space, seed, given, way, expected) else "wrong", told
        )


def _distributed(
    model: nn.Module, given: list[Any], plan: str, speeds: Speeds, space: dict[str, Any], way: Way
) -> list[Left]:
    example = given[0] if len(given[0]) > 1 else given[0][0]
    with work_shared():
        graph = convoy.runtime.module.trace(model, example).graph
        chosen = named_plan(plan, graph, len(given[0][0]), speeds)

        def work(group: Group) -> Left:
            here = Distributed(model, chosen, group, example)
            return _train(here, given, space, way, _call, lambda m: m.full_state_dict())

        return run_on_threads(chosen.devices, work, timeout_s=20)


def _call(here: Distributed, x: tuple[Tensor, ...]) -> Any:
    layouts = here.input_layouts(len(x[0]))
    boxes = [box(layout, here.group.device, tuple(t.shape)) for layout, t in zip(layouts, x, strict=False)]
    parts = [t[slice(*b[0])] if b is not None else t[:0] for b, t in zip(boxes, x, strict=False)]
    return here(*parts, batch=len(x[0]))


def _built(space: dict[str, Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = space["build"]().double()
    return model


def _batch(inputs: Iterable[tuple[str, tuple[int, ...]]], n: int) -> tuple[Tensor, ...]:
    return tuple(
        torch.randn(n, *shape, dtype=torch.float64) if kind == "float" else torch.randint(0, 7, (n, *shape))
        for kind, shape in inputs
    )


def _train(model: nn.Module, given: list[Any], space: dict[str, Any], way: Way, call: Any, weights: Any) -> Left:
    """Train three steps with momentum and weight decay, then evaluate."""
    left = Left({}, [])
    inner = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    model.train(not way.evaluating)
    for k, batch in enumerate(given):
        space["before_step"](k, inner)
        if way.looking:
            with torch.no_grad():
                _note(call(model, _cloned(batch)), f"look {k}", left)
        optimizer.zero_grad(set_to_none=way.to_none)
        answers = [call(model, _cloned(batch)) for _ in range(way.together)]
        loss = torch.stack([_loss(outputs) for outputs in answers]).sum()
        loss.backward()
        optimizer.step()
        left.numbers[f"loss {k}"] = loss.detach()
        for outputs in answers:
            _note(outputs, f"output of step {k}", left)
    model.eval()
    space["before_step"](-1, inner)
    with torch.no_grad():
        _note(call(model, _cloned(given[0])), "output of evaluation", left)
    model.train()
    left.numbers |= {f"state {k}": v.detach().clone() for k, v in weights(model).items()}
    left.numbers |= _python_state(inner)
    return left


def _cloned(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return copies: a forward may overwrite its input on one device, and leaves it unchanged on several."""
    return tuple(t.clone() for t in batch)


def _python_state(model: nn.Module) -> dict[str, Tensor]:
    """Return numbers that modules keep in Python: counters and hook records."""
    return {
        f"Python's {name}.{key}": torch.tensor(float(value), dtype=torch.float64)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float) and not key.startswith("_")
    }


def _note(outputs: Any, name: str, left: Left) -> None:
    left.forms.append(form(outputs))
    for i, t in enumerate(tensors(outputs)):
        left.numbers[f"{name}, tensor {i}"] = t.detach().clone()
        # Under no_grad a forward may switch gradients on: who then asks for one is told by torch that there is none.
        left.graded |= {f"{name}, tensor {i}"} if t.requires_grad and torch.is_grad_enabled() else set()


def form(value: Any) -> str:
    """Return the types of a structure, with its plain values."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(form(getattr(value, f.name)) for f in dataclasses.fields(value))})"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{k}: {form(v)}' for k, v in value.items())})"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(form(v) for v in value)})"
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in tensors(getattr(value, f.name))]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def _loss(outputs: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(tensors(outputs)):
        if not t.is_floating_point():
            continue
        if t.dim() == 2 and t.shape[1] == CLASSES:
            total = total + F.cross_entropy(t, torch.arange(len(t)) % CLASSES) / (1 + i)
        else:
            total = total + t.square().mean() * 0.1 / (1 + i)
    return total


def differences(found: Left, expected: Left) -> dict[str, float]:
    """Return each difference and its size, relative to max(1, size)."""
    if found.forms != expected.forms:
        other = next((a, b) for a, b in zip(found.forms, expected.forms, strict=True) if a != b)
        return {f"returns {other[0]} for {other[1]}": math.inf}
    result = dict.fromkeys(found.numbers.keys() ^ expected.numbers.keys(), math.inf)
    # Not the other way round: an output of a layer that stays whole may have a gradient of zeros where one device has none.
    result |= {f"{name} has no gradient": math.inf for name in expected.graded - found.graded}
    for name in found.numbers.keys() & expected.numbers.keys():
        a, b = found.numbers[name], expected.numbers[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            result[f"{name}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}"] = math.inf
        elif (by := _apart(a, b)) > EXACT:
            result[name] = by
    return dict(sorted(result.items()))


def _apart(a: Tensor, b: Tensor) -> float:
    apart = (a.double() - b.double()).abs() / b.double().abs().clamp(min=1.0)
    return float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0


class _Rounded(TorchDispatchMode):
    """A mode that changes the results of sums and products by 1e-15, as another order of additions does."""

    def __init__(self) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(0)  # not torch's own, from which a net may draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ROUNDED:
            out = result[0] if isinstance(result, tuple) else result
            out.mul_(1 + 1e-15 * torch.randn(out.shape, generator=self._draws, dtype=out.dtype))
        return result


_ROUNDED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "native_batch_norm", "native_layer_norm", "mean")


def _rounding(space: dict[str, Any], seed: int, given: list[Any], way: Way, expected: Left) -> float:
    """Return how far one device differs from itself if it rounds differently."""
    model = _built(space, seed)
    with _Rounded():
        other = _train(model, given, space, way, lambda m, x: m(*x), lambda m: m.state_dict())
    if other.forms != expected.forms:
        return math.inf
    return max((_apart(other.numbers[k], v) for k, v in expected.numbers.items()), default=0.0)


def shrunk(recipe: Recipe, seed: int, kind: str) -> Recipe:
    """Return the smallest recipe that fails in the same way, found by removing parts."""
    for _ in range(40):
        smaller = next((each for each in recipe.smaller() if attempt(each, seed).kind == kind), None)
        if smaller is None:
            return recipe
        recipe = smaller
    return recipe


def report(seed: int, outcome: Outcome, recipe: Recipe) -> str:
    """Return the seed, the failure and the source, so that it can be repeated."""
    return f"net of seed {seed}: {outcome.kind}: {outcome.what}\n{recipe.source()}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
