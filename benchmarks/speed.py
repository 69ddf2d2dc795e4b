"""Speed and memory beside Stable-Baselines3, and beside what no implementation can do without.

    python benchmarks/speed.py                                         # the grid, one torch thread
    python benchmarks/speed.py --grid --growth --lstm --threads 1 2    # everything
    python benchmarks/speed.py --report                                # rebuild from the CSV alone
    python benchmarks/speed.py --only "cheetah*" --cleanrl FILE        # beside CleanRL, too
    python benchmarks/speed.py --only recurrent "cheetah*" --repeats 1 --out FOLDER

Every measurement is a process of its own. Speed is wall time outside of it at two lengths, one
rollout and as many more as take some seconds: difference of steps over difference of time, so that
start-up does not count. Programs and cells take turns, repeat by repeat; tables have medians. The
peers, at equal work with one scalar critic, are sb3-contrib's RecurrentPPO (an LSTM each for actor
and critic), SB3's PPO and, given the path of ppo_continuous_action.py in a checkout of it (it is in
no registry), CleanRL. The floor of a cell is the sum of what its rollouts must do: environments
stepped with random actions, in CartPole with resets as often as in the run; the actor's forward
pass for every step, the critics' once; forward and backward of bare layers for every minibatch, one
after the other, with as many torch threads as ours. Losses, optimizer, advantages and metrics are
not in it. The share of the floor is that of ours on one core where ours trains actor and critics in
two threads (LSTMs and images, but for versions in ONE_THREAD), and it is left out where one core
was not measured. Peak memory is the largest resident set of the process, imports included. "kept"
is ours with glibc told to keep freed memory (KEEP below), "compiled" the feed-forward script with
--compile: a run of two rollouts with an empty cache of compiled code, whose seconds beyond those of
a run that compiles nothing are the time to compile, then speed as above. The peers run with one
torch thread and with two ("sb3-2threads"), and the faster one of both counts. "ours-1core" and
"sb3-1core" may use one core alone (taskset). The last table has no rows of its own: what a user
waits for, from results/runs.csv.

Raw rows are appended to results/speed.csv; the next call measures what is missing for the scripts'
last commit ("+": changed since then), and tables show each cell's newest commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import common
import gymnasium as gym
import numpy as np
from common import CATEGORICAL, HERE, LSTM, RESULTS, Row, Table
from gymnasium.envs.classic_control import CartPoleEnv

SECONDS = 4  # between the two lengths of a run, about
# seconds of a measurement on idle cores
ESTIMATE = {
    "ours": 11,
    "kept": 11,
    "compiled": 60,
    "sb3": 12,
    "sb3-2threads": 12,
    "ours-1core": 11,
    "sb3-1core": 12,
    "cleanrl": 15,
    "floor": 6,
    "pass": 6,
}
KEEP = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib")
COLUMNS = (  # value: steps per second, or milliseconds for pass-*; parts: milliseconds
    "cell program threads repeat value short_steps short_s long_steps long_s steps_per_reset "
    "peak_mb parts load commit machine versions"
).split()
# What a user waits for: rows of runs.csv by script and variant.
WAITING = {
    "CartPoleNoVel-v1": [(LSTM, "default"), ("sb3_contrib_recurrent_ppo", "zoo")],
    "HalfCheetah-v5": [(CATEGORICAL, "default"), ("stable_baselines3_ppo", "default")],
}
# versions from before actor and critics trained in two threads
ONE_THREAD = {"5dd7f7d", "6bb163d", "b3e6820", "fcee966", "ff5f4c3"}
PARTS = ("environments", "acting", "values", "update")  # of the floor
# cells on one core, too
ONE_CORE = ("recurrent", "cartpole", "cheetah-1x2048", "minatar")
# cells with --compile, too
COMPILED = ("cartpole", "cheetah-1x2048", "cheetah-8x256", "minatar")


# ----------------------------------------------------------------------------------------- the grid
class Work(NamedTuple):
    """What a cell measures."""

    script: str
    flags: dict[str, Any]

    @property
    def samples(self) -> int:
        """Of one rollout."""
        return self.flags["num_envs"] * self.flags["num_steps"]


SMALL = {"num_envs": 8, "num_steps": 128, "update_epochs": 4, "num_minibatches": 4}
REFERENCE = {**SMALL, "env_id": "CartPoleNoVel-v1", "lstm_hidden_size": 128}
CUT = {**REFERENCE, "env_id": "CartPoleCut60-v0", "masked_obs": (1, 3)}  # episodes of 60 steps
CHEETAH = {"env_id": "HalfCheetah-v5", "update_epochs": 10, "num_minibatches": 32}
MINATAR = {**SMALL, "env_id": "envs:MinAtar/Breakout-v1", "num_envs": 16, "num_minibatches": 16}
MINATAR["hidden_size"] = 128
PONG = {**SMALL, "env_id": "ale_py:ALE/Pong-v5", "hidden_size": 512}
GRID = {
    "recurrent": Work(LSTM, REFERENCE),
    "recurrent-lstm64": Work(LSTM, {**REFERENCE, "lstm_hidden_size": 64}),
    "recurrent-lstm256": Work(LSTM, {**REFERENCE, "lstm_hidden_size": 256}),
    "recurrent-seq32": Work(LSTM, {**REFERENCE, "seq_len": 32}),  # the same, shorter sequences
    "recurrent-envs32": Work(LSTM, {**REFERENCE, "num_envs": 32}),
    "recurrent-episodes20": Work(LSTM, {**CUT, "env_id": "CartPoleCut20-v0"}),
    "recurrent-episodes60": Work(LSTM, CUT),
    "recurrent-episodes500": Work(LSTM, {**CUT, "env_id": "CartPoleCut500-v0"}),
    "cartpole": Work(CATEGORICAL, {**SMALL, "env_id": "CartPole-v1"}),
    "cheetah-1x2048": Work(CATEGORICAL, {**CHEETAH, "num_envs": 1, "num_steps": 2048}),
    "cheetah-8x256": Work(CATEGORICAL, {**CHEETAH, "num_envs": 8, "num_steps": 256}),
    "minatar": Work(CATEGORICAL, MINATAR),
    "pong": Work(CATEGORICAL, PONG),
    "pong-recurrent": Work(LSTM, {**PONG, "lstm_hidden_size": 128}),
}
AXES = {  # one size moves, the others are those of the reference
    "num_envs": (1, 4, 16, 64, 256),  # in sequences of 32 steps: one environment has 4 minibatches
    "num_steps": (32, 128, 512, 2048),
    "lstm_hidden_size": (32, 64, 128, 256, 512),
    "num_quantiles": (8, 32, 128, 256),
}
GROWTH = {
    f"growth-{axis}-{size}": Work(LSTM, {**CUT, "seq_len": 32 * (axis == "num_envs"), axis: size})
    for axis, sizes in AXES.items()
    for size in sizes
}
PASSES = {f"pass-{columns}": Work(LSTM, {"columns": columns}) for columns in (2, 8, 32)}
CELLS = {**GRID, **GROWTH, **PASSES}


class CartPoleCut(CartPoleEnv):
    """CartPole that never falls: a time limit ends each episode after `length` steps.
    The first one is cut at random, so that environments do not end together."""

    def __init__(self, length: int, **options) -> None:
        super().__init__(**options)
        self.x_threshold = math.inf
        self.theta_threshold_radians = math.inf
        self.length = length
        self.left = None

    def reset(self, **options) -> tuple[np.ndarray, dict]:
        answer = super().reset(**options)
        first = self.left is None
        self.left = int(self.np_random.integers(1, self.length + 1)) if first else self.length
        return answer

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.left -= 1
        return *super().step(action)[:3], self.left <= 0, {}


# --------------------------------------------------------------------- what runs in child processes
class Job(NamedTuple):
    """One process: a program on the work of a cell."""

    program: str
    cell: str
    threads: int
    steps: int = 0  # of a run; timings need none
    task: str = ""  # of the floor, instead of the cell's
    peer: str = ""  # CleanRL's file
    cache: str = ""  # folder of compiled code


def ours(work: Work, steps: int, compiled: bool) -> None:
    """One of this repository's scripts: twin critics. The peers do not evaluate at the end.

    They do not save environments either. With such a save, another process reads environments back
    while the run starts. A long run hides that behind its training and a short one cannot, so their
    difference would be too small.
    """
    import torch

    script = common.load_script(work.script)
    script.Run.evaluate = lambda run: None
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as top:
        options = {"torch_threads": threads, "total_timesteps": steps, "run_dir": top}
        options["save_envs"] = "never"
        if compiled:
            options["compile"] = True
        script.train(script.Args(**work.flags, **options))


def sb3(work: Work, steps: int) -> None:
    """The peer; `batch_size` counts samples. Images it gets as our scripts do, with an encoder each
    for actor and critic: its own of Mnih et al. 2015, or for MinAtar that of the scripts."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    recurrent = work.script == LSTM
    flags = work.flags
    atari = "ALE/" in flags["env_id"]
    minatar = "MinAtar/" in flags["env_id"]
    if atari or minatar:  # elsewhere its imports would count as the peer's memory
        script = common.load_script(work.script)
        args = script.Args(**flags)
    keep = np.array([1, 0, 1, 0], np.float32)

    def make() -> gym.Env:
        if atari or minatar:
            return script.make_env(args)
        env = gym.make(flags["env_id"].replace("NoVel", ""), disable_env_checker=True)
        if not recurrent:
            return env
        hide = gym.wrappers.TransformObservation
        return hide(env, lambda x: x * keep, env.observation_space)

    options = {
        "n_steps": flags["num_steps"],
        "n_epochs": flags["update_epochs"],
        "batch_size": work.samples // flags["num_minibatches"],
        "device": "cpu",
        "seed": 1,
    }
    envs = make_vec_env(make, flags["num_envs"])
    kind = "Cnn" if atari else "Mlp"
    network = {"share_features_extractor": False} if atari else {}
    if minatar:
        network = common.peer_network(script, args)
    if recurrent:
        network |= {"net_arch": [64], "enable_critic_lstm": True}
        network["lstm_hidden_size"] = flags["lstm_hidden_size"]
        model = RecurrentPPO(f"{kind}LstmPolicy", envs, policy_kwargs=network, **options)
    else:
        model = PPO(f"{kind}Policy", envs, policy_kwargs=network, **options)
    model.learn(steps)


