"""Tasks that are not polite: what they do is allowed, or common, or a mistake of their authors."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from probes import Walk


class Rude(gym.Env):
    """Bytes (6, 5, 3) in one buffer, shown upside down; every pixel is the step, 50 after a reset.
    It holds a simulator that a copy shares and frees. It learns by itself in `step`, pays a tensor
    of shape (1,) with a graph, changes the working directory when it is reset, and cannot be
    closed. All its life it hands out one `info` with arrays of varying length under gymnasium's own
    keys. Episodes of 5 steps end at a limit."""

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = Box(0, 255, (6, 5, 3), np.uint8)
    action_space = Discrete(2)
    simulators: ClassVar[set] = set()  # that run in this process

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.buffer = np.zeros((6, 5, 3), np.uint8)
        self.weight = torch.ones(1, requires_grad=True)
        self.info = {}
        self.simulator = time.monotonic_ns()
        self.simulators.add(self.simulator)

    def __del__(self):
        self.simulators.discard(self.simulator)

    def reset(self, *, seed=None, options=None):
        """Open an episode somewhere else on the disk."""
        super().reset(seed=seed)
        os.chdir(tempfile.gettempdir())
        self.t = 0
        self.buffer[:] = 50
        return self.buffer[::-1], self.info

    def step(self, action):
        """Advance by one, and take a step of gradient descent."""
        if self.simulator not in self.simulators:
            raise RuntimeError("the simulator is gone")
        self.t += 1
        (self.weight - 3).square().sum().backward()
        self.buffer[:] = self.t
        found = np.zeros(self.t) if self.t % 2 else "nothing"
        self.info |= {"found": found, "final_obs": None, "episode": self.t}
        return self.buffer[::-1], self.weight * int(action), False, self.t == 5, self.info

    def render(self):
        """The same buffer, upside down, larger."""
        return self.buffer.repeat(8, 0).repeat(8, 1)[::-1]

    def close(self):
        """Fail."""
        raise RuntimeError("the simulator hung up")


SPACES = {
    "bytes": Box(0, 255, (6, 5, 3), np.uint8),
    "channels": Box(0, 255, (3, 6, 5), np.uint8),
    "vector": Box(-1, 1, (4,), np.float32),
    "parts": Dict({"place": Box(-1, 1, (2,)), "doors": MultiBinary(3)}),
    "choice": Discrete(4),
    "counts": Dict({"many": Box(-10, 10, (2,), np.int32)}),
}
CAMERA = np.full((6, 5, 3), 7.0)
MISFITS = {  # a space, and an observation that does not belong to it
    "Fraction": ("bytes", CAMERA / 10),
    "Negative": ("bytes", np.full((6, 5, 3), -5)),
    "Large": ("bytes", np.full((6, 5, 3), 300)),
    "Nan": ("bytes", CAMERA * np.nan),
    "Order": ("channels", CAMERA.astype(np.uint8)),
    "Short": ("vector", np.zeros(1, np.float32)),
    "Ragged": ("vector", [[1], [2, 3], [], 0]),
    "Lacking": ("parts", {"place": np.zeros(2, np.float32)}),
    "Part": ("parts", {"place": np.zeros(3, np.float32), "doors": np.zeros(3, np.int8)}),
    "Choice": ("choice", -1),
    "Half": ("choice", 0.5),
    "Count": ("counts", {"many": np.array([0.7, 2.0])}),
    "Gap": ("counts", {"many": np.array([1.0, np.nan])}),
    "Wide": ("counts", {"many": np.array([1, 2**40])}),
}


class Misfit(gym.Env):
    """Shows what does not belong to its space: at once, or from the second step on."""

    action_space = Discrete(2)

    def __init__(self, kind, at=0):
        space, self.wrong = MISFITS[kind]
        self.observation_space = SPACES[space]
        self.at = at

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        """Advance by one."""
        self.t += 1
        return self.look(), 1.0, False, False, {}

    def look(self):
        """A random observation, or the wrong one."""
        return self.wrong if self.t >= self.at else self.observation_space.sample()


class OldStep(Walk):
    """Four values from `step`, as in the old gym."""

    def step(self, action):
        """No truncation."""
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class OldReset(Walk):
    """An observation alone from `reset`."""

    def reset(self, *, seed=None, options=None):
        """No info."""
        return super().reset(seed=seed)[0]


class OldSeed(Walk):
    """It is seeded by a method of its own."""

    def reset(self):
        """No seed."""
        return super().reset(seed=None)


class Exit(Walk):
    """It ends the process from within."""

    def pay(self, action):
        """Nothing any more."""
        sys.exit(0)


class NoStep(Walk):
    """Its `step` has lost its return, and is called by no wrapper of gymnasium's."""

    def step(self, action):
        """Nothing."""


