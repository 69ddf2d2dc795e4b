"""Screen changes of flags: eight at once, in sixteen settings of a factorial design.

    python benchmarks/screen.py cartpole_novel --report     # the effect of each change
    python benchmarks/screen.py robots                      # every run without a row
    python benchmarks/screen.py robots --tasks Ant-v5       # of this task alone
    python benchmarks/screen.py robots --second             # the candidates, beside the line
    python benchmarks/screen.py robots --parts              # pairs of the candidate's changes

Rows are in results/screening.csv. Runs that have a row are skipped.

Each setting makes half of the eight changes, or none, or all. So all runs tell of every change: its
effect is the mean of the half with it minus that of the half without. One change at a time would
compare two settings. The design is the 2^(8-4) of resolution IV of
Box, Hunter and Hunter, "Statistics for Experimenters", 1978: no effect of one change is mixed with
that of another, nor with what two of them do together. Pairs are mixed with pairs.

`robots_again` and `robots_fourth` have five changes in eight settings, a smaller design (see
`design`). Their setting without a change is a candidate of `robots`, the preset of today. Those
rows are of earlier commits, which compute the same but for rounding. Three flags of `robots_again`
are those of the commit "Trial flags for the critics", whose scripts have to run it.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import common
import numpy as np
import tune
from common import CATEGORICAL, LSTM, RESULTS, Cell, Row, Run, Table
from learning import PUBLISHED, THRESHOLDS

COLUMNS = (
    "study",
    "task",
    "setting",  # the letters of its changes
    "flags",
    "seed",
    "return_mean",
    "steps_to_threshold",  # of the training returns; empty without a threshold
    "share_lost",  # of the steps after that, in episodes below it; empty as well
    "commit",
)
TABLE = Table(
    RESULTS / "screening.csv", COLUMNS, "\n", ("study", "task", "setting", "flags", "seed")
)
# The highest final evaluations after 1M steps of one line of flags for all robots. Left out are
# the zoo (tuned task by task), CleanRL (training returns) and Tianshou (the best during a run).
BEST = {
    task: max(
        float(row["value"])
        for row in PUBLISHED.rows()
        if row["task"] == task and row["source"] in ("XuanCe", "sb3-contrib")
    )
    for task in ("Hopper-v5", "Walker2d-v5", "Ant-v5", "HalfCheetah-v5")
}
LETTERS = "ABCDEFGH"


NO_ROWS = ("", "")


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
    stopped: Sequence[str] = ()  # candidates that run no further
    parts: str = ""  # four changes of a candidate that are told apart
    part_tasks: Sequence[str] = ()
    part_seeds: range = range(0)
    line_rows: tuple[str, str] = NO_ROWS  # study and setting that have run the line already
    rival_rows: tuple[str, str] = NO_ROWS  # and those that candidates meet in the second stage

    def flags(self, setting: str) -> str:
        """The line with a setting's changes."""
        return f"{self.line} {self.own_flags(setting)}".strip()

    def own_flags(self, setting: str) -> str:
        """The changes that a setting makes."""
        return " ".join(self.changes[LETTERS.index(letter)] for letter in setting)

    def settings(self) -> list[str]:
        """The letters of every setting of its design."""
        return design(len(self.changes))

    def told(self, setting: str) -> str:
        """A setting's name in a table."""
        return f"`{self.own_flags(setting)}`" if setting else "the line"