def cleanrl(work: Work, steps: int, path: str) -> None:
    """CleanRL's script as it is; gymnasium 1 asks its wrapper for the space of observations."""
    wrapper = gym.wrappers.TransformObservation
    gym.wrappers.TransformObservation = lambda env, f: wrapper(env, f, env.observation_space)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in work.flags.items()]
    sys.argv = [path, *words, f"--total-timesteps={steps}", "--no-cuda"]
    runpy.run_path(path, run_name="__main__")


def milliseconds(call: Callable, seconds: float = 0.8) -> float:
    """Mean time of a call."""
    for _ in range(3):
        call()
    count = 0
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        call()
        count += 1
    return 1e3 * spent / count


def floor(work: Work) -> dict[str, float]:
    """Milliseconds of what one rollout and the training on it must do."""
    import torch
    from torch import nn

    recurrent = work.script == LSTM
    script = common.load_script(work.script)
    args = script.Args(**work.flags)
    T = args.num_steps
    N = args.num_envs
    width = args.hidden_size
    size = args.lstm_hidden_size if recurrent else width
    num_values = args.num_quantiles if recurrent else args.num_atoms

    envs = script.make_envs(args)
    envs.reset(seed=1)
    actions = itertools.cycle([envs.action_space.sample() for _ in range(1000)])
    space = envs.single_observation_space
    num_actions = gym.spaces.flatdim(envs.single_action_space)

    def body() -> nn.Sequential:
        last = [nn.LSTM(width, size)] if recurrent else []
        return nn.Sequential(script.make_encoder(space, args), *last)

    def head() -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, num_values))

    actor = body()
    critic = body()
    policy = nn.Linear(size, num_actions)
    heads = [head() for _ in range(args.num_critics)]
    parameters = [*nn.ModuleList((actor, critic, policy, *heads)).parameters()]

    def unroll(body: nn.Sequential, heads: list[nn.Module], obs: torch.Tensor) -> list:
        features = body(obs)[0] if recurrent else body(obs)
        return [head(features) for head in heads]

    def draw(*rows: int) -> torch.Tensor:
        return torch.randn(*rows, *space.shape)

    obs = draw(N).numpy()
    rollout = draw(T, N)
    state = np.zeros((2, N, size), np.float32)
    length = (args.seq_len or T) if recurrent else 1
    columns = T * N // length // args.num_minibatches
    rows = (length, columns) if recurrent else (columns,)
    minibatch = draw(*rows)

    def update() -> None:
        outputs = unroll(actor, [policy], minibatch) + unroll(critic, heads, minibatch)
        torch.autograd.grad(outputs, parameters, [torch.ones_like(x) for x in outputs])

    encoder = script.in_numpy(actor[0])  # vectors in NumPy, images in torch, as the scripts act
    step = script.lstm_in_numpy(actor[1]) if recurrent else None
    last = script.in_numpy(policy)

    def act() -> None:
        features = encoder(obs)
        if recurrent:
            features, _ = step(features, state)
        last(features)

    @torch.inference_mode()
    def values() -> None:
        unroll(critic, heads, rollout)

    return {
        "environments": T * milliseconds(lambda: envs.step(next(actions))),
        "acting": T * milliseconds(act),
        "values": milliseconds(values),
        "update": args.update_epochs * args.num_minibatches * milliseconds(update),
    }


