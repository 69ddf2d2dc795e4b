"""What a run's critics say: a picture in the run directory, and a line of numbers.

    python benchmarks/inspect_run.py runs/CartPoleNoVel-v1__...
    python benchmarks/inspect_run.py RUN_DIR --episodes 128 --states 0 50 100 150
    python benchmarks/inspect_run.py RUN_DIR/best.pt

The sampled policy plays fresh episodes, as in training. Along one of them (the one of median
return) the picture shows the predicted return as a fan of deciles, its value V and the realised
return-to-go; below, the whole predicted distribution at four of its states; and, over all states of
all episodes (of their first 2,000 steps), how often the realised return fell between which deciles:
a tenth each where the critics are right. Returns are discounted, with rewards of Atari games
clipped, as critics learn them. Where gymnasium's time limit would cut an episode, the policy plays
on, so that its return is complete; a discount of 1 is refused, since that might never end. Where a
task cuts episodes by itself, a line says so.

It works on any run directory of the two scripts, and of copies that kept their functions' names: it
runs the newest copy of the source that lies there. Each episode has an environment of its own, and
all observations are kept in memory. So take few --episodes of tasks that are heavy or have large
images.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import calibration
import common
import numpy as np

LEVELS = np.arange(1, 10) / 10  # of the fan
FINE = np.arange(1, 100) / 100  # of a whole distribution
SHADES = ("#D6E6F4", "#ABD0E6", "#6AAED6", "#3787C0")  # of the fan, from outside
REALISED = common.GOLD
MOST = 2_000  # steps of an episode that are looked at


class Seen(NamedTuple):
    """What was predicted and what came, step by step: T steps of N episodes."""

    alive: np.ndarray  # (T, N), whether the episode had not ended before
    returns: np.ndarray  # (T, N), discounted
    values: np.ndarray  # (T, N), V
    deciles: np.ndarray  # (9, T, N), predicted
    cut: int = 0  # episodes that the task itself cut; their returns end there


def script_of(run_dir: Path) -> ModuleType:
    """The newest copy of the script in a run directory, as a module. Raises ValueError without one.

    There are several where the run was resumed by a script of another name. Those by which it was
    trained before an edit (-until-step-) do not count.
    """
    copies = [
        path
        for path in run_dir.glob("*.py")
        if "-until-step-" not in path.name and "class ValueDistribution" in path.read_text()
    ]
    if not copies:
        raise ValueError(f"{run_dir}: no run directory: the copy of the script is missing")
    newest = max(copies, key=lambda path: path.stat().st_mtime)
    name = f"{newest.stem}_of_run"
    spec = importlib.util.spec_from_file_location(name, newest)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def predict(agent: Any, obs: np.ndarray, levels: np.ndarray, state: Any) -> tuple[Any, Any, Any]:
    """Quantiles and V of observations, and the critics' next state, None without memory."""
    if common.is_recurrent(agent):
        values, _ = agent.value(obs, state)
        quantiles, state = agent.predict_returns(obs, tuple(levels), state)
        return quantiles, values, state
    return agent.predict_returns(obs, tuple(levels)), agent.value(obs), None


def look(script: ModuleType, agent: Any, args: Any, episodes: int) -> tuple[Seen, np.ndarray]:
    """Play and predict; also the observations (T, N, ...)."""
    played = calibration.play_on(script, agent, args, episodes, MOST)
    deciles, values, state = [], [], None
    for obs in played.obs:
        found, value, state = predict(agent, obs, LEVELS, state)
        deciles.append(found)
        values.append(value)
    along = np.moveaxis(np.array(deciles), -1, 0)
    return Seen(played.alive, played.returns, np.array(values), along, played.cut), played.obs


def whole_distributions(agent: Any, obs: np.ndarray, states: list[int]) -> np.ndarray:
    """Predicted quantiles (99, number of states) at some steps of an episode (T, ...)."""
    curves, state = {}, None
    for step in range(max(states) + 1):
        levels = FINE if step in states else LEVELS[:1]
        curves[step], _, state = predict(agent, obs[step], levels, state)
    return np.stack([curves[step] for step in states], -1)


def remarks(seen: Seen, args: Any) -> list[str]:
    """What a reader of the picture has to know."""
    said = []
    if args.value_target != "sr_lambda":
        said.append(
            "predicted are quantiles of lambda-returns, which vary less than returns do; "
            "critics of --preset calibrated learn those of returns"
        )
    starts = seen.returns[0]
    if starts.std() <= 1e-3 * max(abs(starts.mean()), 1e-9):
        said.append(
            "returns at the start vary by less than a thousandth of their mean: there is hardly a "
            "distribution to be right about"
        )
    if seen.cut:
        said.append(
            f"{seen.cut} of {len(starts)} episodes were cut by the task itself: their returns end "
            f"there, while critics expect what would have followed"
        )
    return said


