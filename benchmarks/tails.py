"""What aversion to risk buys on robots that now and then pay for risky states, and LunarLander.

    python benchmarks/tails.py --pilot     # the tuning seed: is there a tail?
    python benchmarks/tails.py             # reported seeds: run what is missing, report
    python benchmarks/tails.py --report    # tables and figure from the committed CSV alone
    python benchmarks/tails.py --only averse --seeds 8001

The Risky tasks are those of Urpi, Curi & Krause 2021 (arXiv:2102.05371), in benchmarks/envs.py.
What their O-RAAC reaches there is no mark for these runs, since it learns offline, from the data of
other policies. The Rare ones are the same with a fifth of the probability. LimitHalfCheetah is
ours: it pays 175, with a probability of 0.004 a step, where it runs faster than 5. A task is learnt
with an aversion to risk (the preset `averse`), neutrally (the same preset with a weight of 0 for
the tail, so that nothing else differs), and neutrally with a penalty of 3 that every risky step
costs besides, for certain. On LimitHalfCheetah a fourth way is a neutral policy in a task that pays
up to a total and no more (`UpTo` in envs.py): for the right total its best policy has the best CVaR
of the return of a whole episode.

The mode of the final policy then plays EPISODES episodes without hits, and hits are drawn DRAWS
times for each: they change rewards alone, so that luck with hits plays no part. A policy of the
fourth kind sees what it has earned, so that it has to meet its hits; it plays MANY episodes. One
row of results/tails.csv is one run.

What was decided ahead of what:

    first      Ahead of all runs: one neutral run of each public task. Unless more than 2 % of its
               steps are risky, the policy avoids risk by itself, and there is no tail to buy.
               There were 1.8 %, 0.0 % and 1.8 %. The rule was a poor one: the CVaR_0.1 of
               RiskyHalfCheetah is 16 % below its mean all the same. Nothing else ran there.
    then       One neutral run of each Rare task. RareHalfCheetah and RareWalker2d pass the rule.
               They were left for other reasons: slowing down to 4 costs more of the mean than
               PRICE, and the walker falls after 152 of 500 steps.
    pilot      LimitHalfCheetah was made so that there is a trade-off. It is reported if, on the
               tuning seed, hits lower the neutral policy's CVaR_0.1 by at least TAIL of its mean.
               Aversion with a weight of 1, the preset's until then, was too timid there: it lost
               23 % of the mean, and its tail was worse as well. So two smaller weights were tried,
               and a smaller lambda, since samples of a tail vary much. CHOSEN is, of those whose
               mean is within PRICE of the neutral policy's, the one with the best tail, or else the
               best of all. All five have a worse tail than the neutral policy, and a slower gait.
    today      With the presets of today, on tuning seed 1001: a weight of 1 and of 0.5, the
               penalty, and totals of 700 and 800 with a discount of 1, which makes the task that of
               the theory. `clock` has no limit: it tells what observing total and time, and this
               discount, do by themselves, so it is reported as well. Of both totals the one with
               the better CVaR_0.1 is reported (STATIC), whatever it has beside the neutral policy.
    public     The three Risky tasks on reported seeds, with the weight and the penalty of
               LimitHalfCheetah. Nothing is chosen there, and no rule keeps a task out: what comes
               is told.
    goal       CVaR_0.1 better than the neutral policy's by more than its 95 % interval, for at most
               PRICE of the neutral policy's mean.

Rows of seed 1000 are of older presets. Those of the first two steps had their hits drawn in the
episodes, once, and tell no flags. LunarLander-v3 has no hits: a lander that crashes is its tail. It
ran with the task's own preset. Reported seeds were to follow if an aversion had a better CVaR_0.1
there, and none had.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from dataclasses import replace
from typing import Any

import common
import numpy as np
from common import CATEGORICAL, RESULTS, Cell, Row, Run, Table, half_width, welch

EPISODES = 200
MANY = 1000
DRAWS = 1000
TAIL = 0.05
PRICE = 0.15
TASK = "LimitHalfCheetah"
PUBLIC = ("RiskyHalfCheetah", "RiskyHopper", "RiskyWalker2d")
MUJOCO = (  # the preset as it was when the rows were made, ahead of `--mean-output value`
    "--total-timesteps 1000000 --num-steps 256 --log-std-init -0.5 --activation tanh "
    "--learning-rate 0.0003 --critic-learning-rate 0.001 --gae-lambda 0.9 --num-minibatches 16 "
    "--update-epochs 10 --norm-adv-memory 0 --target-kl 0.02 --norm-returns-memory 10"
)
AVERSE = f"{MUJOCO} --preset averse --norm-adv-memory 100 --compile"
VARIANTS = {
    "neutral": f"{AVERSE} --cvar-weight 0",
    "penalty": f"{AVERSE} --cvar-weight 0",
    "averse": f"{AVERSE} --cvar-weight 1",
    "averse 0.5": AVERSE,
    "clock": f"{AVERSE} --cvar-weight 0 --gamma 1",
    "up to 700": f"{AVERSE} --cvar-weight 0 --gamma 1",
    "up to 800": f"{AVERSE} --cvar-weight 0 --gamma 1",
}
OWN_TASKS = {  # the ends of the names of what these variants are trained on, in envs.py
    "penalty": "Penalty",
    "clock": "Clock",
    "up to 700": "UpTo700",
    "up to 800": "UpTo800",
}
LANDER = "LunarLander-v3"
LANDERS = {
    "neutral": "--preset lunarlander averse --cvar-weight 0",
    "averse": "--preset lunarlander averse --cvar-weight 1",
    "averse 0.5": "--preset lunarlander averse",
}
CHOSEN = "averse 0.5"
STATIC = "up to 800"
SHOWN = ("neutral", CHOSEN, STATIC, "clock", "penalty")
SHOWN_IN_PUBLIC = ("neutral", CHOSEN, "penalty")
OLDER = range(1000, 1001)
PILOT = range(1001, 1002)
REPORTED = range(8001, 8006)
MEASURED = (
    "mean", "std", "cvar_10", "cvar_5",
    "safe_mean", "safe_cvar_10",  # without hits
    "risky_share", "length",
)  # fmt: skip
COLUMNS = ("task", "script", "variant", "seed", "seconds", *MEASURED, "flags", *common.ORIGIN)
TABLE = Table(RESULTS / "tails.csv", COLUMNS, "\n", common.OF_A_RUN)


# ------------------------------------------------------------------------------------------- runs
def cells(pilot: bool) -> list[Cell]:
    """The variants, on the tuning seed or on reported ones."""
    if not pilot:
        return [
            Cell(task, CATEGORICAL, name, VARIANTS[name], REPORTED)
            for task, names in ((TASK, SHOWN), *((task, SHOWN_IN_PUBLIC) for task in PUBLIC))
            for name in names
        ]
    return [
        Cell(task, CATEGORICAL, variant, flags, PILOT)
        for task, variants in ((TASK, VARIANTS), (LANDER, LANDERS))
        for variant, flags in variants.items()
    ]


def missing(pilot: bool, words: list[str], seeds: list[int]) -> list[Run]:
    """Runs that match and have no row, seed by seed: of the cells' own seeds those that are named,
    or else all."""
    common.refuse_other_flags(TABLE.rows(), cells(pilot))
    runs = TABLE.without_row(common.runs_of(cells(pilot), words))
    runs = [run for run in runs if not seeds or run.seed in seeds]
    return sorted(runs, key=lambda run: run.seed)


def run_one(run: Run) -> dict[str, Any]:
    """Train, and play the task itself."""
    cell = run.cell
    origin = common.origin()
    script = common.load_script(cell.script)
    flags = f"{cell.flags} --eval-episodes 0 --save-envs never --checkpoint-every 0"
    task = learnt = cell.task
    if cell.task != LANDER:
        task = f"envs:{cell.task}-v0"
        learnt = f"envs:{cell.task}{OWN_TASKS.get(cell.variant, '')}-v0"
    with common.trained(script, learnt, run.seed, flags) as done:
        agent, args = script.load_agent(done.directory)
    if cell.variant == "penalty":  # it is learnt from, and not scored
        args = replace(args, env_id=task)
    row = {**cell.setting._asdict(), "seed": run.seed, "seconds": done.seconds}
    row["flags"] = common.spelt_flags(cell)
    row |= measure(script, agent, args) | origin
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}


def measure(script: Any, agent: Any, args: Any) -> dict[str, float | str]:
    """Play the evaluation's episodes without hits, then draw hits. Returns what is told of them.

    Where the policy sees what it has earned, hits come as it plays, and nothing is known of
    returns without them.
    """
    import torch

    env = script.make_eval_env(args)
    meets_hits = env.has_wrapper_attr("earned")
    draws_hits = env.has_wrapper_attr("probability") and not meets_hits
    if draws_hits:
        probability = env.get_wrapper_attr("probability")
        env.set_wrapper_attr("probability", 0.0)
    args = replace(args, eval_episodes=MANY if meets_hits else EPISODES)
    with contextlib.redirect_stdout(io.StringIO()):
        episodes = [*script.play(env, agent, args)]
    lengths = [len(rewards) for rewards in episodes]

    def by_episode(name: str) -> list[np.ndarray]:
        """What a wrapper has recorded of each step."""
        return np.split(np.array(env.get_wrapper_attr(name)), np.cumsum(lengths)[:-1])

    risky = 0.0
    if draws_hits or meets_hits:
        stakes = by_episode("stakes")
        risky = np.mean(np.concatenate(stakes) > 0)
    safe = np.array([sum(rewards) for rewards in episodes])
    returns = draw_hits(safe, stakes, probability) if draws_hits else safe
    if meets_hits:
        returns = np.array([own.sum() for own in by_episode("earned")])
    env.close()

    def cvar(sample: np.ndarray, alpha: float) -> float:
        return float(script.empirical_cvar(torch.as_tensor(sample.flatten()), alpha))

    found = {"mean": returns.mean(), "std": returns.std()}
    found |= {"cvar_10": cvar(returns, 0.1), "cvar_5": cvar(returns, 0.05)}
    found |= {"safe_mean": safe.mean(), "safe_cvar_10": cvar(safe, 0.1)}
    found |= {"risky_share": risky, "length": np.mean(lengths)}
    if meets_hits:
        del found["safe_mean"], found["safe_cvar_10"]
    return dict.fromkeys(MEASURED, "") | {name: float(x) for name, x in found.items()}


def draw_hits(safe: np.ndarray, stakes: list[np.ndarray], probability: float) -> np.ndarray:
    """Draw hits DRAWS times for every step of each episode, each with this probability.

    safe are the returns without hits (E,), stakes what a hit costs at each step of each episode.
    Returns the returns, (E, DRAWS).
    """
    rng = np.random.default_rng(0)
    hits = [rng.random((DRAWS, len(own))) < probability for own in stakes]
    lost = [own_hits @ own for own_hits, own in zip(hits, stakes, strict=True)]
    return safe[:, None] - np.array(lost)


def best_of(rows: list[Row], kind: str) -> str:
    """The variant that the pilot chooses, of those whose names begin so. The price counts for
    aversion alone."""
    mean = {name: values(rows, TASK, name, "mean").mean() for name in VARIANTS}
    tail = {name: values(rows, TASK, name, "cvar_10").mean() for name in VARIANTS}
    own = [name for name in VARIANTS if name.startswith(kind)]
    limit = (1 - PRICE) * mean["neutral"] if kind == "averse" else -np.inf
    cheap = [name for name in own if mean[name] >= limit]
    return max(cheap or own, key=lambda name: tail[name])


def objection(rows: list[Row]) -> str:
    """Say why the pilot does not support reported runs, in a line; it is empty where it does."""
    if missing(pilot=True, words=[TASK], seeds=[]):
        return "the pilot has not run; run tails.py --pilot first"
    own = with_seeds(rows, PILOT)
    mean, tail, safe = (
        values(own, TASK, "neutral", column).mean()
        for column in ("mean", "cvar_10", "safe_cvar_10")
    )
    share = (safe - tail) / abs(mean)
    if share < TAIL:
        return f"{TASK}: hits take {share:.1%} of the mean from the tail alone"
    for constant, kind, chosen in (("CHOSEN", "averse", CHOSEN), ("STATIC", "up to", STATIC)):
        best = best_of(own, kind)
        if best != chosen:
            return f"the pilot prefers {best}, and {constant} in tails.py is {chosen}"
    return ""


# ----------------------------------------------------------------------------------------- report
def values(rows: list[Row], task: str, variant: str, column: str) -> np.ndarray:
    """What the runs of a cell measured."""
    found = [row for row in rows if (row["task"], row["variant"]) == (task, variant)]
    return np.array([float(row[column]) for row in found if row[column]])


def told(x: np.ndarray) -> str:
    """A mean, with half of its interval where there is one."""
    if not len(x):
        return ""
    return f"{x.mean():.0f} +- {half_width(x):.0f}" if len(x) > 1 else f"{x.mean():.0f}"


def lines_of(rows: list[Row]) -> list[str]:
    """One line for each task and variant. Whether the goal is met takes two runs of both."""
    lines = common.markdown_head(
        "task | variant | seeds | mean | CVaR_0.1 | CVaR_0.05 | CVaR_0.1 without hits "
        "| share of risky steps | mean over neutral's | CVaR_0.1 minus neutral's (95 %) | goal"
    )
    for task, variant in dict.fromkeys((row["task"], row["variant"]) for row in rows):
        mean, *tails = (
            values(rows, task, variant, column)
            for column in ("mean", "cvar_10", "cvar_5", "safe_cvar_10")
        )
        cells = [task, variant, len(mean), told(mean), *map(told, tails)]
        cells.append(f"{values(rows, task, variant, 'risky_share').mean():.1%}")
        neutral = values(rows, task, "neutral", "mean")
        if variant == "neutral" or not len(neutral):
            cells += ["", "", ""]
        else:
            change = (mean.mean() - neutral.mean()) / abs(neutral.mean())
            gain = welch(tails[0], values(rows, task, "neutral", "cvar_10"))
            met = "met" if gain.low > 0 and change >= -PRICE else "missed"
            judged = not np.isnan(gain.low)
            difference = gain.told() if judged else f"{gain.mean:+.0f}"
            cells += [f"{change:+.1%}", difference, met if judged else ""]
        lines.append(common.markdown_row(cells))
    return lines


def unlimited(rows: list[Row]) -> list[str]:
    """Name the runs that never reached their total: they are those without a limit once more."""
    key = ("task", "seed", "mean", "std")
    clocks = {tuple(row[name] for name in key) for row in rows if row["variant"] == "clock"}
    same = [
        f"{row['variant']} (seed {row['seed']})"
        for row in rows
        if row["variant"].startswith("up to") and tuple(row[name] for name in key) in clocks
    ]
    told = f"No episode of these reached its total, so they equal clock: {', '.join(same)}."
    return [told] if same else []


def with_seeds(rows: list[Row], seeds: range) -> list[Row]:
    """The rows of these seeds."""
    return [row for row in rows if int(row["seed"]) in seeds]


def report() -> None:
    """Tables in results/tails.md and on stdout, the figure in results/tails.png."""
    rows = TABLE.rows()
    text = [
        f"{EPISODES} evaluation episodes a run; means over seeds +- half the 95 % interval. For "
        f"each episode hits were drawn {DRAWS} times. An empty CVaR without hits: hits were met "
        f"while playing, once. "
        f"Policies that see what they have earned (clock, up to) played {MANY} episodes with hits."
    ]
    for title, seeds in (
        ("Reported seeds", REPORTED),
        (f"Tuning seed {PILOT[0]}", PILOT),
        (f"Tuning seed {OLDER[0]}, older presets", OLDER),
    ):
        own = with_seeds(rows, seeds)
        if own:
            text += ["", f"{title}:", "", *lines_of(own)]
            text += [line for told in unlimited(own) for line in ("", told)]
    text += ["", f"Commit of the scripts, machine: {common.origins(rows)}."]
    common.publish(RESULTS / "tails.md", text)
    if with_seeds(rows, REPORTED):
        draw(with_seeds(rows, REPORTED))


POLICIES = {  # variants in the figure, with their colours (those of risk.py) and words
    "neutral": (common.FLOOR, "neutral"),
    CHOSEN: (common.SKY, "averse (--cvar-weight 0.5)"),
    "penalty": (common.GREEN, "neutral, with a penalty on risky steps"),
}


def draw(rows: list[Row]) -> None:
    """CVaR over mean, a panel a task: a small point for each run, a large one with the intervals
    for the mean, and arrows from the neutral policy."""
    tasks = [task for task in (*PUBLIC, TASK) if len(values(rows, task, "neutral", "mean"))]
    count = (-(-len(tasks) // 2), 2)  # two panels beside each other
    size = (common.WIDTH, 3.4 * count[0])
    figure, axes = common.pyplot().subplots(*count, figsize=size, squeeze=False)
    for empty in axes.flat[len(tasks) :]:
        empty.set_axis_off()
    for number, (axis, task) in enumerate(zip(axes.flat, tasks, strict=False)):
        middles = {}
        for variant, (color, label) in POLICIES.items():
            x = values(rows, task, variant, "mean")
            y = values(rows, task, variant, "cvar_10")
            if len(x):
                middles[variant] = (x.mean(), y.mean())
                axis.plot(x, y, "o", color=color, ms=2.5, alpha=0.5)
                bars = {
                    "xerr": half_width(x),
                    "yerr": half_width(y),
                    "fmt": "o",
                    "ms": 6,
                    "lw": 1.2,
                }
                axis.errorbar(x.mean(), y.mean(), color=color, label=label, **bars)
        for variant, middle in middles.items():
            if variant != "neutral":
                line = {"arrowstyle": "->", "color": "0.5"}
                axis.annotate("", middle, middles["neutral"], arrowprops=line)
        axis.set(xlabel="mean return", ylabel="mean of the worst tenth of returns")
        common.letter(axis, number, task)
    told = "Large: mean of the runs, with 95 % intervals. Small: one run."
    labels = axis.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, title=told)
    common.save(figure, RESULTS / "tails.png")


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pilot", action="store_true", help="the tuning seed")
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=[], help="words, all to match")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="some of the seeds")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    common.require("matplotlib")
    if not args.report:
        try:
            if not args.pilot and (found := objection(TABLE.rows())):
                sys.exit(f"error: {found}")
            runs = missing(args.pilot, args.only, args.seeds)
        except ValueError as error:
            parser.error(str(error))
        TABLE.record(run_one, runs, args.processes)
    report()


if __name__ == "__main__":
    main()