def lstm_pass(work: Work) -> dict[str, float]:
    """Milliseconds forward and backward: 128 steps, LSTM 128, input 64, with and without resets."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    script = common.load_script(work.script)
    columns = work.flags["columns"]
    lstm = nn.LSTM(64, 128)
    cell = nn.LSTMCell(64, 128)
    inputs = torch.randn(128, columns, 64, requires_grad=True)
    ones = torch.ones(128, columns, 128)
    zero = torch.zeros(1, columns, 128)

    def unroll(start: torch.Tensor) -> None:
        outputs, _ = script.unroll_lstm(lstm, inputs, (zero, zero), start)
        torch.autograd.grad(outputs, [inputs, *lstm.parameters()], ones)

    def loop(start: torch.Tensor) -> None:
        h = c = zero[0]
        outputs = []
        for x, keep in zip(inputs, ~start[..., None]):
            h, c = cell(x, (h * keep, c * keep))
            outputs.append(h)
        torch.autograd.grad(torch.stack(outputs), [inputs, *cell.parameters()], ones)

    answer = {}
    for resets, rate in (("resets", 1 / 60), ("none", 0)):  # 16 draws of them take turns
        draws = itertools.cycle(torch.rand(16, 128, columns) < rate)
        answer[f"unroll {resets}"] = milliseconds(lambda d=draws: unroll(next(d)))
        answer[f"loop {resets}"] = milliseconds(lambda d=draws: loop(next(d)))
    return answer


def register_cut(env_id: str) -> None:
    """CartPoleCut<length>-v0."""
    if "Cut" in env_id:
        length = int(env_id.removeprefix("CartPoleCut").removesuffix("-v0"))
        gym.register(env_id, CartPoleCut, kwargs={"length": length})


def child(job: Job) -> None:
    """One run or one timing; its result is the last line of output."""
    import torch

    torch.set_num_threads(job.threads)
    work = CELLS[job.cell]
    if job.task:
        work = Work(work.script, {**work.flags, "env_id": job.task})
    register_cut(work.flags.get("env_id", ""))
    if job.program in ("floor", "pass"):
        timing = floor if job.program == "floor" else lstm_pass
        print(json.dumps(timing(work)))
        return

    resets = []
    reset = CartPoleEnv.reset
    CartPoleEnv.reset = lambda self, **options: resets.append(1) or reset(self, **options)
    began = time.perf_counter()
    if job.program == "cleanrl":
        cleanrl(work, job.steps, job.peer)
    elif job.program.startswith("sb3"):
        sb3(work, job.steps)
    else:
        ours(work, job.steps, compiled=job.program == "compiled")
    inside = time.perf_counter() - began

    steps_per_reset = job.steps / len(resets) if resets else math.nan  # of CartPole alone
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"inside": inside, "steps_per_reset": steps_per_reset, "peak_mb": peak}
    print(json.dumps(row))


# -------------------------------------------------------------------------------------- measurement
def start(job: Job) -> dict:
    """Run `child` in a process; its result, with the wall time `outside` of the process."""
    if job.program.endswith("-2threads"):
        job = job._replace(threads=2)
    command = [sys.executable, str(HERE / Path(__file__).name), "--child", json.dumps(job)]
    if job.program.endswith("-1core"):
        core = min(os.sched_getaffinity(0))
        command = ["taskset", "--cpu-list", str(core), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    if job.program == "kept":
        environment |= KEEP
    if job.cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = job.cache
    options = {"env": environment, "text": True}
    options["cwd"] = tempfile.gettempdir()  # MuJoCo leaves a log where it runs
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, **options)
    seconds = time.perf_counter() - began
    if done.returncode:
        told = done.stderr[-3000:]
        sys.exit(f"{job.cell}, {job.program}: exit code {done.returncode}\n{told}")
    return {**json.loads(done.stdout.splitlines()[-1]), "outside": seconds}


def measure_timing(job: Job, steps_per_reset: float) -> dict[str, Any]:
    """A row's `value` and `parts`: milliseconds of the floor or of an LSTM pass."""
    work = CELLS[job.cell]
    if job.program == "floor" and "CartPole" in work.flags["env_id"]:
        job = job._replace(task=f"CartPoleCut{steps_per_reset:.0f}-v0")  # resets as in the run
    parts = start(job)
    del parts["outside"]
    row = {"parts": json.dumps({part: round(ms, 3) for part, ms in parts.items()})}
    if job.program == "pass":
        return {**row, "value": parts["unroll resets"]}
    return {**row, "value": 1e3 * work.samples / sum(parts.values())}


