"""The settings of a training, as one list: the command line, run files and `--explain` are made from it."""

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from convoy.config.option_types import (
    File,
    Numbers,
    Seconds,
    Sizes,
    check_text,
    checked_augment,
    checked_data,
    checked_listen,
    checked_mlflow,
    checked_tensorboard,
    checked_wandb,
    device_names,
    devices_text,
    listen_address,
    one_of,
    passes_of_text,
    wire_text,
)
from convoy.errors import InputError
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.redistribute import Sum
from convoy.plan.presets import AUTO, PLANS

Spare = Literal["auto", "every-step", "none"]

MAX_SEED = 2**32 - 1

NO_LOG = Path("none")
"""What `log` is where nothing is to be logged."""

MOST_NUMBER = 1e10
MOST: Mapping[str, float] = {"timeout_s": 1e6, "budget_s": 1e6, "workers": 256, "image_size": 8192}
"""The largest number that each setting may have; of all others `MOST_NUMBER`."""


def _setting(panel: str, default: Any, meaning: str, *, here: bool = False, **rules: Any) -> Any:
    """A setting.

    Args:
        panel: the part of the list that it stands in.
        here: each device may have its own; all others decide what is computed, and must be the same everywhere.
        rules: bounds, as pydantic names them.
    """
    return Field(default, description=meaning, json_schema_extra={"panel": panel, "here": here}, **rules)


DATA, TRAINING = "Data and net", "Training"
_data = partial(_setting, DATA)
_fleet = partial(_setting, "Devices and plan")
_step = partial(_setting, TRAINING)
_test = partial(_setting, "Tests while training")
_output = partial(_setting, "What is told and written")


