"""Speed and memory beside Stable-Baselines3, and beside what no implementation can do without.

    python benchmarks/speed.py                                         # the grid, one torch thread
    python benchmarks/speed.py --grid --growth --lstm --threads 1 2    # everything
    python benchmarks/speed.py --report                                # rebuild from the CSV alone
    python benchmarks/speed.py --only "cheetah*" --cleanrl FILE        # beside CleanRL, too
    python benchmarks/speed.py --only recurrent "cheetah*" --repeats 1 --out FOLDER

Every measurement is a process of its own. Speed is wall time outside of it at two lengths, one
rollout and as many more as take some seconds: difference of steps over difference of time, so that
start-up does not count. Programs and cells take turns, repeat by repeat; tables have medians.
The peers, at equal work with one scalar critic, are sb3-contrib's RecurrentPPO (an LSTM each for
actor and critic), SB3's PPO and, given the path of ppo_continuous_action.py in a checkout of it
(it is in no registry), CleanRL. The floor of a cell is the sum of what its rollouts must do:
environments stepped with random actions, resets as often as in the run; the actor's forward pass
for every step, the critics' once; forward and backward of bare layers for every minibatch. Losses,
optimizer, advantages and metrics are not in it. Peak memory is the largest resident set of the
process, imports included. "kept" is ours with glibc told to keep freed memory (KEEP below).

Raw rows are appended to results/speed.csv; the next call measures what is missing for the scripts'
last commit ("+": changed since then), and tables show each cell's newest commit.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import json
import math
import os
import platform
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

HERE = Path(__file__).resolve().parent
LSTM, CATEGORICAL = "distributional_ppo_lstm", "distributional_ppo_categorical"
SECONDS = 4  # between the two lengths of a run, about
# seconds of a measurement on idle cores
ESTIMATE = {"ours": 11, "kept": 11, "sb3": 12, "cleanrl": 15, "floor": 6, "pass": 6}
KEEP = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib")
COLUMNS = (  # value: steps per second, or milliseconds for pass-*; parts: milliseconds
    "cell program threads repeat value short_steps short_s long_steps long_s steps_per_reset "
    "peak_mb parts load commit machine versions"
).split()
PARTS = ("environments", "acting", "values", "update")  # of the floor

SMALL = {"num_envs": 8, "num_steps": 128, "update_epochs": 4, "num_minibatches": 4}
REFERENCE = {**SMALL, "env_id": "CartPoleNoVel-v1", "lstm_hidden_size": 128}
CUT = {**REFERENCE, "env_id": "CartPoleCut60-v0", "masked_obs": (1, 3)}  # episodes of 60 steps
CHEETAH = {"env_id": "HalfCheetah-v5", "update_epochs": 10, "num_minibatches": 32}
GRID = {  # cell: (script, flags)
    "recurrent": (LSTM, REFERENCE),
    "recurrent-lstm64": (LSTM, {**REFERENCE, "lstm_hidden_size": 64}),
    "recurrent-lstm256": (LSTM, {**REFERENCE, "lstm_hidden_size": 256}),
    "recurrent-seq32": (LSTM, {**REFERENCE, "seq_len": 32}),  # the same work in shorter sequences
    "recurrent-envs32": (LSTM, {**REFERENCE, "num_envs": 32}),
    "recurrent-episodes20": (LSTM, {**CUT, "env_id": "CartPoleCut20-v0"}),
    "recurrent-episodes60": (LSTM, CUT),
    "recurrent-episodes500": (LSTM, {**CUT, "env_id": "CartPoleCut500-v0"}),
    "cartpole": (CATEGORICAL, {**SMALL, "env_id": "CartPole-v1"}),
    "cheetah-1x2048": (CATEGORICAL, {**CHEETAH, "num_envs": 1, "num_steps": 2048}),
    "cheetah-8x256": (CATEGORICAL, {**CHEETAH, "num_envs": 8, "num_steps": 256}),
}
AXES = {  # one size moves, the others are those of the reference
    "num_envs": (1, 4, 16, 64, 256),  # in sequences of 32 steps: one environment has 4 minibatches
    "num_steps": (32, 128, 512, 2048),
    "lstm_hidden_size": (32, 64, 128, 256, 512),
    "num_quantiles": (8, 32, 128, 256),
}
GROWTH = {
    f"growth-{axis}-{size}": (LSTM, {**CUT, "seq_len": 32 * (axis == "num_envs"), axis: size})
    for axis, sizes in AXES.items()
    for size in sizes
}
PASSES = {f"pass-{columns}": (LSTM, {"columns": columns}) for columns in (2, 8, 32)}
CELLS = {**GRID, **GROWTH, **PASSES}


class CartPoleCut(CartPoleEnv):
    """CartPole that never falls: a time limit ends each episode after `length` steps.
    The first one is cut at random, so that environments do not end together."""

    def __init__(self, length: int, **options) -> None:
        super().__init__(**options)
        self.x_threshold = self.theta_threshold_radians = math.inf
        self.length, self.left = length, None

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        answer = super().reset(**options)
        first = self.left is None
        self.left = int(self.np_random.integers(1, self.length + 1)) if first else self.length
        return answer

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.left -= 1
        return *super().step(action)[:3], self.left <= 0, {}


# --------------------------------------------------------------------- what runs in child processes
def ours(name: str, flags: dict, steps: int) -> None:
    """One of this repository's scripts: twin critics."""
    import torch

    script = importlib.import_module(name)
    flags = {**flags, "torch_threads": torch.get_num_threads(), "total_timesteps": steps}
    with tempfile.TemporaryDirectory() as top:
        script.train(script.Args(**flags, eval_episodes=1, run_dir=top))