def measure_speed(
    job: Job, guess: float, rollouts: int = 1, seconds: float = SECONDS
) -> dict[str, Any]:
    """A row's `value` and what it comes from; `guess`: of the steps per second, 0 for none.
    The short run has so many rollouts, the long one takes so many seconds more, about."""
    samples = CELLS[job.cell].samples
    least = rollouts * samples
    speed = guess
    spent = 0.0
    while spent < seconds / 2:  # again, longer, where the guess of the speed was too low
        more = samples * max(1, round(seconds * speed / samples))
        short = start(job._replace(steps=least))
        long = start(job._replace(steps=least + more))
        spent = long["outside"] - short["outside"]
        speed = more / max(long["inside"] - short["inside"], seconds / 20)
    return {
        "value": more / spent,
        "short_steps": least,
        "short_s": short["outside"],
        "long_steps": least + more,
        "long_s": long["outside"],
        "steps_per_reset": long["steps_per_reset"],
        "peak_mb": long["peak_mb"],
    }


def measure_compiled(job: Job, guess: float) -> dict[str, Any]:
    """As `measure_speed`, but longer, since starting takes longer: the second rollout, too, where a
    schedule changes a coefficient. `parts`: seconds of the `first` such run, without a cache, and
    of the same `eager`."""
    with tempfile.TemporaryDirectory() as cache:
        job = job._replace(cache=cache)
        few = job._replace(steps=2 * CELLS[job.cell].samples)
        parts = {"first": start(few), "eager": start(few._replace(program="ours"))}
        row = measure_speed(job, guess, rollouts=2, seconds=2 * SECONDS)
    parts = {name: round(run["outside"], 3) for name, run in parts.items()}
    return {**row, "parts": json.dumps(parts)}


@dataclass(frozen=True)
class Origin:
    """Where a row comes from."""

    commit: str  # of the scripts; "+": changed since then
    machine: str
    versions: str


def version_of(package: str) -> str:
    """What is installed of a package. Not every cell needs all of them."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def origin() -> Origin:
    """The scripts' last commit, the class of the machine, the packages."""
    versions = " ".join(f"{package} {version_of(package)}" for package in PACKAGES)
    return Origin(**common.origin(), versions=versions)


class Measurement(NamedTuple):
    """What one row of the CSV measures, but for the commit."""

    threads: int
    repeat: int
    cell: str
    program: str


def programs_of(cell: str, peer: str, threads: int) -> list[str]:
    """What is measured of a cell, in turns. With one thread the peer also has two, and one core."""
    if cell in PASSES:
        return ["pass"]
    programs = ["ours", "sb3", "sb3-2threads", "floor"] if cell in GRID else ["ours"]
    if threads > 1 and cell in GRID:
        programs.remove("sb3-2threads")
    if cell in ONE_CORE and threads == 1:
        programs += ["ours-1core", "sb3-1core"]
    if cell in COMPILED:
        programs.insert(1, "compiled")
    if cell.startswith("growth-num_envs"):
        programs.append("kept")
    if peer and cell.startswith("cheetah"):
        programs.append("cleanrl")
    return programs


def missing(
    rows: list[Row], commit: str, cells: list[str], threads: list[int], repeats: int, peer: str
) -> list[Measurement]:
    """What the CSV lacks for this commit of the scripts. Changed scripts are measured anew."""
    columns = (*Measurement._fields, "commit")
    known = {
        tuple(row[column] for column in columns) for row in rows if not row["commit"].endswith("+")
    }
    every = [
        Measurement(number, repeat, cell, program)
        for number, repeat, cell in itertools.product(threads, range(repeats), cells)
        for program in programs_of(cell, peer, number)
    ]
    return [one for one in every if (*map(str, one), commit) not in known]


def measure(one: Measurement, rows: list[Row], peer: str) -> dict[str, Any]:
    """What is new in a row of the CSV; `rows`: those so far, which tell how long to run."""
    job = Job(one.program, one.cell, one.threads, peer=peer)
    earlier = pick(rows, str(one.threads), newest=False)[one.cell]
    if one.program in ("floor", "pass"):
        runs = earlier["ours"]
        return measure_timing(job, float(runs[-1]["steps_per_reset"]) if runs else math.nan)
    own = earlier[one.program] or earlier["ours"]
    timing = measure_compiled if one.program == "compiled" else measure_speed
    return timing(job, middle(own) if own else 0)


def text(x: Any) -> str:
    """As the CSV has it."""
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def measure_missing(table: Table, todo: list[Measurement], same: Origin, peer: str) -> None:
    """Append the rows of these measurements."""
    rows = load(table)
    minutes = sum(ESTIMATE[one.program] for one in todo) / 60
    print(f"{len(todo)} measurements, about {minutes:.0f} minutes on idle cores", flush=True)
    for one in todo:
        row = {**one._asdict(), **vars(same), "load": os.getloadavg()[0]}
        row |= measure(one, rows, peer)
        row = {column: text(x) for column, x in row.items()}
        table.append(row)
        rows.append(row)
        print(*one, row["value"], flush=True)


def load(table: Table) -> list[Row]:
    """The rows measured so far, as text."""
    rows = table.rows()
    if rows and [*rows[0]] != COLUMNS:
        sys.exit(f"{table.path}: other columns than this program writes; move it away first")
    return rows