ROBOTS = (  # the preset mujoco, until `BDFG` replaced it
    "--compile --total-timesteps 1000000 --num-steps 256 --log-std-init -0.5 "
    # The critics' rate is told, so that it stays where that of the actor changes.
    "--learning-rate 0.0003 --critic-learning-rate 0.0003 --num-minibatches 32 "
    "--update-epochs 10 --norm-adv-memory 0 --target-kl 0.02 --norm-returns-memory 10"
)
STUDIES = {
    "robots": Study(
        CATEGORICAL,
        tuple(BEST),
        ROBOTS,
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
        candidates=("BDFG", "BFG"),  # the first one is the preset now
        stopped=("BFG",),
        parts="BDFG",
        part_tasks=("Ant-v5", "HalfCheetah-v5"),
        part_seeds=range(2200, 2201),
    ),
    # Behind a candidate for robots that nearly won, changes of the critics above all.
    "robots_again": Study(
        CATEGORICAL,
        tuple(BEST),
        f"{ROBOTS} --num-minibatches 16 --critic-learning-rate 0.001 --activation tanh "
        "--gae-lambda 0.9",
        (
            "--recompute-advantages",
            "--critic-hidden-size 256",
            "--critics-go-on",
            "--log-std-init -1",
            "--twin-reduce mean",
        ),
        first_seed=2300,
        seeds=1,
        second_seeds=range(2400, 2404),
        candidates=("E",),
        stopped=("E",),
        line_rows=("robots", "BDFG"),
        rival_rows=("robots", ""),
    ),
    # Behind the preset of today, changes of what decides falls: horizon, steps, batch, V. Rows of
    # `robots_third` had --log-std-init 0 in place of B, which spoilt the first three runs.
    "robots_fourth": Study(
        CATEGORICAL,
        tuple(BEST),
        f"{ROBOTS} --num-minibatches 16 --critic-learning-rate 0.001 --activation tanh "
        "--gae-lambda 0.9",
        (
            "--gamma 0.995",
            "--target-kl 0.01",
            "--num-envs 16 --num-minibatches 32",
            "--value-from distribution",
            "--num-critics 1",
        ),
        first_seed=2500,
        seeds=1,
        second_seeds=range(2600, 2606),
        line_rows=("robots", "BDFG"),
        rival_rows=("robots", "BDFG"),
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
        stopped=("ACDH",),
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
def design(changes: int = 8) -> list[str]:
    """The letters of each setting's changes, where made is +1 and left out is -1.

    Of eight changes four are free, and the others follow from them: E = BCD, F = ACD, G = ABC and
    H = ABD. Of five changes three are free: D = -AB and E = -AC, the 2^(5-2) of resolution III,
    where one change may be mixed with what two others do together.
    """
    free = itertools.product((-1, 1), repeat=3 if changes == 5 else 4)
    if changes == 5:
        rows = [(a, b, c, -a * b, -a * c) for a, b, c in free]
    else:
        rows = [(a, b, c, d, b * c * d, a * c * d, a * b * c, a * b * d) for a, b, c, d in free]
    return [
        "".join(letter for letter, level in zip(LETTERS, levels, strict=False) if level > 0)
        for levels in rows
    ]


def all_runs(study: Study) -> list[Run]:
    """Every run of the design, in an order that has nothing to do with the changes: what happens to
    the machine on the way is no effect of theirs."""
    runs = []
    for index, setting in enumerate(study.settings()):
        if setting == "" and study.line_rows != NO_ROWS:
            continue
        first = study.first_seed + index * study.seeds
        for task in study.tasks:
            seeds = range(first, first + study.seeds)
            runs += common.runs_of([Cell(task, study.script, setting, study.flags(setting), seeds)])
    random.Random(1).shuffle(runs)
    return runs


def second_runs(study: Study) -> list[Run]:
    """Every run of the second stage: the candidates beside the line, seed by seed. The line does
    not run where no candidate is left, nor where another study has run it."""
    settings = [setting for setting in study.candidates if setting not in study.stopped]
    if settings and study.rival_rows == NO_ROWS:
        settings.insert(0, "")
    cells = [
        Cell(task, study.script, setting, study.flags(setting), study.second_seeds)
        for setting in settings
        for task in study.tasks
    ]
    return sorted(common.runs_of(cells), key=lambda run: run.seed)


def pairs_of(candidate: str) -> list[str]:
    """Settings with two of a candidate's four changes.

    With the line and the candidate itself they are half of a factorial design, of resolution IV.
    """
    return ["".join(pair) for pair in itertools.combinations(candidate, 2)]


def part_runs(study: Study) -> list[Run]:
    """Every run that tells four changes apart."""
    cells = [
        Cell(task, study.script, setting, study.flags(setting), study.part_seeds)
        for setting in pairs_of(study.parts)
        for task in study.part_tasks
    ]
    return common.runs_of(cells)


STAGES = {"first": all_runs, "second": second_runs, "parts": part_runs}


def missing(name: str, tasks: Sequence[str] = (), stage: str = "first") -> list[Run]:
    """Runs of a stage of a study that have no row, of these tasks or of all."""
    known = {
        (row["task"], row["flags"], row["seed"]) for row in TABLE.rows() if row["study"] == name
    }
    every = STAGES[stage](STUDIES[name])
    runs = [run for run in every if not tasks or run.cell.task in tasks]
    return [run for run in runs if (run.cell.task, run.cell.flags, str(run.seed)) not in known]


def rows_told() -> list[Row]:
    """Rows with the flags that their study has now. Others are of a study that was changed."""
    return [
        row
        for row in TABLE.rows()
        if row["study"] in STUDIES and row["flags"] == STUDIES[row["study"]].flags(row["setting"])
    ]


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
    """Fit the mean and the eight effects by least squares to runs of all settings.

    The error is that of what is left over, which holds the noise of the runs and what pairs of
    changes do together.
    """
    made = np.array([[letter in setting for letter in LETTERS] for setting in settings])
    columns = np.column_stack([np.ones(len(settings)), made - 0.5])
    fitted = np.linalg.lstsq(columns, values, rcond=None)[0]
    left = values - columns @ fitted
    variance = left @ left / (len(values) - len(fitted))
    variances = variance * np.linalg.inv(columns.T @ columns).diagonal()
    return Effects(float(fitted[0]), fitted[1:], float(np.sqrt(variances[1:].max())))


def measures(row: Row) -> dict[str, float]:
    """What a row is judged by, by name.

    For a robot it is the score, its evaluation over the best published one. For other tasks it is
    the evaluation and, where the task has a threshold, thousands of steps to it (a run of 100,000
    that never reaches it counts as many) and the share of later steps below it.
    """
    evaluation = float(row["return_mean"])
    if row["task"] in BEST:
        return {row["task"]: evaluation / BEST[row["task"]]}
    told = {"evaluation": evaluation}
    if row["share_lost"]:
        told["thousand steps"] = min(float(row["steps_to_threshold"]), 1e5) / 1e3
        told["share lost"] = float(row["share_lost"])
    return told


def effects_by_measure(rows: Sequence[Row]) -> dict[str, Effects]:
    """The effects on each measure that has rows of all settings, and, if that goes for all robots,
    on their mean score. Pairs of changes may do the same to all robots, so its error is that of the
    settings' mean scores, and not what independent errors would give."""
    found: dict[str, dict[str, list[float]]] = {}  # by measure and setting
    for row in rows:
        for name, value in measures(row).items():
            found.setdefault(name, {}).setdefault(row["setting"], []).append(value)
    whole = {name: values for name, values in found.items() if values.keys() == set(design())}
    if whole.keys() >= BEST.keys():
        whole["score"] = {
            setting: [float(np.mean([np.mean(whole[task][setting]) for task in BEST]))]
            for setting in design()
        }
    told = {}
    for name, values in whole.items():
        settings = [setting for setting, own in values.items() for _ in own]
        told[name] = effects_of(settings, np.concatenate([*values.values()]))
    return told


def report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table: the mean of all runs, and the effect of each change with its standard error."""
    if STUDIES[name].line_rows != NO_ROWS:
        return []  # see again_report
    later = {*STUDIES[name].second_seeds, *STUDIES[name].part_seeds}
    own = [row for row in rows if row["study"] == name and int(row["seed"]) not in later]
    told = effects_by_measure(own)
    if not told:
        return [f"{name}: not all settings have a row."]
    digits = {part: 1 if abs(effects.mean) > 10 else 3 for part, effects in told.items()}
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


def rows_elsewhere(where: tuple[str, str], rows: Sequence[Row]) -> list[Row]:
    """Rows of a second stage, `where` (a study and a setting), as rows without a change."""
    study, _ = where
    return [
        row | {"setting": ""}
        for row in rows
        if (row["study"], row["setting"]) == where != NO_ROWS
        if int(row["seed"]) in STUDIES[study].second_seeds
    ]


# ---------------------------------------------------------------------------------- second stage
class Score(NamedTuple):
    """What a setting scores on several robots."""

    mean: float
    error: float  # the standard error of the mean
    low: float  # share of runs that score less than a half


def score_of(scores: dict[str, np.ndarray]) -> Score:
    """The mean over robots of the mean over runs. A robot's mean has the standard error of its
    runs, two at least, and the mean over robots the error that follows from theirs."""
    squares = [own.var(ddof=1) / len(own) for own in scores.values()]
    return Score(
        mean=float(np.mean([own.mean() for own in scores.values()])),
        error=float(np.sqrt(sum(squares)) / len(scores)),
        low=float((np.concatenate([*scores.values()]) < 0.5).mean()),
    )


def robots_table(settings: dict[str, list[Row]], study: Study) -> list[str]:
    """The second stage of robots that have two runs and more of the line and of the first
    candidate. A later candidate is told once it has as many of all these robots."""
    known = {
        setting: {task for task in BEST if len(of_task(rows, task)) > 1}
        for setting, rows in settings.items()
    }
    shared = known[""] & known.get(study.candidates[0], set())
    tasks = [task for task in BEST if task in shared]
    settings = {setting: rows for setting, rows in settings.items() if known[setting] >= shared}
    if not tasks:
        return []
    scores = {
        setting: score_of({task: np.array(of_task(rows, task)) / BEST[task] for task in tasks})
        for setting, rows in settings.items()
    }
    head = ["second stage", "runs", *tasks, "score ± standard error", "below half"]
    head.append("score minus the line's ± standard error")
    lines = common.markdown_head(" | ".join(head))
    for setting, rows in settings.items():
        score, line = scores[setting], scores[""]
        difference = f"{score.mean - line.mean:+.3f} ± {np.hypot(score.error, line.error):.3f}"
        cells = [
            sum(len(of_task(rows, task)) for task in tasks),
            *[f"{np.mean(of_task(rows, task)):.0f}" for task in tasks],
            f"{score.mean:.3f} ± {score.error:.3f}",
            f"{score.low:.0%}",
            difference if setting else "-",
        ]
        lines.append(common.markdown_row([study.told(setting), *cells]))
    return lines


def of_task(rows: Sequence[Row], task: str) -> list[float]:
    """The evaluations on a task."""
    return [float(row["return_mean"]) for row in rows if row["task"] == task]


def task_table(settings: dict[str, list[Row]], study: Study) -> list[str]:
    """The second stage of one task."""
    threshold = THRESHOLDS.get(study.tasks[0])
    line = np.array([float(row["return_mean"]) for row in settings[""]])
    lines = common.markdown_head(
        "second stage | seeds | mean | worst | ends below the threshold | steps, median "
        "| share lost, mean | mean minus the line's (95 % interval)"
    )
    for setting, rows in settings.items():
        final = np.array([float(row["return_mean"]) for row in rows])
        steps = np.array([float(row["steps_to_threshold"] or "nan") for row in rows])
        lost = [float(row["share_lost"]) for row in rows if row["share_lost"]]
        cells = [
            len(rows),
            f"{final.mean():.1f}",
            f"{final.min():.1f}",
            "-" if threshold is None else sum(final < threshold),
            "-" if threshold is None else f"{np.median(steps):,.0f}",
            f"{np.mean(lost):.3f}" if lost else "-",
            common.welch(final, line).told(1) if setting else "-",
        ]
        lines.append(common.markdown_row([study.told(setting), *cells]))
    return lines


def second_report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table of the second stage: the line, the candidates, and how these differ from the line.
    It is empty until the line and a candidate have a row."""
    study = STUDIES[name]
    settings: dict[str, list[Row]] = {setting: [] for setting in ("", *study.candidates)}
    settings[""] += rows_elsewhere(study.rival_rows, rows)
    for row in rows:
        second = row["study"] == name and int(row["seed"]) in study.second_seeds
        if second and row["setting"] in settings:
            settings[row["setting"]].append(row)
    settings = {setting: found for setting, found in settings.items() if found}
    if "" not in settings or len(settings) < 2:
        return []
    if set(study.tasks) == BEST.keys():
        return robots_table(settings, study)
    return task_table(settings, study)


# ------------------------------------------------------------------- effects with a known noise
def effects_on_score(groups: dict[str, np.ndarray], letters: str) -> tuple[np.ndarray, float]:
    """The effect of each change on a robot's score, and the standard error of each.

    groups are the scores of every setting of a design, which makes each change in half of them. An
    effect is the mean of the settings with the change minus that of those without it, whatever
    their numbers of runs are. The variance of a run is pooled over settings with two runs and more.
    """
    means = {setting: own.mean() for setting, own in groups.items()}
    half = len(means) / 2
    effects = [
        sum(mean if letter in setting else -mean for setting, mean in means.items()) / half
        for letter in letters
    ]
    squares = sum(((own - own.mean()) ** 2).sum() for own in groups.values())
    freedom = sum(len(own) - 1 for own in groups.values())
    shares = sum(1 / len(own) for own in groups.values())
    return np.array(effects), float(np.sqrt(squares / freedom * shares) / half)


def effects_table(
    study: Study, letters: str, settings: Sequence[str], tasks: Sequence[str], rows: Sequence[Row]
) -> list[str]:
    """A table: the effect of each change on each robot's score. Empty until all settings ran."""
    found, errors = [], []
    for task in tasks:
        groups: dict[str, list[float]] = {}
        for row in rows:
            if row["task"] == task:
                groups.setdefault(row["setting"], []).append(float(row["return_mean"]) / BEST[task])
        if not groups.keys() >= {*settings}:
            return []
        own = {setting: np.array(groups[setting]) for setting in settings}
        effects, error = effects_on_score(own, letters)
        found.append(effects)
        errors.append(error)
    found.append(np.mean(found, axis=0))
    errors.append(float(np.linalg.norm(errors)) / len(errors))
    lines = common.markdown_head(" | ".join(["effect on the score", *tasks, "mean"]))
    for at, letter in enumerate(letters):
        cells = [f"{own[at]:+.3f} ± {error:.3f}" for own, error in zip(found, errors, strict=True)]
        lines.append(common.markdown_row([study.told(letter), *cells]))
    return lines


def part_report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table: the effect of each of a candidate's four changes. Empty until all have run."""
    study = STUDIES[name]
    if not study.parts:
        return []
    seeds = {*study.second_seeds, *study.part_seeds}
    own = [row for row in rows if row["study"] == name and int(row["seed"]) in seeds]
    settings = ["", *pairs_of(study.parts), study.parts]
    return effects_table(study, study.parts, settings, study.part_tasks, own)


def again_report(name: str, rows: Sequence[Row]) -> list[str]:
    """A table: the effect of each change, where another study's candidate is the line."""
    study = STUDIES[name]
    if study.line_rows == NO_ROWS:
        return []
    own = [
        row for row in rows if row["study"] == name and int(row["seed"]) not in study.second_seeds
    ]
    own += rows_elsewhere(study.line_rows, rows)
    letters = LETTERS[: len(study.changes)]
    return effects_table(study, letters, study.settings(), study.tasks, own)


def main() -> None:
    """Parse, run what is missing, append."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--report", action="store_true", help="only print what the rows say")
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument("--second", action="store_true", help="the second stage")
    stages.add_argument("--parts", action="store_true", help="pairs of a candidate's changes")
    parser.add_argument("--tasks", nargs="*", default=[], help="of all if none is named")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    if args.report:
        rows = rows_told()
        for table in (report, second_report, part_report, again_report):
            print(*table(args.study, rows), "", sep="\n")
        return
    study = STUDIES[args.study]
    if args.second and not study.candidates:
        parser.error(f"--second: {args.study} has no candidates yet, see STUDIES")
    if args.parts and not study.parts:
        parser.error(f"--parts: {args.study} has none, see STUDIES")
    tasks = study.part_tasks if args.parts else study.tasks
    if unknown := set(args.tasks) - set(tasks):
        parser.error(f"--tasks {' '.join(unknown)}: {args.study} has {' '.join(tasks)}")
    stage = "second" if args.second else "parts" if args.parts else "first"
    runs = missing(args.study, args.tasks, stage)
    for run in runs:
        common.load_script(run.cell.script).parse_args(run.cell.flags.split())  # or say what is bad
    for _, row in common.run_all(run_one, runs, args.processes):
        row = {"study": args.study} | row
        TABLE.append(row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
