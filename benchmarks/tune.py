"""Try flags on tuning seeds; every run is a row of results/tuning.csv. Reported seeds are others.

    python benchmarks/tune.py distributional_ppo_lstm PendulumNoVel-v1 --gamma 0.9
    python benchmarks/tune.py distributional_ppo_lstm CartPoleNoVel-v1 --seeds 1000 1001 --kappa 1
    python benchmarks/tune.py --report CartPoleNoVel-v1     # what the rows say, a line per setting
    python benchmarks/tune.py --report CartPoleNoVel-v1 --seeds 1000 1001     # of these seeds alone

Whatever this program does not know goes to the script. Runs that have a row are skipped, but not
where that row is of the scripts that trained actor and critics together. The report has a line of
its own for these.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import numpy as np
from common import RESULTS, Cell, Row, Run, Table
from learning import THRESHOLDS, first_step

COLUMNS = (
    "script",
    "task",
    "flags",
    "seed",
    "return_mean",
    "return_std",
    "steps_to_threshold",  # of the training returns; empty without a threshold
    "share_lost",  # of the steps after that, in episodes below it; empty as well
    "commit",
)
TABLE = Table(RESULTS / "tuning.csv", COLUMNS, "\n", ("script", "task", "flags", "seed", "commit"))


def run_one(run: Run) -> dict[str, object]:
    """Train one seed: its row."""
    cell = run.cell
    commit = common.origin()["commit"]
    script = common.load_script(cell.script)
    with common.trained(script, cell.task, run.seed, cell.flags) as done:
        tags = ("charts/episodic_return", "charts/episodic_length")
        curves = common.scalars(done.directory, tags)

    episodes = np.array(curves["charts/episodic_return"])
    lengths = np.array(curves["charts/episodic_length"])[:, 1]
    threshold = THRESHOLDS.get(cell.task)
    steps, lost = "", ""
    if threshold is not None:
        steps = first_step(episodes, threshold)
        lost = share_lost(episodes, lengths, steps, threshold)
    return {
        "script": cell.script,
        "task": cell.task,
        "flags": cell.flags,
        "seed": run.seed,
        "return_mean": round(done.metrics["eval/return_mean"], 4),
        "return_std": round(done.metrics["eval/return_std"], 4),
        "steps_to_threshold": steps,
        "share_lost": lost,
        "commit": commit,
    }


def share_lost(episodes: np.ndarray, lengths: np.ndarray, first: float, threshold: float) -> float:
    """Share of the steps after `first` in episodes, (step, return), that end below the threshold;
    1 where none comes after it."""
    steps, returns = episodes.T
    later = lengths[steps > first]
    lost = later[returns[steps > first] < threshold]
    return round(float(lost.sum() / later.sum()), 4) if len(later) else 1.0


def joint(row: Row) -> bool:
    """Whether one loss trained actor and critics together."""
    return row["commit"] in common.OLDER | {common.JOINT}


def run_missing(cell: Cell, processes: int) -> None:
    """Every seed of the setting without a row of today's kind of update."""
    wanted = (cell.script, cell.task, common.flag_values(cell.flags), False)
    known = {
        row["seed"]
        for row in TABLE.rows()
        if (row["script"], row["task"], common.flag_values(row["flags"]), joint(row)) == wanted
    }
    runs = [run for run in common.runs_of([cell]) if str(run.seed) not in known]
    TABLE.record(run_one, runs, processes)


def steps_needed(steps: np.ndarray) -> str:
    """Median of the steps to the threshold, and how many runs reach it."""
    if not len(steps):
        return "-"
    reached = np.isfinite(steps).sum()
    median = f"{np.median(steps):.0f}" if 2 * reached > len(steps) else "never"
    return f"{median} ({reached} of {len(steps)})"


def line(script: str, flags: str, rows: list[Row], threshold: float | None) -> str:
    """What the rows of one setting say."""
    final = np.array([float(row["return_mean"]) for row in rows])
    steps = np.array([float(row["steps_to_threshold"] or "nan") for row in rows])
    lost = [float(row["share_lost"]) for row in rows if row["share_lost"]]
    return common.markdown_row(
        [
            script,
            flags or "none",
            len(rows),
            f"{final.mean():.1f}",
            f"{final.min():.1f}",
            "-" if threshold is None else sum(final >= threshold),
            steps_needed(steps[~np.isnan(steps)]),
            f"{np.mean(lost):.3f}" if lost else "-",
            " ".join(sorted({row["commit"] for row in rows})),
        ]
    )


def report(task: str, seeds: Sequence[int] = ()) -> list[str]:
    """The flags that all settings share, and a table: seeds, final evaluations, those at the
    threshold, the median steps to it and the mean share of later steps in episodes below it, for
    every setting; of these seeds, if any, alone."""
    settings: dict[tuple[str, frozenset[str], bool], list[Row]] = {}
    for row in TABLE.rows():
        if row["task"] == task and (not seeds or int(row["seed"]) in seeds):
            key = (row["script"], common.flag_parts(row["flags"]), joint(row))
            settings.setdefault(key, []).append(row)

    if not settings:
        return [f"{task}: no rows."]
    shared = frozenset.intersection(*(flags for _, flags, _ in settings))
    threshold = THRESHOLDS.get(task)
    lines = common.markdown_head(
        "script | flags | seeds | mean | worst | reached | steps | lost | commit"
    )
    lines += sorted(
        line(script, " ".join(sorted(flags - shared)), rows, threshold)
        for (script, flags, _), rows in settings.items()
    )
    return [f"{task}, all with {' '.join(sorted(shared)) or 'nothing'}:", "", *lines]


def main() -> None:
    """Parse, run what is missing, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("script", nargs="?", default="")
    parser.add_argument("task", help="gymnasium id")
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    parser.add_argument("--seeds", nargs="*", type=int, help="1000 to 1007; of the report: all")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args, flags = parser.parse_known_args()
    if args.report:
        print(*report(args.task, args.seeds or ()), sep="\n")
        return
    if args.script not in common.OWN_SCRIPTS:
        parser.error(f"name one of {', '.join(common.OWN_SCRIPTS)} ahead of the task")
    line = common.spelt_out(args.script, " ".join(flags))  # a preset may change later
    cell = Cell(args.task, args.script, "tuning", line, args.seeds or range(1000, 1008))
    run_missing(cell, args.processes)


if __name__ == "__main__":
    main()