def sb3(name: str, flags: dict, steps: int) -> None:
    """The peer; `batch_size` counts samples."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    recurrent, keep = name == LSTM, np.array([1, 0, 1, 0], np.float32)

    def make() -> gym.Env:
        env = gym.make(flags["env_id"].replace("NoVel", ""), disable_env_checker=True)
        hide = gym.wrappers.TransformObservation
        return hide(env, lambda x: x * keep, env.observation_space) if recurrent else env

    batch_size = flags["num_envs"] * flags["num_steps"] // flags["num_minibatches"]
    network = {"net_arch": [64], "enable_critic_lstm": True} if recurrent else {}
    network |= {key: flags[key] for key in flags.keys() & {"lstm_hidden_size"}}
    model = (RecurrentPPO if recurrent else PPO)(
        "MlpLstmPolicy" if recurrent else "MlpPolicy", make_vec_env(make, flags["num_envs"]),
        n_steps=flags["num_steps"], n_epochs=flags["update_epochs"], batch_size=batch_size,
        policy_kwargs=network, device="cpu", seed=1,
    )  # fmt: skip
    model.learn(steps)


def cleanrl(path: str, flags: dict, steps: int) -> None:
    """CleanRL's script as it is; gymnasium 1 asks its wrapper for the space of observations."""
    wrapper = gym.wrappers.TransformObservation
    gym.wrappers.TransformObservation = lambda env, f: wrapper(env, f, env.observation_space)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in flags.items()]
    sys.argv = [path, *words, f"--total-timesteps={steps}", "--no-cuda"]
    runpy.run_path(path, run_name="__main__")


def milliseconds(call: Callable, seconds: float = 0.8) -> float:
    """Mean time of a call."""
    for _ in range(3):
        call()
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        call()
        count += 1
    return 1e3 * spent / count


