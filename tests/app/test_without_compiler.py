"""The command imports no compiler and no algebra, and whoever wants them has them."""

import subprocess
import sys

import pytest

from tests.support.processes import ROOT

HEAVY = """
HEAVY = ("sympy", "torch._inductor", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "jinja2")
"""

TRAINED = """
import sys
import convoy.model.tracing.trace_model as tracing
checked, check_same = [], tracing.check_same
def counted(*arguments, training):
    checked.append(training)
    return check_same(*arguments, training=training)
tracing.check_same = counted
sys.argv = ["convoy", "train", *"--net two-conv:2:3 --batch 32 --limit 64 --epochs 1 --devices 1 --log none".split()]
from convoy.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in HEAVY if hasattr(sys.modules.get(name), "__file__")], checked)
"""

PREDICTED = """
import sys
from tests.support.model_zoo import make_importable
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()  # before torchvision is imported, as in the command
make_importable()
from convoy.app.predict import run_predict
from convoy.app.question import PlanQuestion
run_predict(PlanQuestion("torchvision:resnet18", (3, 64, 64), 10, 16), on="laptop-cpu,rtx3060")
print([name for name in HEAVY if hasattr(sys.modules.get(name), "__file__")])
"""

COMPILED = """
import torch
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.5)
(weight * 2).sum().backward()
optimizer.step()
assert weight.tolist() == [0.0] * 3
told = torch.optim.SGD.zero_grad.__wrapped__
optimizer.zero_grad()
assert vars(told)["__dynamo_disable"] is told
double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
assert "__dynamo_disable" not in vars(told), "now it is to be kept out of compiled code again"
optimizer.zero_grad()
assert vars(told)["__dynamo_disable"] is not told
import torch._dynamo.config
print(torch._dynamo.config.suppress_errors)
"""


def output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_training_imports_no_compiler() -> None:
    """It took longer than torch itself, in every device. Evaluation makes the calls of training, which have been compared."""
    assert output_of(HEAVY + TRAINED) == f"[] {[True]}"


def test_a_prediction_imports_no_compiler() -> None:
    """Nor does torchvision: one of its modules wants a function of the compiler, which nothing calls."""
    assert output_of(HEAVY + PREDICTED) == "[]"


ALGEBRA = """
import importlib.util
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()
assert importlib.util.find_spec("sympy").origin
from torch.fx.experimental import symbolic_shapes
held = symbolic_shapes.sym_and
assert [held(True, False), held(True, True), symbolic_shapes.sym_or(False, True)] == [False, True, True]
import torch
try:
    torch._check(False, lambda: "told")
except RuntimeError as error:
    assert "told" in str(error)
import sympy
assert not isinstance(3, sympy.Basic)
shapes = symbolic_shapes.ShapeEnv()
size = shapes.create_unbacked_symint()
assert isinstance(size.node.expr, sympy.Basic), "what a stand-in gave is the module's from now on"
assert isinstance(held(size > 2, True), torch.SymBool)
from sympy.core import Symbol
from torch._dynamo.utils import is_compile_supported
print(is_compile_supported("cpu"), Symbol("x").name, symbolic_shapes.ShapeEnv.__module__)
"""


@pytest.mark.slow
def test_whoever_wants_algebra_has_it() -> None:
    assert output_of(ALGEBRA).split()[1:] == ["x", "torch.fx.experimental.symbolic_shapes"]


PARTS = """
from convoy.app.without_compiler import leave_compiler_out
leave_compiler_out()
import torch._dynamo.config as config
import torch._dynamo
assert torch._dynamo.config is config
print(config.__spec__.name, torch._dynamo.__spec__.name)
"""


@pytest.mark.slow
def test_a_part_of_the_compiler_is_found_with_it() -> None:
    assert output_of(PARTS) == "torch._dynamo.config torch._dynamo"


def test_whoever_compiles_gets_the_compiler() -> None:
    assert output_of(COMPILED) == "False"
