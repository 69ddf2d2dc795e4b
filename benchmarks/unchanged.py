"""Do two versions of the scripts give the same runs?

    python benchmarks/unchanged.py 631eace           # that commit against the working tree
    python benchmarks/unchanged.py 631eace --only distributional_ppo_lstm Pendulum-v1
    python benchmarks/unchanged.py 631eace --new FOLDER  # against the scripts of a folder
    python benchmarks/unchanged.py 631eace --speed 40  # steps per second instead, 40 times in turn

Both versions train for three iterations on every task with every set of flags below. Each run is a
process that knows its command line alone, and what it leaves is compared: every point of every
scalar and histogram but for clocks, and the states of the agent and of the optimizers in the last
checkpoint. The table tells how many of the numbers are equal to the last bit, and how large the
largest difference of the others is, relative to the number; relative to 1 where the number is a
difference of nearly equal ones; relative to the largest entry in a state. What one version alone
has, and what both lack, is named, and is an infinite difference, as is a run that fails. Exit code
1 if a difference exceeds the tolerance.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import CATEGORICAL, HERE, LSTM, markdown_head, markdown_row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = HERE.parent
STEPS = 3 * 4 * 64  # of a run: three iterations
SMALL = "--num-envs 4 --num-steps 64 --update-epochs 3 --eval-episodes 2"
FAST = "--learning-rate 0.01"  # with a smaller one nothing is clipped and no KL limit is met
SPEED_STEPS = 10_240
TOLERANCE = 1e-6  # of a sum in another order
NEAR_ZERO = {  # differences of nearly equal numbers: most of their digits are rounding
    "norm/value_shift",
    "policy/ratio_first_minibatch_error",
    "losses/policy_loss",
    "losses/approx_kl",
    "policy/kl_exact",
    "policy/kl_max",
}
CLOCKS = ("time/", "charts/SPS")
HPARAMS = "_hparams_/"  # flags, for TensorBoard's table of runs
TASKS = {  # with flags that the recurrent script alone knows
    "CartPole-v1": "",
    "Pendulum-v1": "",
    "probes:NestedMultiDiscrete-v0": "",  # of the tests
    "probes:Flicker-v0": "",  # images
    "CartPoleNoVel-v1": "--seq-len 32",
}
FLAGS = [
    "",
    "--value-target sr_lambda --cvar-weight 0.5",
    "--vf-clip mean_only",
    "--target-kl 0.01",
    "--norm-adv-memory 0 --no-norm-returns",
    "--value-from distribution --twin-reduce mean",
    "--num-critics 1",
]
FLAGS_OF_ONE = {
    LSTM: ["--vf-clip per_quantile", "--vf-clip mean_and_variance"],
    CATEGORICAL: ["--mean-output value"],
}
KINDS = ("scalar", "histogram", "agent", "optimizer")  # of numbers; a name opens with its kind
STATES = ("agent", "optimizer")
Numbers = dict[str, np.ndarray]  # what a run leaves, float64, by name


class Cell(NamedTuple):
    """One cell of the grid."""

    script: str
    task: str
    flags: str

    @property
    def told(self) -> tuple[str, str, str]:
        """Its entries in the table."""
        return self.script, self.task, self.flags or "defaults"


@dataclass
class Difference:
    """How two runs compare."""

    numbers: int = 0  # compared
    equal: int = 0  # to the last bit
    largest: float = 0.0  # relative difference
    where: str = ""  # the largest is

    @classmethod
    def infinite(cls, reasons: Iterable[str]) -> Difference:
        """Of what cannot be compared; of no reason none."""
        where = "; ".join(reasons)
        return cls(largest=np.inf if where else 0.0, where=where)


# --------------------------------------------------------------------------------------------- runs
def copy_scripts(version: str, folder: Path) -> Path:
    """Both scripts of a folder or of a commit, as they are now; the folder that they are in."""
    folder.mkdir()
    for name in (f"{LSTM}.py", f"{CATEGORICAL}.py"):
        if Path(version).is_dir():
            shutil.copy(Path(version, name), folder)
        else:
            command = ["git", "show", f"{version}:{name}"]
            shown = subprocess.run(command, cwd=ROOT, capture_output=True)
            if shown.returncode:
                raise SystemExit(f"{version}: no folder, and no commit that has {name}")
            Path(folder, name).write_bytes(shown.stdout)
    return folder


def run(script: Path, line: list[str], top: Path) -> Path:
    """The directory of a run, made below `top` by a process that prints nothing."""
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(script), *line, "--run-dir", str(top)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=script.parent,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        told = " ".join(ended.stderr.split())  # in one row of a table
        raise RuntimeError(f"exit code {ended.returncode}, {told[-300:]}")
    [run_dir] = top.iterdir()
    return run_dir


def outcome(script: Path, line: list[str]) -> Numbers:
    """All numbers that a run leaves."""
    with tempfile.TemporaryDirectory() as top:
        run_dir = run(script, line, Path(top))
        return logged(run_dir) | kept(run_dir / "checkpoint.pt")


# ---------------------------------------------------------------------------------- what they leave
def logged(run_dir: Path) -> Numbers:
    """Scalars and histograms, all points with their steps, but for clocks and flags."""
    sizes = {"scalars": 0, "histograms": 0}  # all of them
    events = EventAccumulator(str(run_dir), sizes, purge_orphaned_data=False)
    events.Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        found[f"scalar {tag}"] = [[point.step, point.value] for point in events.Scalars(tag)]
    for tag in events.Tags()["histograms"]:
        found[f"histogram {tag}"] = points = []
        for point in events.Histograms(tag):
            x = point.histogram_value
            points += [point.step, x.min, x.max, x.num, x.sum, x.sum_squares]
            points += [*x.bucket_limit, *x.bucket]
    left_out = (*CLOCKS, HPARAMS)
    return {
        name: np.ravel(np.array(points, float))
        for name, points in found.items()
        if not name.split(" ", 1)[1].startswith(left_out)
    }


def kept(checkpoint: Path) -> Numbers:
    """States of the agent and of the optimizer."""
    content = torch.load(checkpoint, map_location="cpu", weights_only=True)
    parts = [x.numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in content.values()]
    pickled = [Lenient(io.BytesIO(x)).load() for x in parts if isinstance(x, bytes)]
    agent = {f"agent {name}": flat(x) for name, x in content["agent"].items()}
    return agent | optimizer_state([content, pickled])


def flat(x: Any) -> np.ndarray:
    """A tensor's or a number's entries, float64."""
    return torch.as_tensor(x).double().flatten().numpy()


def optimizer_state(content: Any) -> Numbers:
    """What all optimizers hold, each kind of all parameters in a row: no layout can be seen. Steps
    are counted by each parameter, and equal neighbours are told once."""
    parts: dict[str, list[np.ndarray]] = {}
    for optimizer in optimizers(content):
        for _, state in sorted(optimizer["state"].items()):
            for kind, x in state.items():
                parts.setdefault(kind, []).append(flat(x))
    joined = {f"optimizer {kind}": np.concatenate(x) for kind, x in parts.items()}
    if "optimizer step" in joined:
        steps = torch.from_numpy(joined["optimizer step"])
        joined["optimizer step"] = steps.unique_consecutive().numpy()
    return joined


def optimizers(thing: Any) -> Iterator[dict]:
    """The state dicts of optimizers in it, wherever they are, in their order."""
    if isinstance(thing, Unknown):
        thing = vars(thing)
    if isinstance(thing, dict) and {"state", "param_groups"} <= thing.keys():
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from optimizers(part)


class Unknown:
    """An object of a class that its script alone knows: what it was made of."""

    def __new__(cls, *parts: Any) -> Unknown:
        made = super().__new__(cls)
        made.parts = parts
        return made

    def __init__(self, *parts: Any) -> None:
        """Nothing is left to do."""


class Lenient(pickle.Unpickler):
    """Loads what a run has pickled without its script."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, or what stands for it."""
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return Unknown


