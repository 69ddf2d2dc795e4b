"""Screen changes of flags: eight at once, in sixteen settings of a factorial design.

    python benchmarks/screen.py robots                      # every run without a row
    python benchmarks/screen.py robots --tasks Ant-v5       # of this task alone
    python benchmarks/screen.py robots --second             # what went on, beside the line
    python benchmarks/screen.py robots --report             # the effect of each change

Rows are in results/screening.csv. Runs that have a row are skipped.

Each setting makes half of the eight changes, or none, or all. So all runs tell of every change:
its effect is the mean of the runs with it minus that of the runs without. With one change at a
time it would be the difference of two settings. The design is the 2^(8-4) of resolution IV of
Box, Hunter and Hunter, "Statistics for Experimenters", 1978: no effect of one change is mixed with
that of another, nor with what two of them do together. Pairs are mixed with pairs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import common
import numpy as np
import tune
from common import CATEGORICAL, LSTM, RESULTS, Cell, Row, Run, Table
from tune import BEST, THRESHOLDS

COLUMNS = (
    "study",
    "task",
    "setting",  # the letters of its changes
    "seed",
    "return_mean",
    "steps_to_threshold",  # of the training returns; empty without a threshold
    "share_lost",  # of the steps after that, in episodes below it; empty as well
    "commit",
)
TABLE = Table(RESULTS / "screening.csv", COLUMNS, end="\n")
LETTERS = "ABCDEFGH"


class Study(NamedTuple):
    """What is screened. Each setting has seeds of its own, one after the other."""

    script: str
    tasks: Sequence[str]
    line: str  # as it was ahead of the screening
    changes: Sequence[str]  # behind the line, where they count
    first_seed: int
    seeds: int  # of each setting
    second_seeds: range  # of each candidate in the second stage, and of the line
    candidates: Sequence[str] = ()  # settings that went on

    def flags(self, setting: str) -> str:
        """The line with a setting's changes."""
        return " ".join([self.line, *(self.changes[LETTERS.index(x)] for x in setting)]).strip()


STUDIES = {
    "robots": Study(
        CATEGORICAL,
        tuple(BEST),
        "--compile --total-timesteps 1000000 --num-steps 256 --log-std-init -0.5 "
        # The critics' rate is told, so that it stays where that of the actor changes.
        "--learning-rate 0.0003 --critic-learning-rate 0.0003 --num-minibatches 32 "
        "--update-epochs 10 --norm-adv-memory 0 --target-kl 0.02 --norm-returns-memory 10",
        (
            "--num-envs 64 --num-steps 32",
            "--num-minibatches 16",
            "--learning-rate 0.0006",
            "--critic-learning-rate 0.001",
            "--log-std-init -1",
            "--activation tanh",
            "--gae-lambda 0.9",
            "--twin-reduce mean",
        ),
        first_seed=2000,
        seeds=1,
        second_seeds=range(2100, 2106),
    ),
    "cartpole_novel": Study(
        LSTM,
        ("CartPoleNoVel-v1",),
        "",  # the defaults
        (
            "--num-envs 16 --num-minibatches 4",
            "--gamma 0.98",
            "--gae-lambda 0.95",
            "--target-kl 0.02",
            "--learning-rate 0.002",
            "--twin-reduce mean",
            "--ent-coef 0.01 --ent-coef-final 0",
            "--activation tanh",
        ),
        first_seed=2000,
        seeds=2,
        second_seeds=range(2100, 2124),
        candidates=("ACDH",),
    ),
    "pendulum_novel": Study(
        LSTM,
        ("PendulumNoVel-v1",),
        "--num-envs 4 --num-steps 1000 --learning-rate 0.002 --critic-learning-rate 0.002 "
        "--gamma 0.9 --gae-lambda 0.95 --num-minibatches 20 --seq-len 100 --update-epochs 10 "
        "--min-entropy 1.4 --min-entropy-penalty 0.1",
        (
            "--num-steps 500 --num-minibatches 10",
            "--learning-rate 0.003",
            "--critic-learning-rate 0.004",
            "--norm-adv-memory 0",
            "--min-entropy 1",
            "--twin-reduce mean",
            "--update-epochs 15",
            "--activation tanh",
        ),
        first_seed=2000,
        seeds=1,
        second_seeds=range(2100, 2116),
        candidates=("H",),
    ),
}