# ------------------------------------------------------------------------------------------- report
Programs = dict[str, list[Row]]  # rows of a cell by program


ENOUGH = 3  # repeats of both programs with which a newer version replaces an older one


def pick(rows: list[Row], threads: str, newest: bool = True) -> dict[str, Programs]:
    """Rows by cell and program, of one number of threads and each cell's newest commit. A commit
    with fewer than ENOUGH repeats of ours or of the peer counts where there are no others, and so
    does an edited tree, with "+"."""
    rows = [row for row in rows if row["threads"] == threads]
    edited = {row["cell"]: row["commit"] for row in rows}
    clean = [row for row in rows if not row["commit"].endswith("+")]
    begun = {row["cell"]: row["commit"] for row in clean}
    made = Counter((row["cell"], row["commit"], row["program"]) for row in clean)
    known = {(cell, program) for cell, _, program in made if program in ("ours", "sb3")}

    def is_whole(cell: str, commit: str) -> bool:
        programs = [program for name, program in known if name == cell]
        return all(made[cell, commit, program] >= ENOUGH for program in programs)

    commits = dict.fromkeys((row["cell"], row["commit"]) for row in clean)
    whole = {cell: commit for cell, commit in commits if is_whole(cell, commit)}
    commit = edited | begun | whole
    picked = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not newest or row["commit"] == commit[row["cell"]]:
            picked[row["cell"]][row["program"]].append(row)
    return picked


def middle(rows: list[Row], column: str = "value", part: str | None = None) -> float:
    """Median over repeats; nan where there are none."""
    if part:
        values = [json.loads(row[column])[part] for row in rows]
    else:
        values = [float(row[column]) for row in rows]
    return median(values) if values else math.nan


def commits(rows: list[Row]) -> str:
    """Of the scripts that were measured."""
    return " ".join(sorted({row["commit"] for row in rows}))


def markdown(names: str, lines: list[list]) -> list[str]:
    """Markdown, or nothing without lines."""
    if not lines:
        return []
    return [*common.markdown_head(names, rule=" --- "), *map(common.markdown_row, lines), ""]


class Spread(NamedTuple):
    """It is a figure over the repeats of a measurement, and nan where there are none."""

    middle: float
    low: float
    high: float


def speeds(rows: list[Row]) -> Spread:
    """Return the median, lowest and highest number of steps per second."""
    values = [float(row["value"]) for row in rows] or [math.nan]
    return Spread(median(values), min(values), max(values))


def pair_ratios(rows: Programs, program: str, mine: str = "ours") -> list[float]:
    """Return the ratio of each repeat in which both programs were measured."""
    peers = {row["repeat"]: float(row["value"]) for row in rows[program]}
    pairs = [row for row in rows[mine] if row["repeat"] in peers]
    return [float(row["value"]) / peers[row["repeat"]] for row in pairs]


def ratio(rows: Programs, program: str, mine: str = "ours") -> Spread:
    """Return the ratio of the median speeds, and the lowest and highest ratio of a repeat."""
    ratios = pair_ratios(rows, program, mine) or [math.nan]
    return Spread(middle(rows[mine]) / middle(rows[program]), min(ratios), max(ratios))


def compare(rows: Programs, program: str, mine: str = "ours") -> str:
    """Tell the ratio in words."""
    told = ratio(rows, program, mine)
    return f"{told.middle:.1f} ({told.low:.1f}, {told.high:.1f})"


def peer(rows: Programs) -> str:
    """The peer's program that is the faster one: with one torch thread or with two."""
    return max(
        "sb3", "sb3-2threads", key=lambda program: middle(rows[program]) if rows[program] else 0
    )


def trains_in_two_threads(cell: str, rows: list[Row]) -> bool:
    """Tell whether the measured versions train actor and critics of the cell at once."""
    work = GRID[cell]
    images = work.flags["env_id"].startswith(("envs:MinAtar/", "ale_py:"))
    newer = any(row["commit"] not in ONE_THREAD and row["threads"] == "1" for row in rows)
    return newer and (work.script == LSTM or images)


def share_of_floor(cell: str, rows: Programs) -> str:
    """Tell the speed of one thread over the floor's; "-" where one thread was not measured."""
    two = trains_in_two_threads(cell, rows["ours"])
    mine = rows["ours-1core"] if two else rows["ours"]
    if not mine:
        return "-"
    told = f"{middle(mine) / middle(rows['floor']):.0%}"
    return f"{told} on one core" if two else told


def grid_line(cell: str, rows: Programs) -> list:
    """Speeds, ratio with its range over repeats, floor and its parts, resets, memory."""
    work = GRID[cell]
    flags = work.flags
    speed = middle(rows["ours"])
    lowest = middle(rows["floor"])

    def both(column: str) -> str:
        found = [middle(rows[program], column) for program in ("ours", "sb3")]
        return ", ".join("-" if math.isnan(x) else f"{x:.0f}" for x in found)

    counts_resets = "CartPole" in flags["env_id"]  # of others older rows have a made-up number
    parts = [middle(rows["floor"], "parts", part) for part in PARTS]
    return [
        f"{cell}: {flags['env_id']}, {flags['num_envs']} x {flags['num_steps']}",
        f"{speed:,.0f}",
        f"{middle(rows[peer(rows)]):,.0f}",
        compare(rows, peer(rows)),
        f"{lowest:,.0f}",
        share_of_floor(cell, rows),
        " + ".join(f"{ms:.3g}" for ms in parts),
        f"{1e3 * work.samples / speed:.3g}",
        both("steps_per_reset") if counts_resets else "-, -",
        both("peak_mb"),
        len(pair_ratios(rows, peer(rows))),
        commits(rows["ours"]),
    ]