def shares(seen: Seen) -> np.ndarray:
    """Share of all states whose return fell below the first decile, between it and the second and
    so on, (10,): the histogram of the probability integral transform. Of ties of a return with
    several deciles, which a distribution of few values makes, each bin gets its part."""
    returns = seen.returns[seen.alive]
    deciles = seen.deciles[:, seen.alive]
    below = (deciles < returns).sum(0)  # bins surely left behind
    upto = (deciles <= returns).sum(0)
    bins = np.arange(10)[:, None]
    part = (bins >= below) & (bins <= upto)
    return (part / part.sum(0)).mean(1)


def numbers(seen: Seen) -> dict[str, float]:
    """What the terminal tells."""
    errors = (seen.values - seen.returns)[seen.alive]
    returns = seen.returns[seen.alive]
    unexplained = errors.var() / max(returns.var(), 1e-12)
    spread = (seen.deciles[8] - seen.deciles[0])[seen.alive]
    inside = (seen.returns >= seen.deciles[0]) & (seen.returns <= seen.deciles[8])
    return {
        "mean": returns.mean(),
        "bias": errors.mean(),
        "explained variance": 1 - unexplained,
        "between deciles 1 and 9": inside[seen.alive].mean(),
        "width of that": spread.mean(),
        "decile error": np.abs(np.cumsum(shares(seen))[:9] - LEVELS).mean(),
    }