# ----------------------------------------------------------------------------------------- design
def design() -> list[str]:
    """The letters of each setting's changes. Four are free, and the others follow from them:
    E = BCD, F = ACD, G = ABC and H = ABD, where made is +1 and left out is -1."""
    settings = []
    for a, b, c, d in itertools.product((-1, 1), repeat=4):
        levels = (a, b, c, d, b * c * d, a * c * d, a * b * c, a * b * d)
        made = [letter for letter, level in zip(LETTERS, levels, strict=True) if level > 0]
        settings.append("".join(made))
    return settings


def all_runs(study: Study) -> list[Run]:
    """Every run of the design, setting by setting."""
    runs = []
    for index, setting in enumerate(design()):
        first = study.first_seed + index * study.seeds
        for task in study.tasks:
            seeds = range(first, first + study.seeds)
            runs += common.runs_of([Cell(task, study.script, setting, study.flags(setting), seeds)])
    return runs


def second_runs(study: Study) -> list[Run]:
    """Every run of the second stage: the candidates beside the line, seed by seed."""
    cells = [
        Cell(task, study.script, setting, study.flags(setting), study.second_seeds)
        for setting in ("", *study.candidates)
        for task in study.tasks
    ]
    return sorted(common.runs_of(cells), key=lambda run: run.seed)


def missing(name: str, tasks: Sequence[str] = (), second: bool = False) -> list[Run]:
    """Runs of a study's first or second stage that have no row, of these tasks or of all."""
    known = {
        (row["task"], row["setting"], row["seed"]) for row in TABLE.rows() if row["study"] == name
    }
    every = second_runs(STUDIES[name]) if second else all_runs(STUDIES[name])
    runs = [run for run in every if not tasks or run.cell.task in tasks]
    return [run for run in runs if (run.cell.task, run.cell.variant, str(run.seed)) not in known]


def run_one(run: Run) -> dict[str, object]:
    """Train one seed of one setting: its row, but for the study."""
    row = tune.run_one(run) | {"setting": run.cell.variant}
    return {name: row[name] for name in COLUMNS if name != "study"}


# ----------------------------------------------------------------------------------------- report
class Effects(NamedTuple):
    """What the changes do to one number."""

    mean: float  # of all runs
    changes: np.ndarray  # (8,): with a change minus without it
    error: float  # the standard error of each of them


def effects_of(settings: Sequence[str], values: np.ndarray) -> Effects:
    """Fit the mean and the eight effects by least squares.

    The error is that of what is left over, which holds the noise of the runs and what pairs of
    changes do together. It needs more runs than the nine numbers that are fitted.
    """
    made = np.array([[letter in setting for letter in LETTERS] for setting in settings])
    columns = np.column_stack([np.ones(len(settings)), made - 0.5])
    fitted, _, rank, _ = np.linalg.lstsq(columns, values, rcond=None)
    if rank < columns.shape[1] or len(values) == rank:
        raise ValueError(f"{len(values)} runs do not tell the effects of {len(LETTERS)} changes")
    left = values - columns @ fitted
    variance = left @ left / (len(values) - rank)
    variances = variance * np.linalg.inv(columns.T @ columns).diagonal()
    return Effects(float(fitted[0]), fitted[1:], float(np.sqrt(variances[1:].max())))


def mean_effects(parts: Sequence[Effects]) -> Effects:
    """The effects on the mean of several numbers from independent runs."""
    return Effects(
        float(np.mean([part.mean for part in parts])),
        np.mean([part.changes for part in parts], axis=0),
        float(np.sqrt(sum(part.error**2 for part in parts)) / len(parts)),
    )