def floor(name: str, flags: dict) -> dict[str, float]:
    """Milliseconds of what one rollout and the training on it must do."""
    import torch
    from torch import nn

    script, recurrent = importlib.import_module(name), name == LSTM
    args = script.Args(**flags)
    T, N, width, minibatches = args.num_steps, args.num_envs, args.hidden_size, args.num_minibatches
    size = args.lstm_hidden_size if recurrent else width
    envs = script.make_envs(args, N)
    envs.reset(seed=1)
    actions = itertools.cycle([envs.action_space.sample() for _ in range(1000)])
    num_obs = envs.single_observation_space.shape[0]
    num_actions = gym.spaces.flatdim(envs.single_action_space)
    num_values = args.num_quantiles if recurrent else args.num_atoms

    def layers(*sizes: int) -> nn.Sequential:
        pairs = itertools.pairwise(sizes)
        return nn.Sequential(*(m for a, b in pairs for m in (nn.Linear(a, b), nn.ReLU())))

    def unroll(body: nn.Sequential, heads: list[nn.Module], obs: torch.Tensor) -> list:
        features = body(obs)[0] if recurrent else body(obs)
        return [head(features) for head in heads]

    last = nn.LSTM if recurrent else layers
    actor, critic = (nn.Sequential(layers(num_obs, width), last(width, size)) for _ in range(2))
    policy, cell = nn.Linear(size, num_actions), nn.LSTMCell(width, size)
    heads = [layers(size, width, num_values)[:-1] for _ in range(args.num_critics)]
    parameters = [*nn.ModuleList((actor, critic, policy, *heads)).parameters()]
    obs, rollout, zero = torch.randn(N, num_obs), torch.randn(T, N, num_obs), torch.zeros(N, size)
    length = args.chunk_len if recurrent else 1
    rows = (length, T * N // length // minibatches)[not recurrent :]
    minibatch = torch.randn(*rows, num_obs)

    def update() -> None:
        outputs = unroll(actor, [policy], minibatch) + unroll(critic, heads, minibatch)
        torch.autograd.grad(outputs, parameters, [torch.ones_like(x) for x in outputs])

    @torch.inference_mode()
    def act() -> None:
        policy(cell(actor[0](obs), (zero, zero))[0] if recurrent else actor(obs))

    @torch.inference_mode()
    def values() -> None:
        unroll(critic, heads, rollout)

    calls = (lambda: envs.step(next(actions)), act, values, update)
    counts = (T, T, 1, args.update_epochs * minibatches)
    return {part: n * milliseconds(call) for part, n, call in zip(PARTS, counts, calls)}


def lstm_pass(name: str, flags: dict) -> dict[str, float]:
    """Milliseconds forward and backward: 128 steps, LSTM 128, input 64, with and without resets."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    script, columns = importlib.import_module(name), flags["columns"]
    lstm, cell = nn.LSTM(64, 128), nn.LSTMCell(64, 128)
    inputs = torch.randn(128, columns, 64, requires_grad=True)
    ones, zero = torch.ones(128, columns, 128), torch.zeros(1, columns, 128)

    def unroll(start: torch.Tensor) -> None:
        outputs, _ = script.unroll_lstm(lstm, inputs, (zero, zero), start)
        torch.autograd.grad(outputs, [inputs, *lstm.parameters()], ones)

    def loop(start: torch.Tensor) -> None:
        state, outputs = (zero[0], zero[0]), []
        for x, keep in zip(inputs, ~start[..., None]):
            state = cell(x, (state[0] * keep, state[1] * keep))
            outputs.append(state[0])
        torch.autograd.grad(torch.stack(outputs), [inputs, *cell.parameters()], ones)

    answer = {}
    for resets, rate in (("resets", 1 / 60), ("none", 0)):  # 16 draws of them take turns
        draws = itertools.cycle(torch.rand(16, 128, columns) < rate)
        answer[f"unroll {resets}"] = milliseconds(lambda d=draws: unroll(next(d)))
        answer[f"loop {resets}"] = milliseconds(lambda d=draws: loop(next(d)))
    return answer


def child(program: str, cell: str, threads: int, steps: int, what: str) -> None:
    """One run or one timing; its result is the last line of output.
    `what`: another task for the floor, the file for CleanRL."""
    import torch

    torch.set_num_threads(threads)
    sys.path.insert(0, str(HERE.parent))
    name, flags = CELLS[cell]
    flags = {**flags, "env_id": what} if what and program == "floor" else flags
    if "Cut" in flags.get("env_id", ""):
        length = int(flags["env_id"].removeprefix("CartPoleCut").removesuffix("-v0"))
        gym.register(flags["env_id"], CartPoleCut, kwargs={"length": length})
    if program in ("floor", "pass"):
        print(json.dumps((floor if program == "floor" else lstm_pass)(name, flags)))
        return
    resets, reset, began = [], CartPoleEnv.reset, time.perf_counter()
    CartPoleEnv.reset = lambda self, **options: resets.append(1) or reset(self, **options)
    script = what if program == "cleanrl" else name
    {"ours": ours, "kept": ours, "sb3": sb3, "cleanrl": cleanrl}[program](script, flags, steps)
    row = {"inside": time.perf_counter() - began}
    row["steps_per_reset"] = steps / len(resets) if resets else 1000  # HalfCheetah: always
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(row))


# -------------------------------------------------------------------------------------- measurement
def start(program: str, cell: str, threads: int, steps: int = 0, what: str = "") -> dict:
    """Run `child` in a process; its result, with the wall time `outside` of the process."""
    job = json.dumps((program, cell, threads, steps, what))
    command = [sys.executable, str(HERE / Path(__file__).name), "--child", job]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment |= KEEP if program == "kept" else {}
    options = {"env": environment, "text": True}
    options["cwd"] = tempfile.gettempdir()  # MuJoCo leaves a log where it runs
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, **options)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{cell}, {program}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "outside": seconds}


def measure(
    program: str, cell: str, threads: int, earlier: dict[str, list[dict]], peer: str
) -> dict:
    """What is new in a row of the CSV. `earlier`: the cell's rows so far, by program; `peer`:
    CleanRL's file."""
    flags = CELLS[cell][1]
    if program in ("floor", "pass"):
        env_id = ""
        if program == "floor" and "CartPole" in flags["env_id"]:  # resets as often as in the run
            env_id = f"CartPoleCut{float(earlier['ours'][-1]['steps_per_reset']):.0f}-v0"
        parts = start(program, cell, threads, what=env_id)
        del parts["outside"]
        row = {"parts": json.dumps({part: round(ms, 3) for part, ms in parts.items()})}
        if program == "pass":
            return {**row, "value": parts["unroll resets"]}
        return {**row, "value": 1e3 * flags["num_envs"] * flags["num_steps"] / sum(parts.values())}
    samples, spent = flags["num_envs"] * flags["num_steps"], 0.0
    speed = middle(earlier[program]) if earlier[program] else 0
    while spent < SECONDS / 2:  # again, longer, where the guess of the speed was too low
        more = samples * max(1, round(SECONDS * speed / samples))
        what = peer if program == "cleanrl" else ""
        short, long = (start(program, cell, threads, n, what) for n in (samples, samples + more))
        spent = long["outside"] - short["outside"]
        speed = more / max(long["inside"] - short["inside"], SECONDS / 20)
    row = {"value": more / spent, "short_steps": samples, "short_s": short["outside"]}
    row |= {"long_steps": samples + more, "long_s": long["outside"]}
    return row | {key: long[key] for key in ("steps_per_reset", "peak_mb")}


def load(path: Path) -> list[dict]:
    """The rows measured so far, as text."""
    with path.open("a+", newline="") as file:
        if file.tell() == 0:
            csv.writer(file).writerow(COLUMNS)
        file.seek(0)
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            sys.exit(f"{path}: other columns than this program writes; move it away first")
        return list(reader)


def measure_missing(
    path: Path, cells: list[str], threads: list[int], repeats: int, peer: str
) -> None:
    """Append what the CSV lacks for this commit of the scripts, in turns."""
    git = ["git", "--no-optional-locks", "-C", str(HERE.parent)]
    scripts = ["--", f"{LSTM}.py", f"{CATEGORICAL}.py"]
    questions = [*git, "log", "-1", "--format=%h", *scripts], [*git, "status", "--short", *scripts]
    told = [subprocess.run(q, capture_output=True, text=True).stdout.strip() for q in questions]
    same = {"commit": told[0] + "+" * bool(told[1])}
    same["machine"] = f"{os.cpu_count()} cores {platform.machine()}"
    same["versions"] = " ".join(f"{package} {version(package)}" for package in PACKAGES)
    rows, jobs = load(path), []
    key = ("threads", "repeat", "cell", "program", "commit")
    done = {tuple(row[k] for k in key) for row in rows}
    for number, repeat, cell in itertools.product(threads, range(repeats), cells):
        programs = ("ours", "sb3", "floor") if cell in GRID else ("ours",)
        programs += ("kept",) if cell.startswith("growth-num_envs") else ()
        programs += ("cleanrl",) if peer and cell.startswith("cheetah") else ()
        for program in ("pass",) if cell in PASSES else programs:
            if (str(number), str(repeat), cell, program, same["commit"]) not in done:
                jobs.append((number, repeat, cell, program))
    minutes = sum(ESTIMATE[job[-1]] for job in jobs) / 60
    print(f"{len(jobs)} measurements, about {minutes:.0f} minutes on idle cores", flush=True)
    for job in jobs:
        number, _, cell, program = job
        row = {**dict(zip(key, job)), **same, "load": os.getloadavg()[0]}
        row |= measure(program, cell, number, pick(rows, str(number), newest=False)[cell], peer)
        row = {k: f"{x:.6g}" if isinstance(x, float) else str(x) for k, x in row.items()}
        with path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)
        rows.append(row)
        print(*job, row["value"], flush=True)


