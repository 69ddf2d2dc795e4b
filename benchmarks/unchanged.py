"""Do two versions of the scripts give the same runs?

    python benchmarks/unchanged.py 631eace           # that commit against the working tree
    python benchmarks/unchanged.py 631eace --only distributional_ppo_lstm Pendulum-v1
    python benchmarks/unchanged.py 631eace --speed 40  # steps per second instead, 40 times in turn

Both versions train for three iterations on every task with every set of flags below. Everything
they log but for clocks is compared, number by number. The table tells how many of the numbers are
equal to the last bit and how large the largest difference of the others is, relative to the number
or, for what is a difference of nearly equal numbers, to 1. Exit code 1 if it exceeds the tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from common import CATEGORICAL, HERE, LSTM, markdown_head, markdown_row

ROOT = HERE.parent
ITERATIONS = 3
SPEED_ITERATIONS = 5
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
SMALL = "--num-envs 4 --num-steps 64 --update-epochs 3 --eval-episodes 2"
TASKS = {  # with flags that the recurrent script alone knows
    "CartPole-v1": "",
    "Pendulum-v1": "",
    "probes:NestedMultiDiscrete-v0": "",  # of the tests
    "CartPoleNoVel-v1": "--seq-len 32",
}
FLAGS = [
    "",
    "--value-target sr_lambda --cvar-weight 0.5",
    "--vf-clip mean_only",
    "--target-kl 0.01",
]
FLAGS_OF_QUANTILES = ["--vf-clip per_quantile", "--vf-clip mean_and_variance"]


@dataclass
class Difference:
    """How two runs compare."""

    numbers: int = 0  # compared
    equal: int = 0  # to the last bit
    largest: float = 0.0  # relative difference
    tag: str = ""  # of the largest


def load(path: Path) -> ModuleType:
    """The script in that file, under a name of its own."""
    name = "_".join(path.parts[-2:]).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def train(script: ModuleType, flags: list[str], iterations: int) -> dict[str, float]:
    """The last value of every metric of a run without output."""
    args = script.tyro.cli(script.Args, args=flags)
    args.total_timesteps = iterations * args.batch_size
    args.__post_init__()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args.run_dir = folder
        return script.train(args)


def logged(script: ModuleType, flags: list[str]) -> dict[str, np.ndarray]:
    """Everything that a run logs, by tag, in the order in which it was logged."""
    points: dict[str, list[np.ndarray]] = {}

    class Recorder(script.SummaryWriter):
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            points.setdefault(tag, []).append(np.array([step, value]))

        def add_histogram(self, tag: str, values: object, step: int) -> None:
            points.setdefault(tag, []).append(np.append(np.ravel(values), step))

    original = script.SummaryWriter
    script.SummaryWriter = Recorder
    train(script, flags, ITERATIONS)
    script.SummaryWriter = original
    return {tag: np.concatenate(x) for tag, x in points.items() if not tag.startswith(CLOCKS)}


def compare(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> Difference:
    """Every number of the one run against that of the other."""
    if old.keys() != new.keys():
        return Difference(1, 0, np.inf, f"logged by one alone: {old.keys() ^ new.keys()}")
    result = Difference()
    for tag, before in old.items():
        after = new[tag]
        if before.shape != after.shape:
            return Difference(1, 0, np.inf, f"{tag} has another number of points")
        scale = np.maximum(np.abs(before), 1.0 if tag in NEAR_ZERO else 1e-12)
        relative = np.where(before == after, 0.0, np.abs(after - before) / scale)
        result.numbers += before.size
        result.equal += int((before == after).sum())
        if relative.max() > result.largest:
            result.largest = float(relative.max())
            result.tag = tag
    return result


def compare_results(name: str, old: ModuleType, new: ModuleType, words: list[str]) -> float:
    """A row for each cell of the grid that these words select; the largest difference."""
    worst = 0.0
    for task, own in TASKS.items():
        for flags in FLAGS + (FLAGS_OF_QUANTILES if name == LSTM else []):
            told = f"{own} {flags}".strip() if name == LSTM else flags
            if not all(any(word in part for part in (name, task, told)) for word in words):
                continue
            line = ["--env-id", task, *SMALL.split(), *told.split()]
            found = compare(logged(old, line), logged(new, line))
            worst = max(worst, found.largest)
            equal = f"{found.equal} of {found.numbers}"
            row = (name, task, told or "defaults", equal, f"{found.largest:.1e}", found.tag)
            print(markdown_row(row), flush=True)
    return worst


def compare_speed(name: str, old: ModuleType, new: ModuleType, repeats: int) -> None:
    """Steps per second of the defaults, new over old, in turn."""
    flags = ["--eval-episodes", "1"]
    train(old, flags, 2)
    train(new, flags, 2)
    ratios = []
    for _ in range(repeats):
        before = train(old, flags, SPEED_ITERATIONS)["charts/SPS"]
        after = train(new, flags, SPEED_ITERATIONS)["charts/SPS"]
        ratios.append(after / before)
    low, high = np.min(ratios), np.max(ratios)
    print(f"{name}: {np.median(ratios):.3f} times as fast ({low:.3f} to {high:.3f})", flush=True)


def main() -> int:
    """Compare the scripts of a commit with those of the working tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the version to compare with")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--speed", type=int, default=0, help="repeats; compare speed instead")
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))  # its tasks
    worst = 0.0
    if not given.speed:
        columns = "script | task | flags | equal to the last bit | largest difference | of"
        print("\n".join(markdown_head(columns)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in (LSTM, CATEGORICAL):
            path = Path(folder, name + ".py")
            shown = subprocess.check_output(
                ["git", "show", f"{given.commit}:{path.name}"], cwd=ROOT
            )
            path.write_bytes(shown)
            old = load(path)
            new = load(ROOT / path.name)
            if given.speed:
                compare_speed(name, old, new, given.speed)
            else:
                worst = max(worst, compare_results(name, old, new, given.only))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