def median_episode(seen: Seen) -> int:
    """The episode whose return at the start is the median one."""
    order = seen.returns[0].argsort()
    return int(order[len(order) // 2])


def told_flag(name: str, value: Any) -> str:
    """Return a flag as one types it."""
    typed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{typed}" if value else f"--no-{typed}"
    values = value if isinstance(value, (list, tuple)) else [value]
    return f"--{typed} {' '.join(map(str, values))}"


def flags_of(script: ModuleType, args: Any) -> str:
    """Return what made the run what it is: its presets, and flags that differ from these."""
    preset = tuple(getattr(args, "preset", ()))
    usual = script.preset_flags(preset) if preset else {}
    apart = {"env_id", "preset", "seed"}  # and what has no effect on learning
    for group in ("RunArgs", "MachineArgs"):
        apart |= set(getattr(getattr(script, group, None), "__dataclass_fields__", ()))
    apart.discard("init_from")  # which does have one
    told = [told_flag("preset", preset)] if preset else []
    for one in dataclasses.fields(args):
        value = getattr(args, one.name)
        default = usual.get(one.name, one.default)
        line = told_flag(one.name, value)
        if one.name not in apart and value != default and line != told_flag(one.name, default):
            told.append(line)
    return " ".join(told) or "default flags"


def draw_fan(panel: Any, seen: Seen, episode: int, states: list[int]) -> None:
    """Draw deciles, V and the realised return along one episode. Letters name panels below."""
    length = int(seen.alive[:, episode].sum())
    steps = np.arange(length)
    deciles = seen.deciles[:, :length, episode]
    for i in range(4):
        name = f"deciles {i + 1} to {9 - i}"
        panel.fill_between(steps, deciles[i], deciles[8 - i], color=SHADES[i], lw=0, label=name)
    panel.plot(steps, seen.values[:length, episode], color=common.INK, lw=0.9, label="value V")
    panel.plot(steps, seen.returns[:length, episode], color=REALISED, label="realised")
    low, high = panel.get_ylim()
    for number, step in enumerate(states):
        panel.axvline(step, color="0.5", lw=0.8, ls=":")
        place = {"va": "bottom", "ha": "center", "color": common.INK, "fontsize": 7}
        panel.text(step, high, f"({'cdef'[number]})", **place)
    panel.set_ylim(low, high)
    panel.set(xlabel="step of the episode", ylabel="discounted return to go")
    panel.legend(loc="best", ncols=2)


def draw_calibration(panel: Any, seen: Seen) -> None:
    """Histogram of the probability integral transform."""
    panel.bar(np.arange(10) + 0.5, shares(seen), width=0.92, color=common.OURS)
    panel.axhline(0.1, color=common.INK, lw=1, ls="--", label="calibrated")
    panel.set_xticks(range(11), ["", *range(1, 10), ""])
    panel.grid(axis="x", visible=False)
    panel.set(xlabel="between which predicted deciles", ylabel="share of realised returns")
    panel.legend(loc="best")


def draw_state(panel: Any, curve: np.ndarray, realised: float) -> None:
    """The predicted distribution function of one state, and what came."""
    panel.plot(curve, FINE, color=common.OURS)
    panel.axvline(realised, color=REALISED)
    panel.set(xlabel="discounted return", ylim=(0, 1))
    panel.locator_params(axis="x", nbins=4)


def draw(path: Path, title: str, seen: Seen, curves: np.ndarray, states: list[int]) -> None:
    """The picture: fan and calibration above, four distributions (99, 4) below."""
    plt = common.pyplot()
    figure = plt.figure(figsize=(common.WIDTH, 5.6))
    grid = figure.add_gridspec(2, 12, height_ratios=(1.6, 1))
    episode = median_episode(seen)
    fan = figure.add_subplot(grid[0, :8])
    draw_fan(fan, seen, episode, states)
    common.letter(fan, 0, "predicted along the episode of median return", pad=14)
    bars = figure.add_subplot(grid[0, 8:])
    draw_calibration(bars, seen)
    common.letter(bars, 1, "all states of all episodes", pad=14)
    for number, step in enumerate(states):
        panel = figure.add_subplot(grid[1, 3 * number : 3 * number + 3])
        draw_state(panel, curves[:, number], seen.returns[step, episode])
        common.letter(panel, 2 + number, f"step {step}")
        if number == 0:
            panel.set_ylabel("probability of less")
    figure.suptitle(title, x=0.01, ha="left", fontsize=7.5)
    common.save(figure, path)


def inspect(path: Path, episodes: int, states: list[int], seed: int | None = None) -> Path:
    """Look at a run, or at one of its checkpoints, tell, draw. Returns the picture's path.

    The episodes are those of the run's own seed, or of this one.
    """
    run_dir = path.parent if path.suffix == ".pt" else path
    sys.path.insert(0, os.getcwd())  # a task may lie there, as when it was trained,
    sys.path.append(str(common.HERE.parent))  # or beside the scripts
    script = script_of(run_dir)
    if not os.access(run_dir, os.W_OK):
        raise ValueError(f"{run_dir}: the picture goes there, and it cannot be written to")
    agent, args = script.load_agent(path)
    if not hasattr(agent, "predict_returns"):
        raise ValueError(f"{run_dir}: its script has no predict_returns; train with this version")
    if getattr(args, "dist_coef", 1) == 0:  # older versions have no such flag
        raise ValueError(f"{run_dir}: with --dist-coef 0 its critics have learnt V alone")
    seeded = args if seed is None else dataclasses.replace(args, seed=seed)
    seen, obs = look(script, agent, seeded, episodes)
    episode = median_episode(seen)
    length = int(seen.alive[:, episode].sum())
    states = states or [i * (length - 1) // 4 for i in range(4)]
    if max(states) >= length:
        raise ValueError(f"--states {max(states)}: of the episode shown {length} steps are kept")
    curves = whole_distributions(agent, obs[:, episode], states)
    told = ", ".join(f"{name} {x:.3g}" for name, x in numbers(seen).items())
    print(f"{seen.alive.sum():,} states of {episodes} episodes, discounted returns: {told}")
    for line in remarks(seen, args):
        print(line)

    picture = run_dir / ("critics.png" if path is run_dir else f"critics-{path.stem}.png")
    name = script.__name__.removesuffix("_of_run")
    head = f"{args.env_id}, {name}, seed {args.seed}; {episodes} episodes of the sampled policy"
    title = "\n".join([head, *textwrap.wrap(flags_of(script, args), 140)])
    draw(picture, title, seen, curves, states)
    return picture


def main() -> None:
    """Parse, inspect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="of a run, or a checkpoint such as best.pt")
    parser.add_argument(
        "--episodes", type=int, default=64, help="each has an environment; default: 64"
    )
    parser.add_argument(
        "--states", type=int, nargs=4, default=[], help="steps of the episode shown"
    )
    parser.add_argument("--seed", type=int, help="other episodes; default: those of the run's seed")
    args = parser.parse_args()
    common.require("matplotlib")
    if args.episodes < 1 or min(args.states, default=0) < 0 or (args.seed or 0) < 0:
        parser.error("--episodes must be 1 or more, --states and --seed 0 or more")
    try:
        print(inspect(args.run_dir, args.episodes, args.states, args.seed))
    except (ValueError, OSError) as error:  # the scripts' UsageError is a ValueError
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