# ------------------------------------------------------------------------------------------- report
def pick(rows: list[dict], threads: str, newest: bool = True) -> dict[str, dict[str, list[dict]]]:
    """Rows by cell and program, of one number of threads and each cell's newest commit."""
    rows = [row for row in rows if row["threads"] == threads]
    commit = {row["cell"]: row["commit"] for row in rows}
    picked = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not newest or row["commit"] == commit[row["cell"]]:
            picked[row["cell"]][row["program"]].append(row)
    return picked


def middle(rows: list[dict], column: str = "value", part: str | None = None) -> float:
    """Median over repeats; nan where there are none."""
    values = [json.loads(row[column])[part] if part else float(row[column]) for row in rows]
    return median(values) if values else math.nan


def table(head: str, lines: list[tuple]) -> list[str]:
    """Markdown, or nothing without lines."""
    rows = [head.split(" | "), ["---"] * len(head.split(" | ")), *lines]
    return [*(f"| {' | '.join(map(str, row))} |" for row in rows), ""] if lines else []


def compare(rows: dict[str, list[dict]], program: str) -> str:
    """Ratio of the median speeds, and the lowest and highest ratio of a repeat."""
    peers = {row["repeat"]: float(row["value"]) for row in rows[program]}
    ratios = [float(r["value"]) / peers[r["repeat"]] for r in rows["ours"] if r["repeat"] in peers]
    ratio = middle(rows["ours"]) / middle(rows[program])
    return f"{ratio:.1f} ({min(ratios):.1f}, {max(ratios):.1f})"


