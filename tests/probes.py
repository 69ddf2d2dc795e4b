"""Tiny environments whose solution is known; a failure names the part that is broken.

Run one with `env_id="probes:ConstantReward-v0"`: gymnasium imports this module and finds the id.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    Sequence,
    Text,
    Tuple,
)


class Probe(gym.Env):
    """One-step episodes by default; subclasses say what is seen and what is paid."""

    observation_space = Box(-2, 2, (1,), np.float32)
    action_space = Discrete(2)
    length = 1

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t = 0
        self.cue = int(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action):
        """Advance; the last of `length` steps terminates."""
        reward = self.pay(action)
        self.t += 1
        return self.observe(), float(reward), self.t == self.length, False, {}

    def observe(self):
        """Observation at step t."""
        return np.zeros(1, np.float32)

    def pay(self, action):
        """Reward of the action at step t."""
        return 1.0


class ConstantReward(Probe):
    """Reward 1, one step: V = 1. Fails if the value loss or its optimizer is broken."""


class RareReward(Probe):
    """100 in 3 of 100 episodes, else 0: V = 3. Fails if V does not see what is rare."""

    def pay(self, action):
        """A draw that no action changes."""
        return 100.0 * (self.np_random.random() < 0.03)


class ObservationValue(Probe):
    """Reward is the observation, +1 or -1. Fails if observations do not reach the critic."""

    def observe(self):
        """The sign of the reward."""
        return np.full(1, 2 * self.cue - 1, np.float32)

    def pay(self, action):
        """The observation."""
        return 2 * self.cue - 1


class Discounting(Probe):
    """Two steps, reward 1 at the second: V = gamma, then 1. Fails if discounting is broken."""

    length = 2

    def observe(self):
        """The step."""
        return np.full(1, self.t, np.float32)

    def pay(self, action):
        """1 at the end."""
        return float(self.t == 1)


class ActionReward(Probe):
    """Action 1 pays 1, action 0 pays -1. Fails if the policy gradient is broken."""

    def pay(self, action):
        """The sign of the action."""
        return 2 * int(action) - 1


class ActionAndObservation(ObservationValue):
    """1 for the action that the observation names, else -1. Fails if rows are mixed up."""

    def pay(self, action):
        """Agreement of action and observation."""
        return 1 if int(action) == self.cue else -1


class TimeLimit(Probe):
    """Reward 1 for ever, cut every 5 steps: V = 1 / (1 - gamma) where the cut is no death."""

    length = 0  # never terminates


class RealEnd(Probe):
    """Reward 1, real end after 5 steps, with a time limit at the same step: V(s_0) < 5."""

    length = 5

    def observe(self):
        """The step."""
        return np.full(1, self.t / 5, np.float32)


class RandomReward(Probe):
    """Ten N(0, 1) rewards: the return from step t has variance sum gamma^2k, k < 10 - t."""

    length = 10

    def observe(self):
        """The step."""
        return np.full(1, self.t / 10, np.float32)

    def pay(self, action):
        """Noise."""
        return self.np_random.standard_normal()


class Memory(Probe):
    """A cue at step 0, then noise; the action at step 10 pays 1 if it names the cue, else 0."""

    observation_space = Box(-2, 2, (3,), np.float32)
    length = 11

    def observe(self):
        """Cue (step 0 only), noise, and a flag at the step that asks."""
        cue = 2 * self.cue - 1 if self.t == 0 else 0
        return np.array([cue, self.np_random.uniform(-1, 1), self.t == 10], np.float32)

    def pay(self, action):
        """Recall."""
        return float(self.t == 10 and int(action) == self.cue)


class Quadrant(Probe):
    """An image whose lit quarter names the action that pays 1, others pay 0. One-step episodes."""

    action_space = Discrete(4)

    def __init__(self, side=12, dtype="uint8", channels_first=True):
        shape = (2, side, side) if channels_first else (side, side, 2)
        high = 255 if dtype == "uint8" else 1
        self.observation_space = Box(0, high, shape, dtype)
        self.side, self.channels_first = side, channels_first

    def observe(self):
        """A quarter of the second channel is lit; from the quarter's number, 0 to 3."""
        self.cue = int(self.np_random.integers(4))
        return self.picture(self.cue)

    def picture(self, cue):
        """The image of that quarter."""
        image = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        half = self.side // 2
        row, column = half * (cue // 2), half * (cue % 2)
        view = image if self.channels_first else np.moveaxis(image, 2, 0)
        view[1, row : row + half, column : column + half] = self.observation_space.high.max()
        return image

    def step(self, action):
        """Pay, then show the next image."""
        reward = float(int(action) == self.cue)
        self.t += 1
        return self.observe(), reward, self.t == self.length, False, {}


class Flicker(Quadrant):
    """Every second frame is black; 1 for naming there the quarter lit before. 8 frames, 4 pay."""

    length = 8

    def observe(self):
        """A lit quarter at even steps, nothing at odd ones."""
        return 0 * self.picture(0) if self.t % 2 else super().observe()

    def step(self, action):
        """Lit frames do not pay."""
        lit = self.t % 2 == 0
        obs, reward, *rest = super().step(action)
        return obs, 0.0 if lit else reward, *rest


class Pixels(gym.Env):
    """Every pixel of an image is its number, so that its place can be told. 5-step episodes."""

    action_space = Discrete(2)

    def __init__(self, shape, dtype="uint8", high=255):
        self.observation_space = Box(0, high, shape, np.dtype(dtype))

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t = 0
        return self.image(), {}

    def step(self, action):
        """Advance by one."""
        self.t += 1
        return self.image(), float(action), self.t == 5, False, {}

    def image(self):
        """0, 1, 2, ... in the order of the memory."""
        shape, dtype = self.observation_space.shape, self.observation_space.dtype
        return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


class Counter(gym.Env):
    """Observation (environment, episode, step); ends as told. For checking the bookkeeping.

    Episode k of an environment lasts lengths[k % len] steps and is truncated or terminated as
    kinds[k % len] says ("terminated", "truncated" or "both"). Reward: 100 episode + step + action.
    It returns one array that it overwrites, as some environments do.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(3, start=5)

    def __init__(self, lengths=(3, 5, 2), kinds=("truncated", "terminated", "both")):
        self.lengths, self.kinds = lengths, kinds
        self.array = np.zeros(3)
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        """The next episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.array[0] = seed
        self.episode += 1
        self.t = 0
        self.array[1:] = self.episode, self.t
        return self.array, {}

    def step(self, action):
        """Advance by one."""
        assert self.action_space.contains(action), action
        reward = 100.0 * self.episode + self.t + float(action)
        self.t += 1
        self.array[2] = self.t
        over = self.t == self.lengths[self.episode % len(self.lengths)]
        kind = self.kinds[self.episode % len(self.kinds)]
        return self.array, reward, over and kind != "truncated", over and kind != "terminated", {}


class Staggered(Counter):
    """The same, each environment beginning with another episode: ends do not align."""

    def reset(self, *, seed=None, options=None):
        """The next episode; seeds 1 to 100 open with episodes 1 to 100 of the cycle."""
        if seed is not None:
            self.episode = (seed - 1) % 100
        return super().reset(seed=seed, options=options)


class Walk(Probe):
    """A random walk that actions push; the reward is where it stands. 9 steps."""

    length = 9

    def reset(self, *, seed=None, options=None):
        """At 0."""
        self.place = [0.0]
        return super().reset(seed=seed, options=options)

    def observe(self):
        """The place."""
        return np.array(self.place, np.float32)

    def pay(self, action):
        """Push and drift; the place."""
        self.place[0] += 0.3 * int(action) - 0.15 + 0.1 * self.np_random.standard_normal()
        return self.place[0]


class Filmed(Walk):
    """Draws where it stands: a bar of 32 x 32 pixels."""

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        """With a draw from NumPy's own generator."""
        answer = super().reset(seed=seed, options=options)
        self.place = [0.1 * np.random.standard_normal()]
        return answer

    def render(self):
        """A picture (32, 32, 3)."""
        frame = np.zeros((32, 32, 3), np.uint8)
        frame[:, : int(np.clip(16 + 8 * self.place[0], 0, 32))] = 255
        return frame


class Words(gym.Space):
    """A space of a package's own, of which gymnasium knows nothing."""

    def sample(self, mask=None, probability=None):
        """Always the same."""
        return "go"

    def contains(self, x):
        """Anything."""
        return True


class Locked(Walk):
    """Holds what pickle refuses."""

    def __init__(self):
        self.lock = threading.Lock()


class Simulator(gym.utils.EzPickle):
    """Pickled as the arguments it was made with: a copy stands at 0 without an error."""

    def __init__(self):
        super().__init__()
        self.place = [0.0]


class Simulated(Walk):
    """Keeps its place in such an object."""

    def __init__(self):
        self.simulator = Simulator()

    @property
    def place(self):
        """Of the simulator."""
        return self.simulator.place

    @place.setter
    def place(self, place):
        self.simulator.place = place


class Handlers(Walk):
    """Keeps its methods in a table: in a copy of the table they belong to a copy of the task."""

    def __init__(self):
        self.moves = {0: self.left, 1: self.right}

    def left(self):
        """Push."""
        self.place = [self.place[0] - 0.15 + 0.1 * self.np_random.standard_normal()]

    def right(self):
        """Push."""
        self.place = [self.place[0] + 0.15 + 0.1 * self.np_random.standard_normal()]

    def pay(self, action):
        """By way of the table."""
        self.moves[int(action)]()
        return self.place[0]


class Adapter(gym.Env):
    """Hands on whatever it has not got: it can be pickled, but not be loaded again."""

    observation_space, action_space = Walk.observation_space, Walk.action_space

    def __init__(self):
        self.inner = Walk()

    def __getattr__(self, name):
        """Of the task."""
        return getattr(self.inner, name)

    def reset(self, *, seed=None, options=None):
        """Of the task."""
        super().reset(seed=seed)
        return self.inner.reset(seed=seed)

    def step(self, action):
        """Of the task."""
        return self.inner.step(action)


class Wordless(Walk):
    """Cannot be made, and does not say why."""

    def __init__(self):
        raise NotImplementedError


def seed_of(stream, index):
    """What the scripts seed with in a run with seed 1: 31 bits of a stream of their own."""
    sequence = np.random.SeedSequence(1, spawn_key=(stream, index))
    return int(sequence.generate_state(1, np.uint64)[0]) >> 33


ENVIRONMENT_1 = seed_of(1, 1)
EVALUATION = [seed_of(4, episode) for episode in range(3)]


class Faulty(Probe):
    """7-step episodes until environment 1 of a run with seed 1 fails in its 30th step.

    With 12 steps to a rollout that is step 5 of the third one. Kinds of faults: "observation",
    "reward", "error"; "reset": the observation that opens the episode after step 28, "start": the
    one that opens the first episode; "opening", "construction": an error ahead of all steps;
    "evaluation", "trial", "prize": in evaluation episodes alone, an error, or step 9 not finite.
    """

    length = 7

    def __init__(self, fault):
        self.fault, self.steps = fault, 0
        if fault == "construction":
            raise RuntimeError("the simulator broke")

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        if seed is not None:
            self.seed = seed
        if self.fault == "opening" or (self.fault == "evaluation" and self.seed in EVALUATION):
            raise RuntimeError("the simulator broke")
        obs, info = super().reset(seed=seed, options=options)
        spoilt = self.due("reset", 28) or self.due("start", 0)
        return obs + (np.nan if spoilt else 0), info

    def due(self, fault, at=30, seed=ENVIRONMENT_1):
        """Now is the time."""
        return self.fault == fault and self.steps == at and self.seed == seed

    def step(self, action):
        """Advance or fail."""
        self.steps += 1
        if self.due("error"):
            raise RuntimeError("the simulator broke")
        obs, reward, *rest = super().step(action)
        spoilt = self.due("observation") or self.due("trial", 9, EVALUATION[1])
        obs = obs + (np.nan if spoilt else 0)
        spoilt = self.due("reward") or self.due("prize", 9, EVALUATION[1])
        return obs, reward + (np.inf if spoilt else 0), *rest

    def observe(self):
        """The step."""
        return np.full(1, self.t / 7, np.float32)

    def pay(self, action):
        """A little noise."""
        return 0.1 * self.np_random.standard_normal()


class Spaces(gym.Env):
    """Any spaces: random observations, actions checked against the space, 7-step episodes."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        """Advance by one."""
        assert self.action_space.contains(action), (self.action_space, action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 7, False, {}


OBSERVATIONS = {
    "Vector": Box(-1, 1, (4,), np.float32),
    "Image": Box(0, 255, (3, 4, 2), np.uint8),
    "Discrete": Discrete(5, start=-2),
    "Nested": Dict({"a": Discrete(3), "b": Tuple((Box(-1, 1, (2,)), MultiBinary(3)))}),
}
ACTIONS = {
    "Discrete": Discrete(4, start=3),
    "MultiDiscrete": MultiDiscrete([2, 4, 3]),
    "MultiBinary": MultiBinary(3),
    "Box": Box(np.array([[-1.0, 0.0]], np.float32), np.array([[1.0, 0.5]], np.float32)),
}
SIMPLE = (ConstantReward, RareReward, ObservationValue, Discounting, ActionReward)
gym.register("Endless-v0", TimeLimit)
WALKS = (Walk, Filmed, Locked, Simulated, Handlers, Adapter, Wordless)
FAULTS = ("observation", "reward", "error", "reset", "start", "opening", "construction")
for fault in (*FAULTS, "evaluation", "trial", "prize"):
    gym.register(f"Faulty{fault.title()}-v0", Faulty, kwargs={"fault": fault})
for probe in (*SIMPLE, ActionAndObservation, RandomReward, Memory, Counter, Staggered, *WALKS):
    gym.register(f"{probe.__name__}-v0", probe)
gym.register("TimeLimit-v0", TimeLimit, max_episode_steps=5)
gym.register("Unchanging-v0", TimeLimit, max_episode_steps=20)
gym.register("RealEnd-v0", RealEnd, max_episode_steps=5)
for obs_name, obs_space in OBSERVATIONS.items():
    for action_name, space in ACTIONS.items():
        spaces = {"observation_space": obs_space, "action_space": space}
        gym.register(f"{obs_name}{action_name}-v0", Spaces, kwargs=spaces)
for side, letter in ((12, ""), (84, "Large")):
    for dtype in ("uint8", "float32"):
        for order in ("First", "Last"):
            spaces = {"side": side, "dtype": dtype, "channels_first": order == "First"}
            name = f"{letter}Quadrant{dtype.title()}{order}-v0"
            gym.register(name, Quadrant, kwargs=spaces)
gym.register("Flicker-v0", Flicker)
graph = Graph(Box(-1, 1, (2,)), None)
robot = {"joints": Box(-1, 1, (3,)), "camera": Box(0, 255, (8, 8, 3), np.uint8)}
unusual = {
    "GraphObservation": (graph, Discrete(2)),
    "TextObservation": (Dict({"place": Discrete(3), "mission": Text(9)}), Discrete(2)),
    "WordsObservation": (Dict({"place": Discrete(3), "mission": Words()}), Discrete(2)),
    "StackObservation": (Box(0, 255, (4, 8, 8, 3), np.uint8), Discrete(2)),
    "SequenceObservation": (Tuple((Discrete(2), Sequence(Discrete(3)))), Discrete(2)),
    "CameraObservation": (Tuple((Discrete(2), Dict(robot))), Discrete(2)),
    "TextAction": (Discrete(2), Text(3)),
}
for name, (obs_space, space) in unusual.items():
    spaces = {"observation_space": obs_space, "action_space": space}
    gym.register(f"{name}-v0", Spaces, kwargs=spaces)