class Settings(BaseModel):
    """What to train, how, and on what. A name, its type, its default and its meaning stand here and nowhere else.

    On the command line and in a run file a setting is called as here, with dashes, and without the unit at its end: `data_dir`
    is `--data-dir D` and `data-dir = "D"`, `timeout_s` is `--timeout` and `timeout`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    data: Annotated[str, AfterValidator(checked_data)] = _data(
        "digits",
        "Images: digits (ships with scikit-learn), fashion-mnist, cifar10, cifar100; folder:PATH or a path, with a folder of "
        "JPEG or PNG images for each class (in train and val, or with a part held out); or MODULE:FUNCTION that returns a "
        "torch Dataset, or two.",
    )
    data_dir: File | None = _data(
        None,
        "For a data set by name: the folder with its own files. Default: a cache folder, filled by download and checksum.",
        here=True,
    )
    image_size: int | None = _data(
        None, "For a folder of images: resize each to a square of this side, in pixels.", ge=1
    )
    test_fraction: float | None = _data(
        None,
        "For a folder or data set without test images: hold out this part of each class. Default: 0.2.",
        gt=0,
        lt=1,
    )
    augment: Annotated[str, AfterValidator(checked_augment)] | None = _data(
        None,
        "Change training images anew in every epoch: crop\\[:PADDING], flip, resized-crop\\[:AREA], jitter\\[:STRENGTH], "
        "cutout\\[:SIDE], erase\\[:PROBABILITY], with commas between them, e.g. crop,flip.",
    )
    limit: int | None = _data(None, "Use only so many training images.", ge=1)
    workers: int = _data(0, "Processes per device that prepare batches ahead; 0: none.", here=True, ge=0)
    net: str = _data(
        "two-conv:50:500",
        "two-conv:K1:K2 (filters), alexnet:F (features), resnet:DEPTH:WIDTH and others; torchvision:NAME, timm:NAME (pip "
        "install 'convoy-train\\[models]'); or package.module:function that returns an nn.Module.",
    )

    plan: str = _fleet(
        "data-by-speed",
        "Who computes what. [b]data[/]: the batch in even shares, as PyTorch DDP does. [b]data-by-speed[/]: the batch by "
        "measured speed. [b]sharded[/]: so, too, with weights and optimizer state kept in shares by speed. [b]master[/]: "
        "filters of the convolutions by measured speed, the rest on the fastest device (Marques 2018). [b]model[/]: every "
        "weighted layer by filter, evenly (Castello 2021). [b]hybrid[/]: convolutions by batch, fully connected layers by "
        "filter (Jin 2018). [b]auto[/]: measures, and lets the planner choose. Or a plan file.",
    )
    devices: Annotated[str, BeforeValidator(devices_text)] = _fleet(
        "auto",
        "This machine's devices: [b]auto[/], every GPU, or the CPU where there is none; [b]all[/], the CPU beside the GPUs "
        "too; their names: cuda:0,cpu; or a number of processes on the CPU: 4. Ignored under torchrun, srun and mpirun.",
        here=True,
    )
    slowdown: Numbers | None = _fleet(
        None, "A factor per device that stretches its computing, e.g. 1,1,2,4: unequal devices on one machine."
    )
    speeds: Numbers | None = _fleet(None, "Speeds per device instead of measured ones, e.g. 4,4,2,1.")
    reduce: Sum | None = _fleet(
        None,
        "How sums over devices are made: ring, butterfly, direct, star; or inexact-butterfly-mixing, which is not a sum and "
        "does not train like one device. Default: butterfly for hybrid, ring for the other named plans; auto chooses, a plan "
        "file says.",
    )
    wire: Annotated[CommDtype | None, BeforeValidator(wire_text)] = _fleet(
        None,
        "In which numbers activations and gradients travel: exact, or inexact-bf16 (short: bf16), which halves the bytes, "
        "rounds to 8 bits and does not quite train like one device. Default: exact, or as the plan file says.",
    )
    rebalance: bool | None = _fleet(
        None,
        "Change the shares while training when a device turns out faster or slower than thought; with --plan auto also the "
        "plan, where another that is predicted to take nearly as long turns out faster in the first steps. Default: with "
        "--plan auto on CPUs; to know what a layer takes, a GPU must wait for its kernels.",
    )
    compile: bool = _fleet(
        False,
        "Run layers through torch.compile where a trial in the first steps finds that faster: numbers equal up to rounding. "
        "It needs a C++ compiler such as g++ (on GPUs Triton).",
    )
    memory: Sizes | None = _fleet(
        None,
        "What plan auto may fill of each device's memory, e.g. 6 GB, or one per device: 6 GB,8 GB. GPUs refuse to allocate "
        "more. Default: all of it; with a fleet file, its memory_bytes.",
    )
    tf32: bool | None = _fleet(
        None,
        "Whether GPUs may round float32 to TF32 (10 bits) in matrix products and convolutions. Default: as torch has it, in "
        "convolutions only.",
    )
    deterministic: bool = _fleet(
        False,
        "Only algorithms of torch that give the same bits every time; a layer that has none is an error.",
    )
    fleet: File | None = _fleet(
        None,
        "A fleet file. If its hosts have addresses, every device of it is started, over ssh. For --plan auto: its times, as "
        "convoy measure wrote them; default: measure now.",
        here=True,
    )
    budget_s: Seconds = _fleet(20.0, "For --plan auto: about the seconds that measuring may take.", here=True, gt=0)
    spare: Spare = _fleet(
        "auto",
        "What is kept for the loss of a device, so that the others go on. every-step: the state after each step, with "
        "copies of the pieces that only one device has in another's memory; auto: so often that it costs at most 2 % of the "
        "time, and the steps since are repeated; none: nothing, and a loss ends the training.",
    )
    job_key: File | None = _fleet(
        None,
        "Key of the job, as `convoy key` makes it: under torchrun, srun and mpirun on several machines. The devices that this "
        "command starts need none.",
        here=True,
    )
    trust_network: bool = _fleet(
        False,
        "Connections are neither authenticated nor encrypted: whoever reaches the machines' ports can read "
        "and end the job.",
        here=True,
    )
    listen: Annotated[str, AfterValidator(checked_listen)] | None = _fleet(
        None,
        "Let further devices come in while it trains, with `convoy join` and the key of --job-key: the address of this machine "
        "at which they ask, e.g. 192.168.1.5:7000 or 192.168.1.5. Default: nobody comes in.",
        here=True,
    )
    port: int | None = _fleet(None, "Port where the processes meet; default: a free one.", here=True, ge=0, le=65535)
    timeout_s: Seconds = _fleet(60.0, "Seconds after which a silent device counts as lost.", here=True, gt=0)

    epochs: int = _step(1, "Passes over the training images.", ge=1)
    batch: int = _step(64, "Global batch: samples per step, over all devices.", ge=1)
    accumulate: Annotated[Literal["auto"] | int, BeforeValidator(passes_of_text)] = _step(
        1,
        "Passes that make one step, each with an equal part of the batch: less memory, the same numbers (batch norm alone "
        "sees the part). [b]auto[/], with --plan auto: one, or as many as the devices' memory asks for; one for nets with "
        "batch norm.",
    )
    optimizer: Annotated[str, one_of("convoy.train.loop:OPTIMIZERS")] = _step("sgd", "sgd, adam or adamw.")
    lr: float = _step(0.01, "Learning rate; the highest one of a schedule.", gt=0)
    momentum: float = _step(0.9, "Momentum of sgd.", ge=0)
    weight_decay: float = _step(0.0, "Weight decay.", ge=0)
    schedule: Annotated[str, one_of("convoy.train.lr:SCHEDULES")] = _step(
        "constant",
        "How the learning rate changes: constant, cosine (down to 0), step (multiplied by --drop-factor after every "
        "--drop-epochs), one-cycle (up from 1/25, then down to nearly 0).",
    )
    warmup_epochs: float = _step(
        0.0, "The learning rate first rises in a straight line for so long; of one-cycle, its rise (0: 30 %).", ge=0
    )
    drop_epochs: int = _step(30, "For --schedule step: epochs between two drops.", ge=1)
    drop_factor: float = _step(0.1, "For --schedule step: what a drop multiplies the learning rate by.", gt=0, le=1)
    clip_norm: float | None = _step(
        None, "Scale the gradients where their common norm, over all devices, is larger than this.", gt=0
    )
    label_smoothing: float = _step(0.0, "Part of each label that is spread over all classes, e.g. 0.1.", ge=0, lt=1)
    ema: float | None = _step(
        None, "Keep a moving average of the weights, with this decay per step, e.g. 0.999; tests use it.", ge=0, lt=1
    )
    precision: Annotated[str, one_of("convoy.runtime.precision:PRECISIONS")] = _step(
        "float32",
        "What layers compute in: float32, bf16 or fp16 (with loss scaling; GPUs only). Weights and sums stay float32, and so "
        "does what travels unless --wire says otherwise.",
    )
    seed: int = _step(0, "Decides the first weights and the order of the images.", ge=0, le=MAX_SEED)

    evaluate_epochs: int = _test(1, "Test after every so many epochs; the last one is always tested.", ge=1)
    evaluate_steps: int | None = _test(None, "Test after every so many steps, too.", ge=1)

    checkpoint: File | None = _output(
        None, "Save the run in this folder after every epoch; the last three and the best stay.", here=True
    )
    checkpoint_steps: int | None = _output(None, "Save it after every so many steps, too.", ge=1)
    resume: bool = _output(
        False, "Go on from the latest checkpoint in the folder: on any devices, by any plan, on the same curve."
    )
    on_nan: Literal["warn", "stop"] = _output(
        "warn",
        "At the first step whose loss is NaN or infinite: [b]warn[/], and go on; or [b]stop[/] there, with exit status 2.",
    )
    compare: bool = _output(
        False,
        "Afterwards, the same training on one CPU by plain PyTorch, slowed down as the fastest device is.",
        here=True,
    )
    explain: bool = _output(
        False,
        "Print every setting and where it comes from, and the step list: every computation, move and sum of one step.",
        here=True,
    )
    save_run: File | None = _output(None, "Write all settings to this run file (TOML).", here=True)
    save_plan: File | None = _output(None, "Write the plan to this file (JSON).", here=True)
    log: File | None = _output(
        None,
        "Write every loss, result and decision to this file, a JSON object per line; none: nowhere. Default: log.jsonl in "
        "the folder of --checkpoint, or in a new folder in runs (or $CONVOY_RUNS), with run.toml, plan.json and fleet.toml.",
        here=True,
    )
    page: bool = _output(
        False,
        "Write the page of the run after every epoch, as convoy report does; a browser that shows it follows the run.",
        here=True,
    )
    tensorboard: Annotated[File, AfterValidator(checked_tensorboard)] | None = _output(
        None,
        "Write loss, accuracy, learning rate and samples/s for TensorBoard into this folder (pip install "
        "'convoy-train\\[tensorboard]').",
        here=True,
    )
    wandb: Annotated[str, AfterValidator(checked_wandb)] | None = _output(
        None,
        "The same numbers, and what each device uses, to Weights & Biases, into this project (pip install "
        "'convoy-train\\[wandb]'); without a network: WANDB_MODE=offline.",
        here=True,
    )
    mlflow: Annotated[str, AfterValidator(checked_mlflow)] | None = _output(
        None,
        "Likewise to MLflow: the address of a tracking server, or sqlite:///FILE (pip install 'convoy-train\\[mlflow]').",
        here=True,
    )

    @field_validator("*", mode="after")
    @classmethod
    def _within_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        """What no training can mean: numbers beyond all use, and texts that no file could hold."""
        name = str(info.field_name)
        most = MOST.get(name, MOST_NUMBER)
        if isinstance(value, int | float) and value > most:
            raise InputError(f"give {rule_of(name)}, at most {most:g}")
        if isinstance(value, str | Path):
            check_text(str(value))
        return value

    @property
    def device_names(self) -> tuple[str, ...]:
        return device_names(self.devices)

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """One per device."""
        return (1.0,) * len(self.device_names) if self.slowdown is None else self.slowdown

    @property
    def passes(self) -> int:
        """Passes that make one step; 1 where it has yet to be found out."""
        return 1 if self.accumulate == "auto" else self.accumulate

    @property
    def pass_batch(self) -> int:
        """Samples of one pass over all devices: what a plan is for."""
        return self.batch // self.passes

    @property
    def goes_on(self) -> bool:
        """Whether the training goes on without the devices that are lost."""
        return self.spare != "none" and self.reduce != "inexact-butterfly-mixing"

    @property
    def rebalances(self) -> bool:
        """Whether plans are tried and shares change while training."""
        return self.plan == AUTO if self.rebalance is None else self.rebalance

    @property
    def listens_at(self) -> tuple[str, int] | None:
        """Address and port of `--listen`; port 0: a free one."""
        return None if self.listen is None else listen_address(self.listen)

    @property
    def optimizer_state(self) -> str:
        """The optimizer by what it keeps, for predictions of memory."""
        if self.optimizer == "sgd":
            return "sgd-momentum" if self.momentum else "sgd"
        return "adam"

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is computed, as JSON holds them: they must be the same on every device.

        A plan file or a folder of images may lie elsewhere on each machine; what is in them is compared later.
        """
        names = {name for name, field in FIELDS.items() if not _extra(field)["here"]}
        shown = self.model_dump(mode="json", include=names)
        if self.plan not in (*PLANS, AUTO):
            shown["plan"] = "a file"
        if importlib.import_module("convoy.data").folder_of(self.data) is not None:
            shown["data"] = "a folder"
        return shown

    @property
    def lasting(self) -> dict[str, Any]:
        """The settings that must be the same when a run goes on, as JSON holds them: those that shape its curve."""
        shaping = {name: value for name, value in self.decisive.items() if panel(name) in (DATA, TRAINING)}
        free = {"accumulate"} if self.schedule in ("cosine", "one-cycle") else {"accumulate", "epochs"}
        return {name: value for name, value in shaping.items() if name not in free}