# --------------------------------------------------------------------------------------- comparison
def compare(old: Numbers, new: Numbers) -> Difference:
    """Every number of the one run against that of the other."""
    both = [name for name in old if name in new]
    kinds = {name.split(" ", 1)[0] for name in both}
    reasons = [f"there is no {kind} to compare" for kind in KINDS if kind not in kinds]
    reasons += [f"{name} in the old version alone" for name in old if name not in new]
    reasons += [f"{name} in the new version alone" for name in new if name not in old]
    for name in both:
        sizes = old[name].size, new[name].size
        if sizes[0] != sizes[1]:
            reasons.append(f"{name} is of {sizes[0]} numbers, in the new version of {sizes[1]}")
    result = Difference.infinite(reasons)
    for name in both:
        if old[name].size == new[name].size:
            add(result, name, old[name], new[name])
    return result


def add(result: Difference, name: str, before: np.ndarray, after: np.ndarray) -> None:
    """Count numbers of this name in."""
    same = before.view(np.int64) == after.view(np.int64)
    with np.errstate(invalid="ignore"):  # inf - inf
        relative = np.where(same, 0.0, np.abs(after - before) / scale(name, before))
    largest = np.nan_to_num(relative, nan=np.inf, posinf=np.inf).max(initial=0.0)
    result.numbers += before.size
    result.equal += int(same.sum())
    if largest > result.largest:
        result.largest, result.where = float(largest), name


