"""Tasks that need an id of their own: `--env-id benchmarks.envs:MiniGrid-MemoryS7-OneHot-v0`.

The programs of this folder find them as `envs:`, without its name.

MiniGrid's observation is a Dict with a mission text, which is no vector. Here it is what the agent
sees, 7 x 7 cells. The three numbers of a cell are codes of what is in it: a key is 5 and a ball 6.
As an image they are divided by 255, and then hardly differ. So each of them is one-hot, in a
vector. MinAtar's games, `envs:MinAtar/Breakout-v1`, have to be registered. `envs:RiskyHopper-v0`,
`envs:RiskyWalker2d-v0` and `envs:RiskyHalfCheetah-v0` are robots that now and then pay for a
risky state, running too fast or leaning far; in the Rare ones that is a fifth as likely.
`envs:LimitHalfCheetah-v0` is ours. In `envs:LimitHalfCheetahPenalty-v0`,
`envs:RiskyHopperPenalty-v0` and the like every risky step costs 3 besides.
`envs:LimitHalfCheetahUpTo700-v0` pays up to a total of 700 an episode, UpTo800 up to 800, and
`envs:LimitHalfCheetahClock-v0` without a limit; all three show the total and the time.
`envs:Slow-v0` takes a millisecond a step.
"""

from __future__ import annotations

import time
from contextlib import suppress

import gymnasium as gym
import numpy as np

with suppress(ImportError):
    from minatar.gym import register_envs

    register_envs()


def memory_s7(render_mode: str | None = None) -> gym.Env:
    """Look at an object, walk a corridor, turn to the object like it; 245 steps at most."""
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper

    env = OneHotPartialObsWrapper(gym.make("MiniGrid-MemoryS7-v0", render_mode=render_mode))
    return gym.wrappers.FlattenObservation(ImgObsWrapper(env))


gym.register("MiniGrid-MemoryS7-OneHot-v0", memory_s7)


class Slow(gym.Wrapper):
    """A simulator that takes a millisecond of the processor for a step."""

    def step(self, action):
        """Compute in vain, then step."""
        end = time.perf_counter() + 1e-3
        while time.perf_counter() < end:
            pass
        return self.env.step(action)


def slow() -> gym.Env:
    """CartPole, slowly."""
    return Slow(gym.make("CartPole-v1"))


gym.register("Slow-v0", slow)


class Risky(gym.Wrapper):
    """A robot that pays for risky states with a small probability (Urpi, Curi & Krause 2021).

    `penalty` is taken at every risky step, for certain. It is ours, for comparison; their tasks
    have none. `stakes` has what each step so far would have cost had it been hit: 0 where it was
    not risky.
    """

    def __init__(self, env: gym.Env, probability: float, cost: float, penalty: float) -> None:
        super().__init__(env)
        self.probability = probability
        self.cost = cost
        self.penalty = penalty
        self.stakes: list[float] = []

    def step(self, action):
        """Step, and pay."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.stakes.append(0.0)
        if self.is_risky(info):
            self.stakes[-1] = self.cost + self.forfeit(info)
            reward -= self.penalty
            if self.unwrapped.np_random.random() < self.probability:
                reward -= self.stakes[-1]
        return obs, reward, terminated, truncated, info

    def is_risky(self, info: dict) -> bool:
        """Tell whether the step led to a risky state."""
        raise NotImplementedError

    def forfeit(self, info: dict) -> float:
        """Return what is not paid where the cost is."""
        return 0.0


class TooFast(Risky):
    """HalfCheetah that breaks when it runs too fast, and then earns nothing for running."""

    def __init__(self, env: gym.Env, limit: float, *numbers: float) -> None:
        super().__init__(env, *numbers)
        self.limit = limit

    def is_risky(self, info):
        """By the speed."""
        return info["x_velocity"] > self.limit

    def forfeit(self, info):
        """What it ran for."""
        return info["reward_forward"]


class UpTo(gym.Wrapper):
    """A task that pays up to a total of `goal` in an episode of `steps` steps.

    Its mean return is that of min(G, goal), where G is the return of the wrapped task. The best
    policies of this task, for the right goal, have the best CVaR of G (Rockafellar & Uryasev 2000;
    Bauerle & Ott 2011):

        CVaR_alpha(G) = max over b of  b - E[max(b - G, 0)] / alpha,   min(G, b) = b - max(b - G, 0)

    They depend on what is earned so far and on the time left, so that both are observed. A step
    pays by how much min(G, goal) changes. Since the time is observed, its end is a true end.
    `earned` has what each step so far has earned in the wrapped task.
    """

    def __init__(self, env: gym.Env, goal: float, steps: int) -> None:
        super().__init__(gym.wrappers.TimeLimit(env, steps))
        self.goal = goal
        self.earned: list[float] = []
        low, high = env.observation_space.low, env.observation_space.high
        self.observation_space = gym.spaces.Box(
            np.append(low, [-np.inf, 0]), np.append(high, [np.inf, steps]), dtype=np.float64
        )

    def reset(self, *, seed=None, options=None):
        """Nothing is earned yet."""
        self.total = 0.0
        self.time = 0
        obs, info = self.env.reset(seed=seed, options=options)
        return self.seen(obs), info

    def step(self, action):
        """Step, and pay no more than is left."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        before = min(self.total, self.goal)
        self.total += reward
        self.time += 1
        self.earned.append(reward)
        paid = min(self.total, self.goal) - before
        return self.seen(obs), paid, terminated or truncated, False, info

    def seen(self, obs: np.ndarray) -> np.ndarray:
        """Append the total and the time."""
        return np.append(obs, [self.total, self.time])


