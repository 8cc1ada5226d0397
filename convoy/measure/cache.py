"""Reads what is known of a fleet before it is measured: a fleet file, or times that an earlier start has kept.

Times are kept in the user's cache folder, or in the folder that CONVOY_CACHE names. If that is empty, nothing is kept.
"""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from convoy._version import __version__
from convoy.comm.control_messages import from_first, gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.files import parse_json, read_text, write_whole
from convoy.machine.accelerator import hardware_name, modes
from convoy.measure.device_info import DeviceInfo, describe_device, fit, fleet_of, host_indices, quota_cores
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanOptions, PlanRequest
from convoy.simulate.table import Measurement

MOST_BYTES = 32 << 20  # of all files together. Older ones are removed


def known_fleet(
    group: Group, request: PlanRequest, model: str, options: PlanOptions
) -> tuple[FleetKnowledge, Path | None]:
    """Return what device 0 knows of the fleet, and the file that keeps a measurement; None: nothing is kept.

    Without a fleet file, CONVOY_FLEET names the description of an emulated fleet to measure.

    Args:
        model: its modules as text. Kept times are only valid for the same model, batch, devices and versions.

    Raises:
        InputError, MismatchError: see `FleetKnowledge.of_job` and `fit`.
    """
    file, precision, device = options.get("fleet"), options.get("precision", "float32"), group.torch_device
    own = describe_device(device, options.get("slowdown", 1.0))
    rows = gather(group, "machines", [asdict(own), hardware_name(device), quota_cores(), modes()])

    def read() -> list[Any]:
        if file is not None:
            return [FleetKnowledge.of_job(file, request.graph, group.devices, precision).to_json(), None]
        emulated = os.environ.get("CONVOY_FLEET")
        described = FleetKnowledge.from_file(Path(emulated)).described if emulated else None
        infos = [DeviceInfo(**info) for info, *_ in rows]
        fleet = fleet_of(infos) if described is None else fit(described, infos)
        devices = [[info.name, info.kind, info.cores, info.slowdown] for info in infos]
        key = [
            request.graph.fingerprint, [layer.dtype for layer in request.graph.layers.values()], model, request.batch,
            precision, options.get("budget_s"), devices, [row[1:] for row in rows], host_indices(fleet),
            described and described.to_toml(), str(torch.__version__), __version__,
        ]  # fmt: skip
        path = None if group.devices == 1 else cache_file(key)
        measured = None if path is None else load_measured(path)
        if measured is not None:  # other programs may use more memory now
            pairs = zip(measured.fleet.devices, fleet.devices, strict=True)
            now = tuple(replace(old, memory_bytes=new.memory_bytes) for old, new in pairs)
            measured = replace(measured, fleet=replace(measured.fleet, devices=now))
        return [FleetKnowledge(described, measured).to_json(), path and str(path)]

    row, path = from_first(group, "fleet to measure", read)
    return FleetKnowledge.from_json(row), None if path is None else Path(path)


def cache_file(key: object) -> Path | None:
    """Return the file for everything that times depend on, a JSON value; None if nothing is kept."""
    folder = os.environ.get("CONVOY_CACHE")
    if folder is None:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            folder = str((root if root.is_absolute() else Path.home() / ".cache") / "convoy" / "measured")
        except RuntimeError:  # no home directory
            return None
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return Path(folder) / f"{name}.json" if folder else None


def load_measured(path: Path) -> Measurement | None:
    """Return the kept measurement; None if there is none that can be read."""
    with suppress(InputError, ValueError, TypeError, KeyError):
        return Measurement.from_toml(parse_json(read_text(path, "the measurement", ""))["measured"])
    return None


def keep_measured(path: Path, measured: Measurement) -> None:
    """Write a measurement, and remove the oldest files above `MOST_BYTES`. A folder that cannot be written is ignored."""
    with suppress(InputError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"measured": measured.to_toml()}))
        kept_bytes = 0
        for each in sorted(path.parent.glob("*.json"), key=lambda each: -each.stat().st_mtime):
            kept_bytes += each.stat().st_size
            if kept_bytes > MOST_BYTES:
                each.unlink()
