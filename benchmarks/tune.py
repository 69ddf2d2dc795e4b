"""Try flags on tuning seeds; every run is a row of results/tuning.csv. Reported seeds are others.

    python benchmarks/tune.py distributional_ppo_lstm PendulumNoVel-v1 --gamma 0.9
    python benchmarks/tune.py distributional_ppo_lstm CartPoleNoVel-v1 --seeds 1000 1001 --kappa 1
    python benchmarks/tune.py --report CartPoleNoVel-v1     # what the rows say, a line per setting

Whatever this program does not know goes to the script. Runs that have a row are skipped. With
--eval-every the row holds every evaluation, step:return, the last one included.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from learning import THRESHOLDS, first_step

HERE = Path(__file__).resolve().parent
PATH = HERE / "results" / "tuning.csv"
sys.path[:0] = [str(HERE.parent), str(HERE)]
FIELDS = (  # steps_to_threshold: of the training returns; empty in early rows and without threshold
    "script", "task", "flags", "seed", "return_mean", "return_std", "evaluations",
    "steps_to_threshold",
)  # fmt: skip


def run_one(script: str, task: str, flags: list[str], seed: int) -> dict[str, object]:
    """Train one seed in a process of its own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = importlib.import_module(script)
    with tempfile.TemporaryDirectory() as top, contextlib.redirect_stdout(io.StringIO()):
        args = ["--env-id", task, *flags, "--seed", str(seed), "--run-dir", top]
        metrics = module.train(module.tyro.cli(module.Args, args=args))
        events = EventAccumulator(metrics["run_dir"], {"scalars": 0})
        events.Reload()
        scores = [f"{x.step}:{x.value:.1f}" for x in events.Scalars("eval/return_mean")]
        curve = [(x.step, x.value) for x in events.Scalars("charts/episodic_return")]
    needed = first_step(np.array(curve), THRESHOLDS[task]) if task in THRESHOLDS else ""
    final = {key: round(metrics[f"eval/{key}"], 4) for key in ("return_mean", "return_std")}
    scores = " ".join(scores) if len(scores) > 1 else ""
    return {"seed": seed, **final, "evaluations": scores, "steps_to_threshold": needed}


def report(task: str) -> None:
    """Print seeds, final evaluations, those at the threshold, the mean of all evaluations in the
    last three quarters of the runs and the median steps to the threshold, for every setting."""
    settings: dict[tuple[str, str], list[dict[str, str]]] = {}
    with PATH.open() as file:
        for row in csv.DictReader(file):
            if row["task"] == task:
                settings.setdefault((row["script"], row["flags"]), []).append(row)
    print("| script | flags | seeds | mean | worst | reached | later | steps |\n|" + "---|" * 8)
    for (script, flags), rows in sorted(settings.items()):
        final, later = np.array([float(row["return_mean"]) for row in rows]), []
        for row in rows:
            points = [[float(x) for x in point.split(":")] for point in row["evaluations"].split()]
            later += [score for step, score in points if step > points[-1][0] / 4]
        reached = sum(final >= THRESHOLDS[task]) if task in THRESHOLDS else "-"
        figures = (len(rows), f"{final.mean():.1f}", f"{final.min():.1f}", reached)
        mean = f"{np.mean(later):.1f}" if later else "-"
        needed = [float(row["steps_to_threshold"] or "nan") for row in rows]
        steps = f"{np.nanmedian(needed):.0f}" if not np.isnan(needed).all() else "-"
        print("|", " | ".join(map(str, (script, flags or "none", *figures, mean, steps))), "|")


def main() -> None:
    """Parse, run what is missing, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("script", nargs="?", default="")
    parser.add_argument("task", help="gymnasium id")
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    parser.add_argument("--seeds", nargs="*", type=int, default=[*range(1000, 1008)])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args, flags = parser.parse_known_args()
    if args.report:
        report(args.task)
        return
    if not args.script:
        parser.error("name the script ahead of the task")
    same = {"script": args.script, "task": args.task, "flags": " ".join(flags)}
    with PATH.open() as file:
        done = {row["seed"] for row in csv.DictReader(file) if same.items() <= row.items()}
    missing = [seed for seed in args.seeds if str(seed) not in done]
    with ProcessPoolExecutor(args.processes, max_tasks_per_child=1) as pool:
        runs = [pool.submit(run_one, args.script, args.task, flags, seed) for seed in missing]
        for run in runs:
            row = same | run.result()
            with PATH.open("a", newline="") as file:
                csv.DictWriter(file, FIELDS, lineterminator="\n").writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
