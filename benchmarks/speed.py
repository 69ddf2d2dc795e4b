"""Steps per second of the recurrent script beside sb3-contrib's RecurrentPPO at equal work.

    python benchmarks/speed.py

CartPoleNoVel-v1, 8 environments x 128 steps, 4 epochs, 4 minibatches, LSTM 128 for actor and
critic each, encoder 64. Every program runs in a process of its own with one torch thread, at two
lengths; speed is the difference of steps over the difference of wall time, so that start-up does
not count. The programs take turns; the table has medians. Raw data: results/speed.csv.
"""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
REPEATS = 5
SHORT, LONG = 8 * 128 * 8, 8 * 128 * 32  # environment steps


def ours(steps: int) -> None:
    """The recurrent script: twin critics of 32 quantiles."""
    sys.path.insert(0, str(HERE.parent))
    import distributional_ppo_lstm as script

    flags = {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "lstm_hidden_size": 128}
    with tempfile.TemporaryDirectory() as top:
        flags |= {"total_timesteps": steps, "eval_episodes": 1, "run_dir": top}
        script.train(script.Args(**flags))


def sb3(steps: int) -> None:
    """sb3-contrib: one scalar critic with an LSTM of its own."""
    import gymnasium as gym
    import numpy as np
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    keep = np.array([1, 0, 1, 0], np.float32)

    def make() -> gym.Env:
        env = gym.make("CartPole-v1")
        return gym.wrappers.TransformObservation(env, lambda x: x * keep, env.observation_space)

    policy = {"lstm_hidden_size": 128, "enable_critic_lstm": True, "net_arch": [64]}
    model = RecurrentPPO(
        "MlpLstmPolicy", make_vec_env(make, 8), n_steps=128, batch_size=256, n_epochs=4,
        policy_kwargs=policy, device="cpu", seed=1,
    )  # fmt: skip
    model.learn(steps)


PROGRAMS = {"distributional_ppo_lstm": ours, "sb3-contrib RecurrentPPO": sb3}


def seconds(name: str, steps: int) -> float:
    """Wall time of one process from outside."""
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, str(steps)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    """Measure in turns, write the raw data, print the table."""
    rows = []
    for repeat in range(REPEATS):
        for name in PROGRAMS:
            short, long = seconds(name, SHORT), seconds(name, LONG)
            rows.append((repeat, name, short, long, (LONG - SHORT) / (long - short)))
            print(*rows[-1], flush=True)
    commit = subprocess.run(
        ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    packages = " ".join(f"{p} {version(p)}" for p in ("torch", "gymnasium", "sb3-contrib"))
    with (HERE / "results" / "speed.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("repeat", "program", "short_s", "long_s", "steps_per_s", "about"))
        writer.writerows((*row, f"{commit}; {machine}; {packages}") for row in rows)
    speed = {name: median(r[-1] for r in rows if r[1] == name) for name in PROGRAMS}
    base = speed["sb3-contrib RecurrentPPO"]
    print("| program | steps/s, median | ratio |\n|---|---|---|")
    for name, value in speed.items():
        print(f"| {name} | {value:,.0f} | {value / base:.1f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        PROGRAMS[sys.argv[1]](int(sys.argv[2]))
    else:
        main()