class Payment(Walk):
    """It pays what it was made with."""

    def __init__(self, payment):
        self.payment = payment

    def step(self, action):
        """The same each time."""
        obs, _, *rest = super().step(action)
        return obs, self.payment, *rest


class Torch(Walk):
    """It has torch as it likes it: float64, and no gradients."""

    def __init__(self):
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        self.weight = torch.ones(2, 2)

    def pay(self, action):
        """A product with what it makes now."""
        assert not torch.is_grad_enabled()
        return float((self.weight @ torch.ones(2)).sum())


class Single(Walk):
    """A simulator that can exist only once."""

    alive: ClassVar[list] = []

    def __init__(self):
        if self.alive:
            raise RuntimeError("the licence is for one simulator")
        self.alive.append(self)

    def close(self):
        """Give the licence back."""
        self.alive.clear()


class Unfilmed(Single):
    """Such a simulator, whose pictures fail."""

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        """Find no screen."""
        raise RuntimeError("no screen")


class Display(Walk):
    """One display for all, which shuts down for all when one of them is closed."""

    opened: ClassVar[list] = []
    shut: ClassVar[list] = []

    def __init__(self):
        self.opened.append(self)

    def pay(self, action):
        """Draw."""
        assert not self.shut, "the display is shut"
        return 1.0

    def close(self):
        """Shut it."""
        self.shut.append(self)


class Spaceless(gym.Env):
    """Its author forgot the spaces."""

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}


class Foreign(Spaceless):
    """Its spaces are of another library, and look alike."""

    observation_space = action_space = SimpleNamespace(shape=(4,), dtype=np.float32)


class Lost(Rude):
    """It renders, but it cannot be reset."""

    def reset(self, *, seed=None, options=None):
        """Fail."""
        raise RuntimeError("the map is lost")


class Mover(Walk):
    """It works in another directory from the moment it is made."""

    def __init__(self):
        super().__init__()
        os.chdir(tempfile.gettempdir())


class Dier(Walk):
    """Its process ends in its first step, where it was reset with the seed 5."""

    def reset(self, *, seed=None, options=None):
        """Open an episode."""
        self.dies = seed == 5
        return super().reset(seed=seed, options=options)

    def pay(self, action):
        """Nothing, if at all."""
        if self.dies:
            os._exit(1)
        return 0.0


class Sleeper(Walk):
    """It takes its time when it is read back."""

    def __setstate__(self, attributes):
        time.sleep(60)


class Starter(Walk):
    """It has a simulator, which nobody stops, and starts another one when it is read back."""

    def __setstate__(self, attributes):
        vars(self).update(attributes)
        simulator = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with Path("simulators").open("a") as file:
            file.write(f"{simulator.pid}\n")


class Forker(Walk):
    """Each step starts a process, and asks it to end as the test says."""

    def pay(self, action):
        """Nothing."""
        forks = multiprocessing.get_context("fork")
        begun = forks.Event()  # a signal that comes ahead of this may be lost
        process = forks.Process(target=lambda: begun.set() or time.sleep(60))
        process.start()
        begun.wait()
        Forker.ask(process)
        return 0.0


gym.register("Rude-v0", Rude)


# a copy of what the id holds is not possible, so gymnasium says that there is no spec
class Battery(Walk):
    """Its first step fails, with % in the line and in the text."""

    def step(self, action):
        """Fail."""
        raise RuntimeError(f"battery at {13 % 5}%")


gym.register("Battery-v0", Battery)
gym.register("Locked-v0", partial(lambda lock: Walk(), threading.Lock()))
for probe in (
    OldStep, OldReset, OldSeed, NoStep, Exit, Torch, Single, Unfilmed, Display, Sleeper, Mover,
    Dier, Starter, Spaceless, Foreign, Lost, Forker,
):  # fmt: skip
    gym.register(f"{probe.__name__}-v0", probe)
for kind in MISFITS:
    gym.register(f"{kind}-v0", Misfit, kwargs={"kind": kind})
    gym.register(f"Later{kind}-v0", Misfit, kwargs={"kind": kind, "at": 2})
for name, payment in (("Nothing", None), ("Two", np.ones(2)), ("Huge", 10**400)):
    gym.register(f"Pays{name}-v0", Payment, kwargs={"payment": payment})
for name, payment in (("Array", np.ones(1)), ("Large", 10**20), ("Flag", np.True_)):
    gym.register(f"Pays{name}-v0", Payment, kwargs={"payment": payment})