def compiled_line(cell: str, rows: Programs) -> list:
    """Speeds, ratios, seconds to compile without a cache and with one."""
    compiled = rows["compiled"]
    usual = middle(compiled, "parts", "eager")
    return [
        cell,
        f"{middle(compiled):,.0f}",
        compare(rows, peer(rows), "compiled"),
        compare(rows, "ours", "compiled"),
        f"{middle(compiled) / middle(rows['floor']):.0%}",
        f"{middle(compiled, 'parts', 'first') - usual:.0f}",
        f"{middle(compiled, 'short_s') - usual:.0f}",
        f"{middle(compiled, 'peak_mb'):.0f}",
        len(pair_ratios(rows, peer(rows), "compiled")),
        commits(compiled),
    ]


def one_core_line(cell: str, rows: Programs) -> list:
    """Speeds on one core, their ratio, and what the second core gains."""
    return [
        cell,
        f"{middle(rows['ours-1core']):,.0f}",
        f"{middle(rows['sb3-1core']):,.0f}",
        compare(rows, "sb3-1core", "ours-1core"),
        compare(rows, "ours-1core"),
        compare(rows, "sb3-1core", peer(rows)),
        len(pair_ratios(rows, "sb3-1core", "ours-1core")),
        commits(rows["ours-1core"]),
    ]


def waiting_lines() -> list[list]:
    """Steps and seconds of the median run to a return, of ours and of the peer.

    Runs that were made anew do not count: the machine was slower then, and the peer did not run.
    """
    rows = Table(RESULTS / "runs.csv", ()).rows()
    rows = [row for row in rows if int(row["seed"]) < common.RENEWED]
    lines = []
    for task, who in WAITING.items():
        for script, variant in who:
            found = [
                row
                for row in rows
                if (row["task"], row["script"], row["variant"]) == (task, script, variant)
            ]
            if not found:
                continue
            steps = [float(row["steps_to_threshold"]) for row in found]
            per_step = [float(row["seconds"]) / float(row["steps"]) for row in found]
            seconds = [n * second for n, second in zip(steps, per_step, strict=True)]
            reached = sum(math.isfinite(n) for n in steps)
            middles = [
                "never" if math.isinf(median(x)) else f"{median(x):,.0f}" for x in (steps, seconds)
            ]
            commit = " ".join(sorted({row["commit"] for row in found}))
            lines.append(
                [task, f"{script}, {variant}", *middles, f"{reached} of {len(found)}", commit]
            )
    return lines


def cleanrl_line(cell: str, rows: Programs) -> list:
    """Speeds and their ratio."""
    speeds = [f"{middle(rows[program]):,.0f}" for program in ("ours", "cleanrl")]
    ratio = compare(rows, "cleanrl")
    repeats = len(pair_ratios(rows, "cleanrl"))
    return [cell, *speeds, ratio, repeats, commits(rows["ours"])]


class Size(NamedTuple):
    """One size on an axis of growth."""

    size: int
    seconds: float  # of an iteration


def exponent(one: Size, two: Size) -> str:
    """Log of time per iteration over log of size."""
    slope = math.log(two.seconds / one.seconds) / math.log(two.size / one.size)
    return f"{slope:.2f}"


def growth_lines(axis: str, picked: dict[str, Programs]) -> list[list]:
    """Exponents since the last line and since the first."""
    lines = []
    sizes: list[Size] = []
    for size in AXES[axis]:
        cell = f"growth-{axis}-{size}"
        rows = picked[cell]["ours"]
        if not rows:
            continue
        now = Size(size, GROWTH[cell].samples / middle(rows))
        kept = picked[cell]["kept"]
        lines.append(
            [
                axis,
                size,
                f"{middle(rows):,.0f}",
                f"{now.seconds:.3f}",
                exponent(sizes[-1], now) if sizes else "",
                exponent(sizes[0], now) if sizes else "",
                f"{middle(rows, 'peak_mb'):.0f}",
                len(rows),
                f"{middle(kept):,.0f}" if kept else "",
                commits(rows),
            ]
        )
        sizes.append(now)
    return lines


def pass_line(cell: str, rows: list[Row]) -> list:
    """Milliseconds of one LSTM pass, ours and step by step."""
    parts = ("unroll resets", "loop resets", "unroll none", "loop none")
    times = [f"{middle(rows, 'parts', part):.1f}" for part in parts]
    return [cell.split("-")[1], *times, len(rows), commits(rows)]


def origins(picked: dict[str, Programs]) -> str:
    """Commits, machines and versions of the rows that are shown."""
    shown = [row for programs in picked.values() for rows in programs.values() for row in rows]
    return common.origins(shown, (*common.ORIGIN, "versions"))


GRID_HEAD = (
    "cell | steps/s | sb3 | ratio (lowest, highest) | floor, steps/s | share of it "
    f"| ms of the floor: {' + '.join(PARTS)} | ms of ours "
    "| steps per reset: ours, sb3 | peak MB: ours, sb3 | repeats | commit"
)
COMPILED_HEAD = (
    "cell, with `--compile` | steps/s | ratio to sb3 (lowest, highest) | to ours without it "
    "| share of the floor | seconds to compile | with a cache | peak MB | repeats | commit"
)
ONE_CORE_HEAD = (
    "cell, on one core | steps/s | sb3 | ratio (lowest, highest) | ours on two cores to one "
    "| sb3 on two to one | repeats | commit"
)
WAITING_HEAD = (
    "task | program, variant | steps, median | seconds, median | seeds that get there | commit"
)
CLEANRL_HEAD = "cell | steps/s | CleanRL | ratio (lowest, highest) | repeats | commit"
GROWTH_HEAD = (
    "axis | size | steps/s | seconds per iteration | exponent since the line above "
    "| since the first | peak MB | repeats | memory kept: steps/s | commit"
)
PASS_HEAD = (
    "LSTM pass: columns | `unroll_lstm`, episodes of 60: ms | step loop "
    "| `unroll_lstm`, no end: ms | step loop | repeats | commit"
)