FIELDS: Mapping[str, FieldInfo] = Settings.model_fields
"""The list, in its order."""


def _extra(field: FieldInfo) -> Mapping[str, Any]:
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def panel(name: str) -> str:
    """The part of the list in which a setting stands."""
    return str(_extra(FIELDS[name])["panel"])


def key_of(name: str) -> str:
    """What a setting is called on the command line and in a run file: data_dir is data-dir, timeout_s is timeout."""
    return name.removesuffix("_s").replace("_", "-")


def kind_of(name: str) -> type:
    """The type that a setting's values have: bool, int, float, str, Path or tuple."""
    annotation = _annotation(name)
    kind = str if get_origin(annotation) is Literal else get_origin(annotation) or annotation
    assert isinstance(kind, type)
    return kind


def _annotation(name: str) -> Any:
    """Without None, and without what only pydantic reads."""
    annotation: Any = FIELDS[name].annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


_SIDES = ("ge", "gt", "le", "lt")
_BOUNDS = {
    (): "",
    ("ge",): " of {} or more",
    ("gt",): " above {}",
    ("ge", "le"): " from {} to {}",
    ("ge", "lt"): " from {} to below {}",
    ("gt", "le"): " above {}, up to {}",
    ("gt", "lt"): " between {} and {}",
}
"""Bounds of a number, as pydantic names them, in words."""


def rule_of(name: str) -> str:
    """What may be given for a setting, in words."""
    annotation = _annotation(name)
    if get_origin(annotation) is Literal and int in get_args(FIELDS[name].annotation):
        return f"{', '.join(get_args(annotation))}, or a whole number of 1 or more"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(sorted(get_args(annotation)))}"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        Path: "a path",
        tuple: "finite numbers with commas between them, e.g. 1,1,2,4",
    }
    found = {side: getattr(each, side) for side in _SIDES for each in FIELDS[name].metadata if hasattr(each, side)}
    return words[kind_of(name)] + _BOUNDS[tuple(found)].format(*found.values())
