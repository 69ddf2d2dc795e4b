"""Calibration: predicted return distributions against the truth. Runs what is missing, reports.

    python benchmarks/calibration.py             # run the missing cells and report
    python benchmarks/calibration.py --report    # table and figure from the committed CSV alone
    python benchmarks/calibration.py --only recommended gaussian --seeds 1 2

Five small Markov reward processes (the action does nothing) have return distributions that are
known: in closed form as a mixture of Gaussians, or by four million Monte Carlo returns. Each cell
trains one script on one of them and compares the distribution predicted at the start state with
the truth; beside every figure stands its representation floor, the same figure for the exact
quantiles at that K, or for the truth projected on the trained atoms. Real tasks compare predicted
quantiles along fresh episodes of the sampled policy with their discounted returns, time limits
lifted. Reported seeds are 1 and up; whatever was tuned was tuned on 1000 and up.

Flags recommended for calibration: see RECOMMENDED. Interrupted at any point, the next call
continues: one row of results/calibration.csv is one cell.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
LSTM, CATEGORICAL = "distributional_ppo_lstm", "distributional_ppo_categorical"
FINE = 20_000  # levels at which quantile functions are compared
LEVELS = (np.arange(FINE) + 0.5) / FINE
SHOWN = slice(FINE // 80, FINE, FINE // 40)  # 40 of them, kept in the CSV for the figure


# ------------------------------------------------------------------------------ processes and truth
class Process(gym.Env):
    """Ten N(0, 1) rewards; the observation is the step. Subclasses pay and branch otherwise."""

    action_space = Discrete(1)  # no choice: nothing but the critics learns
    observation_space = Discrete(11)
    length, gamma = 10, 0.95

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t, self.lucky = 0, self.np_random.random() < 0.75
        return self.state(), {}

    def step(self, action):
        """Advance; the last of `length` steps terminates."""
        reward = self.pay()
        self.t += 1
        return self.state(), float(reward), self.t == self.length, False, {}

    def state(self):
        """The step."""
        return self.t

    def pay(self):
        """Reward of this step."""
        return self.np_random.normal()

    @classmethod
    def truth(cls) -> np.ndarray:
        """Quantile function of the discounted return at LEVELS."""
        return mixture((1.0, 0.0, spread(cls.gamma, 10)))


class Skewed(Process):
    """Step 0 leads to a good branch (0.75; four rewards N(1, 0.5)) or a bad one (N(-1, 1))."""

    length = 5

    def state(self):
        """0, then the step within the branch."""
        return self.t + 5 * (self.t > 0 and not self.lucky)

    def pay(self):
        """Nothing at first, then the branch's."""
        return (self.t > 0) * (self.np_random.normal(1, 0.5) if self.lucky else self.bad())

    def bad(self):
        """Reward in the bad branch."""
        return self.np_random.normal(-1, 1)

    @classmethod
    def truth(cls) -> np.ndarray:
        """Both branches: gamma times four rewards."""
        g, mean, std = cls.gamma, (1 - cls.gamma**4) / (1 - cls.gamma), spread(cls.gamma, 4)
        return mixture((0.75, g * mean, g * 0.5 * std), (0.25, -g * mean, g * std))


class HeavyTail(Process):
    """Five rewards of Student's t with 3 degrees of freedom, of variance 1."""

    length = 5

    def pay(self):
        """Infinite fourth moment."""
        return self.np_random.standard_t(3) / 3**0.5

    @classmethod
    def truth(cls) -> np.ndarray:
        """Monte Carlo."""
        rewards = np.random.default_rng(0).standard_t(3, (5, 200 * FINE)) / 3**0.5
        returns = np.sort(cls.gamma ** np.arange(5) @ rewards)
        return returns.reshape(FINE, -1).mean(1)


class Limited(Process):
    """N(1, 1) rewards for ever in a single state, cut every five steps: the cut is no death."""

    length, gamma = 0, 0.8  # never terminates

    def state(self):
        """Always the same."""
        return 0

    def pay(self):
        """Noise around 1."""
        return self.np_random.normal(1, 1)

    @classmethod
    def truth(cls) -> np.ndarray:
        """Infinitely many rewards: mean 5, variance 1 / 0.36."""
        return mixture((1.0, 1 / (1 - cls.gamma), (1 - cls.gamma**2) ** -0.5))


class Disaster(Process):
    """Five rewards of 1; the last one is -19 with probability 0.02."""

    length = 5

    def pay(self):
        """1, seldom 20 less."""
        return 1 - 20 * (self.t == 4 and self.np_random.random() < 0.02)

    @classmethod
    def truth(cls) -> np.ndarray:
        """Two values."""
        total = (1 - cls.gamma**5) / (1 - cls.gamma)
        return mixture((0.02, total - 20 * cls.gamma**4, 0.0), (0.98, total, 0.0))


def spread(gamma: float, length: int) -> float:
    """Standard deviation of `length` discounted rewards of variance 1."""
    return float(np.sqrt(np.sum(gamma ** (2 * np.arange(length)))))


def mixture(*parts: tuple[float, float, float]) -> np.ndarray:
    """Quantile function at LEVELS of a mixture of Gaussians (weight, mean, std)."""
    values = []
    for weight, mean, std in parts:
        count = round(weight * FINE)
        normal = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
        values += [mean + std * x for x in normal]
    return np.sort(values)


PROCESSES = {
    "gaussian": Process, "skewed": Skewed, "time_limit": Limited, "heavy_tail": HeavyTail,
    "disaster": Disaster,
}  # fmt: skip
JUDGED = ("gaussian", "skewed", "time_limit")  # the others are reported without a goal
for name, process in PROCESSES.items():
    if f"{name}-v0" not in gym.registry:
        gym.register(f"{name}-v0", process, max_episode_steps=5 if name == "time_limit" else None)

# ------------------------------------------------------------------------------------------ the grid
RECOMMENDED = {
    LSTM: "--value-target sr_lambda --kappa 0 --num-quantiles 51 --twin-reduce mean",
    CATEGORICAL: "--value-target sr_lambda --target-encoding two_hot --num-atoms 101 "
    "--twin-reduce mean",
}
BASE = (  # a long annealed run: the noise of a quantile falls with the episodes averaged over
    "--num-envs 16 --num-steps 40 --total-timesteps 128000 --num-minibatches 4 --update-epochs 2 "
    "--learning-rate 3e-3 --gae-lambda 0.95 --hidden-size 32 --ent-coef 0 --eval-episodes 1 "
    "--checkpoint-every 0 "
)
WIDTH = {LSTM: "--lstm-hidden-size 16 ", CATEGORICAL: ""}