class Leaning(Risky):
    """A robot that leans further than `lean` without having fallen."""

    def __init__(self, env: gym.Env, lean: float, *numbers: float) -> None:
        super().__init__(env, *numbers)
        self.lean = lean

    def is_risky(self, info):
        """By the angle of the torso, up to twice as far: there it falls, and the episode ends."""
        angle = np.abs(self.unwrapped.data.qpos[2])
        return self.lean <= angle < 2 * self.lean


def risky_cheetah(
    probability: float = 0.05, cost: float = 70, limit: float = 4, penalty: float = 0, **options
) -> gym.Env:
    """By default as in the paper."""
    env = gym.make("HalfCheetah-v5", disable_env_checker=True, **options)
    return TooFast(env, limit, probability, cost, penalty)


def cheetah_up_to(goal: float = np.inf, **options) -> gym.Env:
    """LimitHalfCheetah that pays up to a total of `goal`."""
    return UpTo(risky_cheetah(**LIMIT, **options), goal, steps=200)


def risky_hopper(probability: float = 0.1, penalty: float = 0, **options) -> gym.Env:
    """Cost 50."""
    env = gym.make("Hopper-v5", disable_env_checker=True, **options)
    return Leaning(env, 0.1, probability, 50, penalty)


def risky_walker(probability: float = 0.1, penalty: float = 0, **options) -> gym.Env:
    """Cost 30."""
    env = gym.make("Walker2d-v5", disable_env_checker=True, **options)
    return Leaning(env, 0.5, probability, 30, penalty)


ROBOTS = {  # with the probability of the paper and the length of an episode
    "HalfCheetah": (risky_cheetah, 0.05, 200),
    "Hopper": (risky_hopper, 0.1, 500),
    "Walker2d": (risky_walker, 0.1, 500),
}
RISKY = [f"Risky{robot}" for robot in ROBOTS]  # of the paper
RARE = [f"Rare{robot}" for robot in ROBOTS]  # ours: a fifth of the probability, at the same cost
PENALTY = 3
for robot, (make, probability, steps) in ROBOTS.items():
    gym.register(f"Risky{robot}-v0", make, max_episode_steps=steps)
    penalised = {"penalty": PENALTY}
    gym.register(f"Risky{robot}Penalty-v0", make, max_episode_steps=steps, kwargs=penalised)
    rare = {"probability": probability / 5}
    gym.register(f"Rare{robot}-v0", make, max_episode_steps=steps, kwargs=rare)

# Ours: it may run faster, and what comes in one risky step of 250 costs more.
LIMIT = {"limit": 5, "probability": 0.004, "cost": 175}
gym.register("LimitHalfCheetah-v0", risky_cheetah, max_episode_steps=200, kwargs=LIMIT)
penalised = LIMIT | {"penalty": PENALTY}
gym.register("LimitHalfCheetahPenalty-v0", risky_cheetah, max_episode_steps=200, kwargs=penalised)
gym.register("LimitHalfCheetahClock-v0", cheetah_up_to)
for goal in (700, 800):
    gym.register(f"LimitHalfCheetahUpTo{goal}-v0", cheetah_up_to, kwargs={"goal": goal})