HEAD = """\
Speeds are environment steps in a second of training, medians over the repeats. In a repeat the
programs run one after another. A ratio is that of the medians, and beside it stand the lowest and
the highest ratio of a repeat. The columns of the first table:

* Cell: the task, then environments x steps of a rollout.
* Sb3: sb3-contrib's RecurrentPPO where the cell is recurrent, else Stable-Baselines3's PPO.
* Floor: the sum of what every program must do. It steps the environments, and it runs bare layers
  of the same sizes forward and backward, with no loss, no optimizer and no logging.
* Share of it: our speed over the floor's; where ours has two threads, on one core.
* Ms of the floor and of ours: milliseconds of one iteration, a rollout and its update.
* Steps per reset: the mean length of an episode while the clock ran. Episodes that end early cost
  resets, and a recurrent peer time.
* Commit: the version of our scripts, the newest that a cell was measured with. speed.csv has the
  others.

In the table of growth one size grows at a time. The exponent is log(time of an iteration) over
log(size): 1 is linear, and 0 costs nothing.
"""


def tables(threads: str, rows: list[Row]) -> list[str]:
    """All tables of one number of threads. CleanRL stands beside the newest version that it was
    measured with."""
    picked = pick(rows, threads)
    with_cleanrl = {row["commit"] for row in rows if row["program"] == "cleanrl"}
    cleanrl = pick([row for row in rows if row["commit"] in with_cleanrl], threads)
    ours = [cell for cell in GRID if picked[cell]["ours"]]
    compiled = [cell for cell in GRID if picked[cell]["compiled"]]
    one_core = [cell for cell in GRID if picked[cell]["ours-1core"]]
    beside = [cell for cell in GRID if cleanrl[cell]["cleanrl"]]
    passes = [cell for cell in PASSES if picked[cell]["pass"]]
    growth = [line for axis in AXES for line in growth_lines(axis, picked)]
    head = (
        f"Torch threads: {threads}. Where there are LSTMs or images, newer versions of ours train "
        f"actor and critics at once, in two such threads, but not on one core. Commit, machine, "
        f"versions: {origins(picked)}"
    )
    return [
        head,
        "",
        *markdown(GRID_HEAD, [grid_line(cell, picked[cell]) for cell in ours]),
        *markdown(COMPILED_HEAD, [compiled_line(cell, picked[cell]) for cell in compiled]),
        *markdown(ONE_CORE_HEAD, [one_core_line(cell, picked[cell]) for cell in one_core]),
        *markdown(CLEANRL_HEAD, [cleanrl_line(cell, cleanrl[cell]) for cell in beside]),
        *markdown(GROWTH_HEAD, growth),
        *markdown(PASS_HEAD, [pass_line(cell, picked[cell]["pass"]) for cell in passes]),
    ]


def report(table: Table) -> None:
    """speed.md and speed.png beside the CSV, from it alone."""
    rows = load(table)
    everyone = sorted({row["threads"] for row in rows})
    lines = [HEAD]
    for threads in everyone:
        lines += tables(threads, rows)
    lines += [
        "Training to a mean return of 475 (CartPoleNoVel-v1) or 3,000 (HalfCheetah-v5), from older "
        "rows of the learning report, with flags of their time: two runs or more at a time on two "
        "cores. Seconds are those of a run, with start-up and evaluation, times the share of its "
        "steps.",
        "",
        *markdown(WAITING_HEAD, waiting_lines()),
    ]
    common.publish(table.path.with_suffix(".md"), lines[:-1])
    if everyone:
        draw(table.path.with_suffix(".png"), pick(rows, everyone[0]))


# ------------------------------------------------------------------------------------------- figure
SAID = {  # cells in the figure's words
    "recurrent": "CartPole, no velocities; LSTM 128",
    "recurrent-lstm64": "the same, LSTM 64",
    "recurrent-lstm256": "the same, LSTM 256",
    "recurrent-seq32": "the same, sequences of 32 steps",
    "recurrent-envs32": "the same, 32 environments, not 8",
    "recurrent-episodes20": "the same, episodes of 20 steps",
    "recurrent-episodes60": "the same, episodes of 60 steps",
    "recurrent-episodes500": "the same, episodes of 500 steps",
    "cartpole": "CartPole-v1",
    "cheetah-1x2048": "HalfCheetah-v5, 1 environment",
    "cheetah-8x256": "HalfCheetah-v5, 8 environments",
    "minatar": "MinAtar Breakout",
    "pong": "Atari Pong",
    "pong-recurrent": "Atari Pong, LSTM 128",
}
AXES_SAID = {
    "num_envs": "environments",
    "num_steps": "steps of a rollout",
    "lstm_hidden_size": "LSTM units",
    "num_quantiles": "quantiles",
}


def draw_spread(panel: Any, place: float, told: Spread, **look: Any) -> None:
    """Draw a point at the median and a bar from the lowest to the highest repeat, if there are
    any."""
    if not math.isnan(told.middle):
        panel.plot((told.low, told.high), (place, place), "-", color=look["color"], lw=1.2)
        panel.plot(told.middle, place, **{"ls": "", "marker": "o", "ms": 4.5} | look)


def draw_cell(axes: Any, place: int, rows: Programs) -> None:
    """Draw speeds of a cell in the left panel, ratios to the peer in the right one. What was
    measured on one core stands a little lower."""
    left, right = axes
    high, low = place - 0.13, place + 0.2
    draw_spread(left, high, speeds(rows["floor"]), color=common.FLOOR)
    draw_spread(left, high, speeds(rows["cleanrl"]), color=common.PEER, marker="^")
    draw_spread(left, high, speeds(rows[peer(rows)]), color=common.PEER)
    draw_spread(left, high, speeds(rows["ours"]), color=common.OURS)
    draw_spread(left, low, speeds(rows["sb3-1core"]), color=common.PEER, mfc="white")
    draw_spread(left, low, speeds(rows["ours-1core"]), color=common.OURS, mfc="white")
    compiled = ratio(rows, peer(rows), "compiled")
    draw_spread(right, high, compiled, color=common.SKY, marker="D", ms=4)
    draw_spread(right, high, ratio(rows, peer(rows)), color=common.OURS)
    one_core = ratio(rows, "sb3-1core", "ours-1core")
    draw_spread(right, low, one_core, color=common.OURS, mfc="white")
    at_edge = right.get_yaxis_transform()
    right.text(1.02, place, str(len(rows["ours"])), transform=at_edge, va="center", fontsize=6.5)