def robots_effects(rows: Sequence[Row]) -> dict[str, Effects]:
    """On the score of each robot, an evaluation over the best published one, and on their mean."""
    told = {}
    for task, best in BEST.items():
        of_task = [row for row in rows if row["task"] == task]
        if len(of_task) > len(LETTERS) + 1:
            scores = np.array([float(row["return_mean"]) for row in of_task]) / best
            told[task.removesuffix("-v5")] = effects_of([row["setting"] for row in of_task], scores)
    return told | {"score": mean_effects([*told.values()])} if told else {}


def one_task_effects(rows: Sequence[Row]) -> dict[str, Effects]:
    """On the evaluation and, where the task has a threshold, on thousands of steps to it (a run
    that never reaches it counts its last episode's) and on the share of later steps below it."""
    settings = [row["setting"] for row in rows]
    if len(rows) <= len(LETTERS) + 1:
        return {}
    told = {"evaluation": [float(row["return_mean"]) for row in rows]}
    if rows[0]["share_lost"]:
        told["thousand steps"] = [min(float(row["steps_to_threshold"]), 1e5) / 1e3 for row in rows]
        told["share lost"] = [float(row["share_lost"]) for row in rows]
    return {name: effects_of(settings, np.array(values)) for name, values in told.items()}


def report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table: the mean of all runs, and the effect of each change with its standard error."""
    later = STUDIES[name].second_seeds
    of_study = [row for row in rows if row["study"] == name and int(row["seed"]) not in later]
    told = robots_effects(of_study) if name == "robots" else one_task_effects(of_study)
    if not told:
        return [f"{name}: too few rows."]
    digits = {
        part: 1 if effects.mean > 10 or effects.mean < -10 else 3 for part, effects in told.items()
    }
    lines = common.markdown_head(" | ".join(["change", *told]))
    means = [f"{effects.mean:.{digits[part]}f}" for part, effects in told.items()]
    lines.append(common.markdown_row(["mean of all runs", *means]))
    for index, flags in enumerate(STUDIES[name].changes):
        cells = [
            f"{effects.changes[index]:+.{digits[part]}f} ± {effects.error:.{digits[part]}f}"
            for part, effects in told.items()
        ]
        lines.append(common.markdown_row([f"`{flags}`", *cells]))
    return lines


def second_report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table of a task's second stage: the line and the candidates, and how their evaluations
    differ from the line's, with a 95 % interval."""
    study = STUDIES[name]
    settings: dict[str, list[Row]] = {setting: [] for setting in ("", *study.candidates)}
    for row in rows:
        if row["study"] == name and int(row["seed"]) in study.second_seeds:
            settings[row["setting"]].append(row)
    if not study.candidates or not all(settings.values()):
        return []
    threshold = THRESHOLDS.get(study.tasks[0])
    line = np.array([float(row["return_mean"]) for row in settings[""]])
    lines = common.markdown_head(
        "second stage | seeds | mean | worst | ends below the threshold | steps, median "
        "| share lost, mean | mean minus the line's"
    )
    for setting, found in settings.items():
        final = np.array([float(row["return_mean"]) for row in found])
        steps = np.array([float(row["steps_to_threshold"] or "nan") for row in found])
        lost = [float(row["share_lost"]) for row in found if row["share_lost"]]
        changes = " ".join(study.changes[LETTERS.index(letter)] for letter in setting)
        cells = [
            f"`{changes}`" if changes else "the line",
            len(found),
            f"{final.mean():.1f}",
            f"{final.min():.1f}",
            "-" if threshold is None else sum(final < threshold),
            "-" if threshold is None else f"{np.median(steps):,.0f}",
            f"{np.mean(lost):.3f}" if lost else "-",
            common.welch(final, line).told(1) if setting else "-",
        ]
        lines.append(common.markdown_row(cells))
    return lines


def main() -> None:
    """Parse, run what is missing, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    parser.add_argument("--second", action="store_true", help="the second stage")
    parser.add_argument("--tasks", nargs="*", default=[], help="of all if none is named")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.report:
        rows = TABLE.rows()
        print(*report(args.study, rows), "", *second_report(args.study, rows), sep="\n")
        return
    runs = missing(args.study, args.tasks, args.second)
    for _, row in common.run_all(run_one, runs, args.processes):
        row = {"study": args.study} | row
        TABLE.append(row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