def grid_line(cell: str, rows: dict[str, list[dict]]) -> tuple:
    """Speeds, ratio with its range over repeats, floor and its parts, resets, memory."""
    flags = GRID[cell][1]
    speed, peer, floor = (middle(rows[program]) for program in ("ours", "sb3", "floor"))
    ratio = compare(rows, "sb3")
    parts = [middle(rows["floor"], "parts", part) for part in PARTS]
    spent = 1e3 * flags["num_envs"] * flags["num_steps"] / speed
    speeds = (f"{speed:,.0f}", f"{peer:,.0f}", ratio, f"{floor:,.0f}", f"{speed / floor:.0%}")
    times = (" + ".join(f"{ms:.3g}" for ms in parts), f"{spent:.3g}")
    keys = ("steps_per_reset", "peak_mb")
    pairs = [[f"{middle(rows[p], key):.0f}" for p in ("ours", "sb3")] for key in keys]
    name = f"{cell}: {flags['env_id']}, {flags['num_envs']} x {flags['num_steps']}"
    return (name, *speeds, *times, *(", ".join(pair) for pair in pairs), len(rows["ours"]))


def growth_lines(axis: str, picked: dict[str, dict[str, list[dict]]]) -> list[tuple]:
    """Exponents: log of time per iteration over log of size, since the last line and the first."""
    lines, x, y = [], [], []
    for size in AXES[axis]:
        flags, programs = GROWTH[f"growth-{axis}-{size}"][1], picked[f"growth-{axis}-{size}"]
        if rows := programs["ours"]:
            seconds = flags["num_envs"] * flags["num_steps"] / middle(rows)
            x, y = [*x, math.log(size)], [*y, math.log(seconds)]
            bases = (-2, 0) if len(x) > 1 else ()
            slopes = [f"{(y[-1] - y[i]) / (x[-1] - x[i]):.2f}" for i in bases] or ["", ""]
            line = (axis, size, f"{middle(rows):,.0f}", f"{seconds:.3f}", *slopes)
            line += (f"{middle(rows, 'peak_mb'):.0f}", len(rows))
            kept = programs["kept"]
            lines.append((*line, f"{middle(kept):,.0f}" if kept else ""))
    return lines