def draw_cells(axes: Any, picked: dict[str, Programs]) -> None:
    """Draw every cell of the grid that was measured, with a star if with the latest scripts."""
    left, right = axes
    cells = [cell for cell in GRID if picked[cell]["ours"]]
    for place, cell in enumerate(cells):
        draw_cell(axes, place, picked[cell])
    recurrent = [place for place, cell in enumerate(cells) if GRID[cell].script == LSTM]
    for panel in axes:
        for place in recurrent:
            panel.axhspan(place - 0.5, place + 0.5, color="#F5F5F5", lw=0)
        panel.set_ylim(len(cells) - 0.4, -0.6)
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
    latest = commits(picked["recurrent"]["ours"])
    stars = ["*" if commits(picked[cell]["ours"]) == latest else "" for cell in cells]
    left.set_yticks(range(len(cells)), [SAID.get(x, x) + star for x, star in zip(cells, stars)])
    left.set(xscale="log", xlabel="steps per second (shaded: recurrent)")
    left.xaxis.set_major_formatter(common.brief_count)
    right.axvline(1, color=common.INK, lw=0.8, ls="--", zorder=1)
    right.set(xlabel="times as fast as the peer")
    right.set_xlim(left=0)
    right.tick_params(axis="y", labelleft=False)
    common.letter(left, 0, "speed")
    right.set_title("repeats", loc="right", fontsize=6.5)
    common.letter(right, 1, "ours over the peer, on as many cores")


def draw_growth(panels: Any, picked: dict[str, Programs]) -> None:
    """Draw the recurrent script's speed over each size; the others are the reference's."""
    for number, (panel, (axis, sizes)) in enumerate(zip(panels, AXES.items())):
        for program, colour, line in (("ours", common.OURS, "-"), ("kept", common.SKY, "--")):
            found = {size: speeds(picked[f"growth-{axis}-{size}"][program]) for size in sizes}
            told = {size: one for size, one in found.items() if not math.isnan(one.middle)}
            if told:
                middles = [one.middle for one in told.values()]
                panel.plot([*told], middles, f"o{line}", color=colour, ms=3.5)
                panel.vlines(
                    [*told],
                    [one.low for one in told.values()],
                    [one.high for one in told.values()],
                    color=colour,
                )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(common.brief_count)
        panel.set_xlabel(AXES_SAID[axis])
        common.letter(panel, 2 + number)
    panels[0].set_ylabel("steps per second")


def draw(path: Path, picked: dict[str, Programs]) -> None:
    """Draw steps per second and ratios to the peer of every cell, and growth with sizes below."""
    plt = common.pyplot()
    figure = plt.figure(figsize=(common.WIDTH, 7))
    above, below = figure.subfigures(2, 1, height_ratios=(2.6, 1))
    draw_cells(above.subplots(1, 2, sharey=True), picked)
    draw_growth(below.subplots(1, len(AXES), sharey=True), picked)
    below.suptitle("The recurrent script on CartPole without velocities, other sizes", fontsize=8)
    looks = (
        {"color": common.OURS, "label": "ours"},
        {"color": common.PEER, "label": "peer: Stable-Baselines3, sb3-contrib"},
        {"color": common.FLOOR, "label": "without losses and optimizer, one thread"},
        {"color": common.OURS, "mfc": "white", "label": "ours, one core"},
        {"color": common.PEER, "mfc": "white", "label": "peer, one core"},
        {"color": common.PEER, "marker": "^", "label": "CleanRL"},
        {"color": common.SKY, "marker": "D", "ms": 4, "label": "ours with --compile"},
        {"color": common.SKY, "ls": "--", "ms": 3.5, "label": "(c): ours, freed memory kept"},
    )
    if not any(picked[cell]["cleanrl"] for cell in GRID):
        looks = [look for look in looks if look["label"] != "CleanRL"]
    handles = [plt.Line2D([], [], **{"ls": "", "marker": "o"} | look) for look in looks]
    title = (
        "Median; bars: lowest to highest of repeats that take turns. Two cores but where told. "
        "*: with today's scripts, on a machine with nothing else to do"
    )
    above.legend(
        handles=handles, loc="outside lower center", ncols=4, title=title, title_fontsize=7.5
    )
    common.save(figure, path)


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
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--cleanrl", default="", help="path of its ppo_continuous_action.py")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    common.require("matplotlib", *([] if args.report else ["sb3_contrib"]))
    if args.child:
        child(Job(*json.loads(args.child)))
        return

    args.out.mkdir(parents=True, exist_ok=True)
    table = Table(args.out / "speed.csv", COLUMNS)
    if not args.report:
        parts = ((args.grid, GRID), (args.growth, GROWTH), (args.lstm, PASSES))
        chosen = [part for wanted, part in parts if wanted] or [GRID]
        known = [cell for part in chosen for cell in part]
        cells = [cell for cell in known if any(fnmatch(cell, name) for name in args.only)]
        same = origin()
        peer = args.cleanrl and str(Path(args.cleanrl).resolve())  # its process runs elsewhere
        every = (cells, args.threads, args.repeats, peer)
        todo = missing(load(table), same.commit, *every)
        measure_missing(table, todo, same, peer)
    report(table)


if __name__ == "__main__":
    main()
