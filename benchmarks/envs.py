"""Tasks that need an id of their own: `--env-id envs:MiniGrid-MemoryS7-Image-v0`.

MiniGrid's observation is a Dict with a mission text, which is no vector; here it is the image
alone, 7 x 7 cells of 3 numbers. MinAtar's games, `envs:MinAtar/Breakout-v1`, have to be registered.
"""

from __future__ import annotations

import time
from contextlib import suppress

import gymnasium as gym

with suppress(ImportError):
    from minatar.gym import register_envs

    register_envs()


def memory_s7() -> gym.Env:
    """Look at an object, walk a corridor, turn to the object like it; 245 steps at most."""
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(gym.make("MiniGrid-MemoryS7-v0"))


gym.register("MiniGrid-MemoryS7-Image-v0", memory_s7)


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