def scale(name: str, before: np.ndarray) -> np.ndarray:
    """What differences of these numbers are relative to."""
    kind, tag = name.split(" ", 1)
    size = np.abs(before)
    if kind in STATES:
        size = np.full_like(size, size.max(initial=0.0))
    return np.maximum(size, 1.0 if tag in NEAR_ZERO else 1e-12)


def compare_cell(cell: Cell, old: Path, new: Path) -> Difference:
    """The runs of both versions, at the same time."""
    line = ["--env-id", cell.task, "--total-timesteps", str(STEPS), *SMALL.split()]
    line += [*FAST.split(), *cell.flags.split()]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(outcome, x / f"{cell.script}.py", line) for x in (old, new)]
    failed = [(side, x.exception()) for side, x in zip(("old", "new"), runs) if x.exception()]
    if failed:
        return Difference.infinite(f"{side} version: {error!r}" for side, error in failed)
    return compare(*(x.result() for x in runs))


def compare_results(cells: Iterable[Cell], old: Path, new: Path) -> float:
    """A row for each cell; the largest difference of all."""
    columns = "script | task | flags | equal to the last bit | largest difference | of"
    print("\n".join(markdown_head(columns)), flush=True)
    worst = 0.0
    for cell in cells:
        found = compare_cell(cell, old, new)
        worst = max(worst, found.largest)
        equal = f"{found.equal} of {found.numbers}"
        row = (*cell.told, equal, f"{found.largest:.1e}", found.where)
        print(markdown_row(row), flush=True)
    return worst


# -------------------------------------------------------------------------------------------- speed
def speed(script: Path) -> float:
    """Steps per second of a run with the default flags, as it tells them at its end."""
    line = ["--total-timesteps", str(SPEED_STEPS), "--eval-episodes", "1"]
    with tempfile.TemporaryDirectory() as top:
        events = EventAccumulator(str(run(script, line, Path(top))), {"scalars": 0})
        events.Reload()
        return events.Scalars("charts/SPS")[-1].value


def compare_speed(name: str, old: Path, new: Path, repeats: int) -> None:
    """Steps per second, new over old. The two take turns, and in going first as well."""
    ratios = []
    for repeat in range(repeats):
        found = {}
        for folder in (old, new) if repeat % 2 == 0 else (new, old):
            found[folder] = speed(folder / f"{name}.py")
        ratios.append(found[new] / found[old])
    low, high = np.min(ratios), np.max(ratios)
    print(f"{name}: {np.median(ratios):.3f} times as fast ({low:.3f} to {high:.3f})", flush=True)


# ------------------------------------------------------------------------------------- command line
def grid(words: list[str]) -> list[Cell]:
    """The cells that these words select: each is a part of script, task or flags."""
    cells = []
    for script in (LSTM, CATEGORICAL):
        for task, own in TASKS.items():
            for flags in FLAGS + FLAGS_OF_ONE[script]:
                told = f"{own} {flags}".strip() if script == LSTM else flags
                cells.append(Cell(script, task, told))
    return [cell for cell in cells if all(any(word in x for x in cell.told) for word in words)]


def main() -> int:
    """Compare the scripts of a commit or folder with those of the working tree or of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="the version to compare with: a commit, or a folder")
    parser.add_argument("--new", default=str(ROOT), help="the same; the working tree by default")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--speed", type=int, default=0, help="repeats; compare speed instead")
    given = parser.parse_args()
    if given.speed and not {*given.only} <= {LSTM, CATEGORICAL}:
        parser.error("--only: speed is that of each script's defaults; name a script")
    cells = grid(given.only)
    if not cells:
        parser.error(f"no cell matches {' '.join(given.only)}")
    with tempfile.TemporaryDirectory() as folder:
        old = copy_scripts(given.old, Path(folder, "old"))
        new = copy_scripts(given.new, Path(folder, "new"))
        if not given.speed:
            return int(compare_results(cells, old, new) > TOLERANCE)
        for name in sorted({cell.script for cell in cells}):
            compare_speed(name, old, new, given.speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