def report(path: Path) -> None:
    """speed.md and speed.png beside the CSV, from it alone."""
    rows, text = load(path), []
    everyone = sorted({row["threads"] for row in rows})
    for threads in everyone:
        picked = pick(rows, threads)
        shown = [row for programs in picked.values() for some in programs.values() for row in some]
        facts = [{row[key] for row in shown} for key in ("commit", "machine", "versions")]
        facts = "; ".join(", ".join(sorted(fact)) for fact in facts)
        text += [f"Torch threads: {threads}; commit, machine, versions: {facts}", ""]
        head = "cell | steps/s | sb3 | ratio (lowest, highest) | floor, steps/s | share of it | "
        head += f"ms of the floor: {' + '.join(PARTS)} | ms of ours | "
        head += "steps per reset, sb3 | peak MB, sb3 | repeats"
        lines = [grid_line(cell, picked[cell]) for cell in GRID if picked[cell]["ours"]]
        text += table(head, lines)
        head = "cell | steps/s | CleanRL | ratio (lowest, highest) | repeats"
        found = {cell: picked[cell] for cell in GRID if picked[cell]["cleanrl"]}
        both = {c: [f"{middle(r[p]):,.0f}" for p in ("ours", "cleanrl")] for c, r in found.items()}
        lines = [(c, *both[c], compare(r, "cleanrl"), len(r["ours"])) for c, r in found.items()]
        text += table(head, lines)
        head = "axis | size | steps/s | seconds per iteration | exponent since the line above | "
        head += "since the first | peak MB | repeats | memory kept: steps/s"
        text += table(head, [line for axis in AXES for line in growth_lines(axis, picked)])
        head = "LSTM pass: columns | `unroll_lstm`, episodes of 60: ms | step loop | "
        head += "`unroll_lstm`, no end: ms | step loop | repeats"
        keys = ("unroll resets", "loop resets", "unroll none", "loop none")
        found = {c: picked[c]["pass"] for c in PASSES if picked[c]["pass"]}
        times = {c: [f"{middle(r, 'parts', key):.1f}" for key in keys] for c, r in found.items()}
        text += table(head, [(c.split("-")[1], *times[c], len(r)) for c, r in found.items()])
    path.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))
    if everyone:
        draw(path.with_suffix(".png"), pick(rows, everyone[0]))


def draw(path: Path, picked: dict[str, dict[str, list[dict]]]) -> None:
    """Steps per second: the grid on the left, growth on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (grid, lines) = plt.subplots(1, 2, figsize=(10, 4.2), constrained_layout=True)
    cells = [cell for cell in GRID if picked[cell]["ours"]]
    for program, colour in (("ours", "C0"), ("sb3", "C3"), ("floor", "0.6")):
        speeds = [middle(picked[cell][program]) for cell in cells]
        if cells:
            grid.semilogx(speeds, range(len(cells)), "o", color=colour, label=program)
    grid.set_yticks(range(len(cells)), cells)
    grid.invert_yaxis()
    grid.grid(axis="y", color="0.9")
    grid.tick_params(axis="x", which="minor", labelbottom=False)
    grid.set(xlabel="steps per second")
    for axis, sizes in AXES.items():
        found = {size: picked[f"growth-{axis}-{size}"]["ours"] for size in sizes}
        points = [(size, middle(rows)) for size, rows in found.items() if rows]
        if points:
            lines.loglog(*zip(*points), "o-", label=axis)
    lines.set(xlabel="size", ylabel="steps per second")
    for axes in (grid, lines):
        if axes.has_data():
            axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", action="store_true", help="beside sb3 and the floor (default)")
    parser.add_argument("--growth", action="store_true", help="speed and memory over sizes")
    parser.add_argument("--lstm", action="store_true", help="one LSTM pass beside a step loop")
    parser.add_argument("--report", action="store_true", help="only rebuild tables and figure")
    parser.add_argument("--only", nargs="*", default=["*"], help="cells, by name or pattern")
    parser.add_argument("--repeats", type=int, default=5, help="of every cell")
    parser.add_argument("--threads", nargs="*", type=int, default=[1], help="of torch, in turn")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--cleanrl", default="", help="path of its ppo_continuous_action.py")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*json.loads(args.child))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        parts = ((args.grid, GRID), (args.growth, GROWTH), (args.lstm, PASSES))
        chosen = [part for wanted, part in parts if wanted] or [GRID]
        cells = [c for part in chosen for c in part if any(fnmatch(c, o) for o in args.only)]
        measure_missing(args.out / "speed.csv", cells, args.threads, args.repeats, args.cleanrl)
    report(args.out / "speed.csv")


if __name__ == "__main__":
    main()
