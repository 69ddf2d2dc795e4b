"""Screen changes to the flags of MuJoCo's preset: eight at once, in sixteen settings of a design.

    python benchmarks/screen.py                      # every run without a row
    python benchmarks/screen.py --tasks Ant-v5       # of this robot alone
    python benchmarks/screen.py --report             # the effect of each change, from the rows

Rows are in results/screening.csv. Runs that have a row are skipped.

Each setting makes half of the eight changes, or none, or all. So all runs tell of every change:
its effect is the mean score of the runs with it minus that of the runs without. With one change at
a time it would be the difference of two settings. The design is the 2^(8-4) of resolution IV of
Box, Hunter and Hunter, "Statistics for Experimenters", 1978: no effect of one change is mixed with
that of another, nor with what two of them do together. Pairs are mixed with pairs.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

import common
import numpy as np
from common import CATEGORICAL, RESULTS, Cell, Row, Run, Table
from tune import BEST

COLUMNS = ("task", "setting", "seed", "return_mean", "return_std", "seconds", "commit")
TABLE = Table(RESULTS / "screening.csv", COLUMNS, end="\n")
FIRST_SEED = 2000  # of the first setting; each setting has a seed of its own

# The preset as it was ahead of the screening; the critics' rate is told, so that it stays the same
# where that of the actor changes.
LINE = (
    "--compile --total-timesteps 1000000 --num-steps 256 --log-std-init -0.5 "
    "--learning-rate 0.0003 --critic-learning-rate 0.0003 --num-minibatches 32 --update-epochs 10 "
    "--norm-adv-memory 0 --target-kl 0.02 --norm-returns-memory 10"
)
CHANGES = {
    "A": "--num-envs 64 --num-steps 32",
    "B": "--num-minibatches 16",
    "C": "--learning-rate 0.0006",
    "D": "--critic-learning-rate 0.001",
    "E": "--log-std-init -1",
    "F": "--activation tanh",
    "G": "--gae-lambda 0.9",
    "H": "--twin-reduce mean",
}


# ----------------------------------------------------------------------------------------- design
def design() -> list[str]:
    """The letters of each setting's changes. Four are free, and the others follow from them:
    E = BCD, F = ACD, G = ABC and H = ABD, where made is +1 and left out is -1."""
    settings = []
    for a, b, c, d in itertools.product((-1, 1), repeat=4):
        levels = (a, b, c, d, b * c * d, a * c * d, a * b * c, a * b * d)
        made = [letter for letter, level in zip(CHANGES, levels, strict=True) if level > 0]
        settings.append("".join(made))
    return settings


def flags_of(setting: str) -> str:
    """The line with a setting's changes behind it, where they count."""
    return " ".join([LINE, *(CHANGES[letter] for letter in setting)])


def all_runs() -> list[Run]:
    """Every run of the design, setting by setting."""
    runs = []
    for index, setting in enumerate(design()):
        for task in BEST:
            cell = Cell(task, CATEGORICAL, setting, flags_of(setting), [FIRST_SEED + index])
            runs += common.runs_of([cell])
    return runs


def missing(tasks: list[str]) -> list[Run]:
    """Runs of these tasks that have no row."""
    known = {(row["task"], row["setting"], row["seed"]) for row in TABLE.rows()}
    return [
        run
        for run in all_runs()
        if run.cell.task in tasks and (run.cell.task, run.cell.variant, str(run.seed)) not in known
    ]


def run_one(run: Run) -> dict[str, object]:
    """Train one seed of one setting: its row."""
    cell = run.cell
    commit = common.origin()["commit"]
    with common.trained(common.load_script(cell.script), cell.task, run.seed, cell.flags) as done:
        return {
            "task": cell.task,
            "setting": cell.variant,
            "seed": run.seed,
            "return_mean": round(done.metrics["eval/return_mean"], 2),
            "return_std": round(done.metrics["eval/return_std"], 2),
            "seconds": done.seconds,
            "commit": commit,
        }


# ----------------------------------------------------------------------------------------- report
class Effects(NamedTuple):
    """What the changes do to the score on one robot."""

    mean: float  # of all runs
    changes: np.ndarray  # (8,): the score with a change minus the score without it
    error: float  # the standard error of each of them


def effects_of(settings: list[str], scores: np.ndarray) -> Effects:
    """Fit the mean and the eight effects by least squares.

    The error is that of what is left over, which holds the noise of the runs and what pairs of
    changes do together. It needs more runs than the nine numbers that are fitted.
    """
    made = np.array([[letter in setting for letter in CHANGES] for setting in settings])
    columns = np.column_stack([np.ones(len(settings)), made - 0.5])
    fitted, _, rank, _ = np.linalg.lstsq(columns, scores, rcond=None)
    if rank < columns.shape[1] or len(scores) == rank:
        raise ValueError(f"{len(scores)} runs do not tell the effects of {len(CHANGES)} changes")
    left = scores - columns @ fitted
    variance = left @ left / (len(scores) - rank)
    variances = variance * np.linalg.inv(columns.T @ columns).diagonal()
    return Effects(float(fitted[0]), fitted[1:], float(np.sqrt(variances[1:].max())))


def report(rows: list[Row]) -> list[str]:
    """The effect of each change on the score, robot by robot and over all of them.

    The score of a run is its evaluation over the best published one.
    """
    told = {}
    for task, best in BEST.items():
        of_task = [row for row in rows if row["task"] == task]
        if len(of_task) > len(CHANGES) + 1:
            scores = np.array([float(row["return_mean"]) for row in of_task]) / best
            told[task] = effects_of([row["setting"] for row in of_task], scores)
    if not told:
        return ["screening: too few rows."]

    changes = np.mean([effects.changes for effects in told.values()], axis=0)
    error = np.sqrt(sum(effects.error**2 for effects in told.values())) / len(told)
    names = [task.removesuffix("-v5") for task in told]
    lines = common.markdown_head(" | ".join(["change", *names, "score"]))
    for index, flags in enumerate(CHANGES.values()):
        cells = [f"{e.changes[index]:+.2f} ± {e.error:.2f}" for e in told.values()]
        mean = f"{changes[index]:+.3f} ± {error:.3f}"
        lines.append(common.markdown_row([f"`{flags}`", *cells, mean]))
    return lines


def main() -> None:
    """Parse, run what is missing, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    parser.add_argument("--tasks", nargs="*", choices=[*BEST], default=[*BEST])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.report:
        print(*report(TABLE.rows()), sep="\n")
        return
    TABLE.record(run_one, missing(args.tasks), args.processes)


if __name__ == "__main__":
    main()
