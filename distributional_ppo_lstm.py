"""Recurrent PPO whose twin critics predict quantiles of the return.

    python distributional_ppo_lstm.py           # learns CartPole without velocities
    python distributional_ppo_lstm.py --help    # lists every flag with its range and its default

One iteration of `train` has four parts:

    collect_rollout      Only the actor runs. It acts for T steps in N environments.
    prepare_batch        The critics run over the whole rollout. What they predict gives advantages
                         and targets. Then the return statistics move.
    update               Adam takes a step on each minibatch of sequences, epoch after epoch. With
                         `target_kl` it stops early if the policy has moved that far.
    update_obs_moments   The observation statistics take in the rollout.

These things differ most from other PPO scripts:

    True successors      A time limit is not an end of the task. An episode that it cuts is
                         bootstrapped from the value of its own final observation (Pardo et al.
                         2018). Scripts that take it for a termination bootstrap from 0.
    Critics come later   Nothing needs a value while the actor acts. Running the critics over the
                         rollout afterwards is faster, and it reaches every true successor.
    Distributions        Each critic predicts quantiles of returns. By default they are quantiles of
                         lambda-returns. The presets `calibrated` and `averse` learn those of the
                         return itself. By default V, the value that advantages use, is not their
                         mean but one more output of the same head, the mean output
                         (`--value-from`). With `--cvar-weight` the policy learns from the tail of
                         the distribution.
    Two critics          Two value heads on one encoder and one LSTM predict the return, and each
                         has a V. By default the V that advantages use is the smaller one of the
                         two.
    Normalised returns   Critics predict (return - running mean) / running std.
                         Advantages are normalised once for a rollout, not for each minibatch.
    Separate networks    The actor shares no parameter with the critics. It has a loss and an Adam,
                         and the two critics together have one of each. So there is no
                         `vf_coef`.
    Stop before a step   With `--target-kl` the KL divergence from the policy that acted is measured
                         ahead of each step. The actor stops before its step on the first
                         minibatch whose divergence is larger than that. The critics stop after
                         as many minibatches as the actor has evaluated.

Under torchrun several processes share the environments. With one process `average`,
`with_common_mean` and `own` return their argument, so a first reading may skip them. N, B and other
letters count what one process has; `args.num_envs` and `args.batch_size` count what all have.

What else the algorithm calls is listed at the line "Nothing below is about the algorithm".

Shapes are written with these letters:

    T   steps of a rollout
    N   environments, of one process
    L   steps of a training sequence: consecutive ones of one environment, of one episode or more
    M   training sequences: all of a rollout, N T / L, or those of a minibatch
    B   samples of a minibatch, L M
    D   entries of an observation; an image has three axes instead, channels first
    F   inputs of an LSTM, which its encoder gives
    A   floats of a continuous action; in formulas A is the advantage instead
    P   parts of a discrete action
    H   width of an LSTM
    C   critics
    K   quantiles of a predicted distribution; with the mean output a critic has K + 1 outputs
    J   samples of a target distribution: 1 by default, K with `sr_lambda`

Rewards, values and returns are in the task's units, but rewards of Atari games are clipped.
Networks see normalised observations (images as they are) and predict normalised returns. A `Batch`
holds observations as the networks see them, and normalised targets and returns. Its advantages are
in the task's units until `update` normalises them.
Papers are cited where their formulas are. The sibling, distributional_ppo_categorical.py, is
feed-forward and has categorical critics.
"""

from __future__ import annotations

import os

# The actor multiplies small matrices in NumPy. OpenBLAS does that more slowly with several threads.
# OpenBLAS reads this variable when NumPy is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import ast
import atexit
import builtins
import contextlib
import copyreg
import errno
import inspect
import io
import json
import math
import multiprocessing
import numbers
import pickle
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count, pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import (
    IO,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from tensorboard.compat.proto.summary_pb2 import DataClass, Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, distributed, nn, optim
from torch.optim.adam import adam
from torch.utils.tensorboard import SummaryWriter, summary

SCRIPT = "distributional_ppo_lstm"  # checkpoints remember it


# ------------------------------------------------------------------------------------------- flags
# These types give flags their ranges. The flags themselves begin at `TaskArgs`.
@dataclass(frozen=True)
class Range:
    """The finite numbers that a flag may be, from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False  # excludes `low` itself

    def __contains__(self, value: float) -> bool:
        inside = self.low < value if self.above_low else self.low <= value
        finite = isinstance(value, int) or math.isfinite(value)  # of large integers it raises
        return finite and inside and value <= self.high

    def __str__(self) -> str:
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"
        if math.isfinite(self.low):
            return f"{'>' if self.above_low else '>='}{self.low:g}"
        return f"<={self.high:g}" if math.isfinite(self.high) else ""


def bounded(kind: Any, *bounds: Any, above_low: bool = False) -> Any:
    """Return an annotated type. `--help` shows its range, and `check_range` enforces it."""
    allowed = Range(*bounds, above_low=above_low)
    word = "INT" if kind in (int, int | None) else "FLOAT"
    metavar = str(allowed) if "," in str(allowed) else f"{word}{allowed}"
    if type(None) in get_args(kind):
        metavar = f"None|{metavar}"
    return Annotated[kind, allowed, tyro.conf.arg(metavar=metavar)]


@dataclass(frozen=True)
class IdleWhile:
    """Says that a flag has no effect while another one, `flag`, equals `value`.

    Without a `value`, it has none while `flag` is set to anything but "", 0 or False.
    Typing a flag that has no effect is an error.
    """

    flag: str
    value: Any = None

    def holds(self, args: Args) -> bool:
        """Tell whether these flags leave this one without effect."""
        found = getattr(args, self.flag)
        return bool(found) if self.value is None else found == self.value


LOG_STD_RANGE = (-5.0, 2.0)  # of Gaussian actions: a std from 0.0067 to 7.4
Count = bounded(int, 1)
CountOrZero = bounded(int, 0)
Seed = bounded(int, 0, 4_000_000_000)
Number = bounded(float)
NonNegative = bounded(float, 0)
NonNegativeOrNone = bounded(float | None, 0)
Positive = bounded(float, 0, above_low=True)
PositiveOrNone = bounded(float | None, 0, above_low=True)
Fraction = bounded(float, 0, 1)
TailMass = bounded(float, 1e-3, 1)
LogStd = bounded(float, *LOG_STD_RANGE)


@dataclass
class TaskArgs:
    """The task and how much of it is seen."""

    env_id: str = "CartPoleNoVel-v1"
    """Gymnasium id. `module:id` imports the module first, which registers the id. Ids with NoVel,
    as rl-baselines3-zoo has them (CartPoleNoVel-v1), hide the velocities."""
    total_timesteps: int = 100_000
    """Steps of the run, summed over all environments and rounded down to whole rollouts. A million
    is 1000000 or 1_000_000."""
    num_envs: Count = 8
    """Parallel environments, counted over all processes."""
    num_steps: Count = 64
    """Steps of each environment in a rollout."""
    masked_obs: tuple[int, ...] = ()
    """Indices, counted from 0, of entries of the observation vector that the networks see as zero.
    The velocities of CartPole are 1 and 3."""
    preset: tuple[str, ...] = ()
    """Presets, which the top of --help lists. They apply from left to right. Typed flags override
    them. In Python, `preset_args` applies them, and `Args` only records their names."""


@dataclass
class NetworkArgs:
    """Networks of the actor and of the critics. The actor shares no parameter with the critics."""

    hidden_size: Count = 64
    """Width of the encoders and of the hidden layers of the value heads."""
    lstm_hidden_size: Count = 64
    """Width of the actor's LSTM and of the critics' LSTM."""
    activation: Literal["tanh", "relu"] = "relu"
    """Activation of the encoders and of the value heads."""
    log_std_init: Annotated[LogStd, IdleWhile("init_from")] = 0.0
    """Initial log-std of Gaussian actions."""
    norm_obs: bool = True
    """Normalise observation vectors by running moments, clipped to +-10. The first rollout of a
    run that starts from nothing is only clipped."""


# For flags of the actor's update. While the actor is not trained, they change no weight.
ACTOR_ONLY = IdleWhile("learning_rate", 0.0)


@dataclass
class PPOArgs:
    """Advantages, the policy's update, and how both losses go through a rollout."""

    learning_rate: NonNegative = 1e-3
    """Learning rate of the actor's Adam at the start of the run. 0 keeps the actor's weights, and
    needs --critic-learning-rate."""
    anneal_lr: bool = True
    """Lower the learning rates of actor and critics linearly towards 0 over the run."""
    gamma: Fraction = 0.99
    """Discount per step. 1 suits tasks that terminate by themselves. Where only time limits end
    episodes, values would then grow without end, since limits are bootstrapped."""
    gae_lambda: Fraction = 0.9
    """Lambda of GAE, and of --value-target sr_lambda. 0 looks one step ahead, 1 to the end of the
    episode or of the rollout."""
    num_minibatches: Count = 2
    """Minibatches of an epoch. The number divides the training sequences of a rollout. Under
    torchrun it divides those of each process."""
    seq_len: CountOrZero = 0
    """Steps of a training sequence. Their number divides num_steps; 0 takes the whole rollout."""
    update_epochs: Count = 8
    """Passes over each rollout."""
    norm_adv: Annotated[bool, ACTOR_ONLY] = True
    """Normalise the advantages of each rollout."""
    norm_adv_memory: Annotated[CountOrZero, IdleWhile("norm_adv", False), ACTOR_ONLY] = 100
    """Rollouts that the running std of advantages remembers. Advantages are divided by their own
    std or by this one, whichever is larger. 0: always by their own."""
    clip_coef: Annotated[Positive, ACTOR_ONLY] = 0.2
    """Clipping range of the probability ratio."""
    ent_coef: Annotated[NonNegative, ACTOR_ONLY] = 0.0
    """Weight of the entropy bonus, per nat."""
    ent_coef_final: Annotated[NonNegativeOrNone, ACTOR_ONLY] = None
    """Weight that the entropy bonus moves towards, linearly over the run. None: constant."""
    min_entropy: Annotated[Number, IdleWhile("min_entropy_penalty", 0.0), ACTOR_ONLY] = 0.0
    """Mean entropy below which a penalty applies, in nats. Needs --min-entropy-penalty."""
    min_entropy_penalty: Annotated[NonNegative, ACTOR_ONLY] = 0.0
    """Weight of the mean entropy's distance below --min-entropy, per nat."""
    max_grad_norm: Positive = 0.5
    """The norm of the gradient is clipped to this, for the actor and for the critics separately."""
    target_kl: Annotated[PositiveOrNone, ACTOR_ONLY] = None
    """KL divergence from the policy that acted, in nats. It is measured before each step of Adam.
    At the first minibatch above this the actor stops, without that step. The critics then take one
    step more than the actor. None: no limit."""


@dataclass
class CriticArgs:
    """The critics and the value V that they give."""

    critic_learning_rate: PositiveOrNone = None
    """Learning rate of the critics' Adam at the start of the run. None: the same as the actor's."""
    num_critics: Literal[1, 2] = 2
    """Value heads, each with a hidden layer of its own. They share the layers before it."""
    value_from: Literal["distribution", "mean_head"] = "mean_head"
    """Where V comes from. distribution: its mean. mean_head: the mean output, one more output.
    Squared error fits it, so V learns rare rewards, too."""
    dist_coef: NonNegative = 1.0
    """Weight of the distribution's loss beside that of V. With 0 the critics learn V alone, and the
    distribution that they predict means nothing."""
    twin_reduce: Annotated[Literal["min", "mean"], IdleWhile("num_critics", 1)] = "min"
    """How two critics give one prediction. min: that of the critic with the smaller V. mean: an
    equal mixture of both, whose V is the mean of theirs."""
    norm_returns: bool = True
    """Critics predict (return - running mean) / running std (PopArt)."""
    norm_returns_memory: Annotated[Count, IdleWhile("norm_returns", False)] = 10
    """Rollouts that the return statistics remember. The newest one weighs at least
    1 / (this + 1)."""
    vf_clip_coef: Annotated[Positive, IdleWhile("vf_clip", "none")] = 0.2
    """How far a prediction may move in an update before the loss rewards no further move, in
    normalised returns, or in the task's units with --no-norm-returns. Needs --vf-clip."""
    value_target: Literal["lambda_return", "sr_lambda"] = "lambda_return"
    """What the distribution learns. lambda_return: lambda-returns, which vary less than returns, so
    that the predicted risk is usually too small. sr_lambda: samples of the return."""


# ---- value distribution: quantiles (flags) -------------------------------------------------------
# To use another kind of value distribution, replace this block and the block "(functions)" below.
# The rest of the file uses three names of this block: `ValueDistributionArgs`, which must have a
# flag `vf_clip`, `CALIBRATED` and `ROBOTS`. Of the block "(functions)" it uses `ValueDistribution`
# alone, whose members the list above that class names.
@dataclass
class ValueDistributionArgs:
    """Quantiles of the return."""

    num_quantiles: Count = 32
    """Quantiles that each critic predicts."""
    kappa: NonNegative = 0.05
    """Huber threshold of the quantile loss, in normalised returns, or in the task's units with
    --no-norm-returns. 0 gives the pinball loss."""
    vf_clip: Literal["none", "per_quantile", "mean_only", "mean_and_variance"] = "none"
    """none: no value clipping. Otherwise each state has the larger one of two losses: the plain
    one, and that of clipped predictions. per_quantile: no quantile moves further than
    --vf-clip-coef. mean_only: their mean does not. mean_and_variance: nor does their spread grow
    beyond twice the old one. All three clip V as well."""


CALIBRATED = {"kappa": 0.0, "num_quantiles": 51}  # the presets calibrated and averse set these
ROBOTS: dict[str, Any] = {}  # the preset for robots sets nothing of quantiles


# ---- end of value distribution -------------------------------------------------------------------


@dataclass
class RiskArgs:
    """Conditional value at risk (CVaR), for metrics and for a risk-averse policy."""

    cvar_alpha: TailMass = 0.05
    """Share of the worst returns that CVaR averages. 1 gives the mean."""
    cvar_weight: Annotated[Fraction, IdleWhile("cvar_alpha", 1.0), ACTOR_ONLY] = 0.0
    """Weight of the CVaR advantage. 0 learns from the mean alone, 1 from CVaR alone. With
    --cvar-alpha 1 it has no effect. Use it with the flags of the preset averse, since
    lambda-returns vary too little."""


@dataclass
class RunArgs:
    """What a run is called, when it is saved, and how it is evaluated."""

    exp_name: str = "dppo_lstm"
    """Name of the experiment, a part of the run directory's name."""
    seed: Seed = 1
    """Seed of environments, weights and sampling."""
    run_dir: str = "runs"
    """Directory in which the run directory is created."""
    eval_episodes: CountOrZero = 50
    """Episodes of an evaluation. 0 evaluates nothing, and opens no environment for it."""
    eval_every: Annotated[CountOrZero, IdleWhile("eval_episodes", 0)] = 0
    """Iterations (rollouts) between evaluations. The agent with the highest mean return is then
    kept in best.pt. 0 evaluates only at the end."""
    eval_sampled: Annotated[bool, IdleWhile("eval_episodes", 0)] = False
    """Evaluate actions that the policy samples. The default evaluates the policy's mode."""
    checkpoint_every: CountOrZero = 100
    """Iterations between checkpoints. There is one ten minutes after the last one as well. 0: none
    in between. In any case there is one at the end, after a signal, with each new best evaluation
    and, with --capture-video, around each evaluation."""
    save_envs: Literal["proven", "always", "never"] = "proven"
    """Save the environments as well, if they can be pickled, for an exact resume. proven: a resume
    first lets another process read copies back and step them once, and opens new episodes if that
    fails. always: it reads them back at once. never: a resume opens new episodes. With
    --async-envs it always does."""
    capture_video: Annotated[bool, IdleWhile("eval_episodes", 0)] = False
    """Film the first 3 episodes of every evaluation. Needs moviepy."""
    resume: str = ""
    """Run directory to continue with its own flags. These may change: --total-timesteps (it may
    grow), --eval-every, --checkpoint-every, --save-envs, --capture-video, --torch-threads and, as
    long as there is no best.pt, --eval-episodes and --eval-sampled. With more steps schedules go by
    the new total, so that a learning rate that had fallen jumps up."""
    init_from: str = ""
    """Run directory or checkpoint whose weights and statistics the run starts from. Steps,
    optimizers and what --norm-adv-memory remembers start anew. With --preset critics alone, the
    flags of learning that it ran with are taken as well."""
    evaluate: str = ""
    """Run directory, whose last checkpoint counts, or a checkpoint such as best.pt, to evaluate
    with its own flags. Nothing is trained. --eval-episodes, --eval-sampled, --seed, --capture-video
    and --torch-threads may differ from the run's. Another --seed plays other episodes than those
    that chose best.pt, which flatter it."""


@dataclass
class MachineArgs:
    """The machine."""

    cuda: bool = False
    """Train on the GPU. Actions on vectors are computed on the CPU all the same. Small networks are
    faster without this flag."""
    torch_deterministic: Annotated[bool, IdleWhile("cuda", False)] = True
    """Use deterministic cuDNN kernels; others may still differ in the last digits. Runs on the CPU
    repeat exactly in any case."""
    async_envs: bool = False
    """Step environments in other processes, in equal shares and at most one process for each core.
    It pays for slow simulators. A resume opens new episodes. A program of your own has to call
    train under its main guard."""
    torch_threads: Count = 1
    """CPU threads of torch, and as many again where actor and critics train at once. One is the
    fastest for small networks. Acting on vectors is NumPy's, which takes one."""


GROUPS = {  # in the order of --help; a new one is also a base of `Args`
    "task": TaskArgs,
    "networks": NetworkArgs,
    "ppo": PPOArgs,
    "critics": CriticArgs,
    "value_distribution": ValueDistributionArgs,
    "risk": RiskArgs,
    "run": RunArgs,
    "machine": MachineArgs,
}


@dataclass
class Args(  # in the reverse order of GROUPS: fields of the last base come first, as in --help
    MachineArgs, RunArgs, RiskArgs, ValueDistributionArgs,
    CriticArgs, PPOArgs, NetworkArgs, TaskArgs,
):  # fmt: skip
    """All flags. A value out of its range raises `UsageError`, as `Args(gamma=1.9)` does."""

    def __post_init__(self) -> None:
        check_flags(self)

    @property
    def batch_size(self) -> int:
        """Return the number of samples of a rollout, counted over all processes."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Return the number of rollouts of the run."""
        return self.total_timesteps // self.batch_size

    @property
    def sequence_length(self) -> int:
        """Return L, the steps of a training sequence."""
        return self.seq_len or self.num_steps

    @property
    def uses_entropy(self) -> bool:
        """Tell whether the policy's loss has a term of the entropy."""
        return bool(self.ent_coef or self.ent_coef_final or self.min_entropy_penalty)

    @property
    def is_atari(self) -> bool:
        """Tell whether the task is an Atari game, whose rewards are clipped for learning."""
        return self.env_id.split(":")[-1].startswith("ALE/")


# ------------------------------------------------------------------------- what flows, with shapes
class Carry(NamedTuple):
    """The actor hands this from one rollout to the next."""

    obs: np.ndarray  # (N, D) raw, to act on next
    episode_start: np.ndarray  # (N,) bool, whether obs opens an episode
    actor_state: np.ndarray  # (2, N, H) h and c before obs is seen, zero where an episode opens


class Rollout(NamedTuple):
    """A rollout holds T steps of N environments."""

    obs: Tensor  # (T, N, D) s_t, raw
    next_obs: Tensor  # (T, N, D) true successor s'_t, raw: the final one where an episode ended
    episode_start: Tensor  # (T, N) bool, whether s_t opens an episode
    actions: Tensor  # (T, N, P) indices or (T, N, A) floats, as they were sampled
    params: Tensor  # (T, N, P, largest part) or (T, N, 2, A), of the action distribution
    rewards: Tensor  # (T, N) float64, in the task's units; those of Atari games are clipped
    terminated: Tensor  # (T, N) bool: s'_t is terminal and nothing follows
    truncated: Tensor  # (T, N) bool: cut by a time limit; s'_t has a value, unless terminated too
    actor_state: Tensor  # (T / L, 2, N, H) before each training sequence
    episodes: list[tuple[int, float, int]]  # step t, return and length of each that ended


class Batch(NamedTuple):
    """A batch holds M training sequences of a rollout, of L steps each. No tensor has a graph.

    `for_actor` and `for_critics` keep the fields that one loss reads. The others are None there.
    """

    obs: Tensor  # (L, M, D) normalised; images as they are
    episode_start: Tensor  # (L, M) bool
    # States ahead of each sequence. They stay as they are in all epochs, although weights move.
    actor_state: Tensor  # (2, M, H) from the rollout
    critic_state: Tensor  # (2, M, H) from `run_critics`; `unroll_lstm` zeroes it, where due
    actions: Tensor  # (L, M, P) or (L, M, A)
    params: Tensor  # (L, M, P, largest part) or (L, M, 2, A) of the policy that acted
    log_probs: Tensor  # (L, M) of the actions under that policy, nats
    advantages: Tensor  # (L, M) in the task's units, which `update` normalises
    targets: Tensor  # (L, M, J) what the value distributions learn, normalised returns
    returns: Tensor  # (L, M) lambda-returns, normalised: what V learns
    old_predictions: Tensor  # (L, M, C, K or K + 1) before the update, for value clipping

    def for_actor(self) -> Batch:
        """Return what the actor's loss reads. The other fields are None."""
        return self._replace(critic_state=None, targets=None, returns=None, old_predictions=None)

    def for_critics(self) -> Batch:
        """Return what the critics' loss reads. The other fields are None."""
        return self._replace(
            actor_state=None, actions=None, params=None, log_probs=None, advantages=None
        )


# --------------------------------------------------------------------------------------- algorithm
def train(args: Args) -> dict[str, Any]:
    """Train, evaluate and save.

    `run.iterations` seeds torch ahead of each iteration, plays an evaluation that a resume owes,
    and evaluates after the last iteration. `run.end_iteration` evaluates and saves where that is
    due.

    Returns the last value of every metric that is a number, and `run_dir`. A fault while it trains
    is raised with a note that names the last checkpoint.

    The first Ctrl-C, a SIGTERM, or a closed terminal ends the run after its iteration, or within an
    evaluation, with a checkpoint and KeyboardInterrupt. The generators of Python, NumPy and torch
    on the CPU are afterwards what they were. Options of torch stay as the run set them, among them
    the number of threads.
    """
    run, agent, optimizers, envs = start(args)  # anew, resumed, or with the weights of another run
    with run:
        carry, critic_state = open_episodes(envs, agent, run)
        for progress in run.iterations():
            rollout, carry = collect_rollout(envs, agent, carry, args)
            run.lap("rollout")
            batch, critic_state, metrics = prepare_batch(agent, rollout, critic_state, args)
            run.lap("values")
            metrics |= update(agent, optimizers, batch, args, progress)
            # After `prepare_batch`, which has to normalise observations as the actor did.
            agent.update_obs_moments(rollout.obs)
            run.lap("update")
            run.end_iteration(rollout, metrics, (*carry, critic_state.cpu()))
    return run.results


def collect_rollout(
    envs: gym.vector.VectorEnv, agent: Agent, carry: Carry, args: Args
) -> tuple[Rollout, Carry]:
    """Act for T steps in N environments. Returns the rollout and what the next one starts from.

    Only the actor runs, and no statistics move. Where an episode ends, the environment is reset
    within the same step: `envs.step` then gives the first observation of the next episode, and the
    final observation of the old one comes in `info`.

    Raises RuntimeError for observations and rewards that are not finite.
    """
    T = args.num_steps
    N = envs.num_envs
    obs = np.empty((T, N, *carry.obs.shape[1:]), carry.obs.dtype)
    next_obs = np.empty_like(obs)
    rewards = np.empty((T, N))
    terminated = np.empty((T, N), bool)
    truncated = np.empty((T, N), bool)
    episode_start = np.empty((T, N), bool)
    outputs = []  # of the actor, (N, num_outputs) a step
    actions = []  # (N, P) or (N, A) a step
    actor_states = []  # (2, N, H) a training sequence
    episodes = []

    current_obs, starts, state = carry
    policy = agent.numpy_policy()
    # The noise of the whole rollout. All processes draw that of all environments, and each takes
    # its own part. Gaussian noise has the policy's std already.
    noise = own(agent.action_dist.noise(T, args.num_envs)).numpy()
    with tasks_draw_apart():  # tasks may draw from torch's generator, and must not move ours
        for t in range(T):
            if t % args.sequence_length == 0:
                actor_states.append(state)
            obs[t] = current_obs
            episode_start[t] = starts
            output, state = policy(obs[t], state)
            outputs.append(output)
            actions.append(agent.action_dist.sample(output, noise[t]))

            result = envs.step(agent.action_dist.to_env(actions[t]))
            current_obs, rewards[t], terminated[t], truncated[t], info = result
            next_obs[t] = current_obs  # replaced below where an episode ended
            ended = terminated[t] | truncated[t]
            if ended.any():  # `make_together` asks for SAME_STEP: the next episode is open already
                next_obs[t, ended] = np.stack(info["final_obs"][ended])
                state = state * ~ended[:, None]  # (2, N, H): zero where the next episode opens
                episodes += finished_episodes(info, ended, t)
            starts = ended
            check_finite(f"step {t} of the rollout", next_obs[t], current_obs, rewards=rewards[t])

    if args.is_atari:
        rewards = rewards.clip(-1, 1)  # `episodes` keeps unclipped returns

    def to_device(x: np.ndarray) -> Tensor:
        return torch.as_tensor(x, device=agent.device)

    with torch.no_grad():
        params = agent.action_dist(to_device(np.stack(outputs)))
    rollout = Rollout(
        obs=to_device(obs),
        next_obs=to_device(next_obs),
        episode_start=to_device(episode_start),
        actions=to_device(np.stack(actions)),
        params=params,
        rewards=to_device(rewards),
        terminated=to_device(terminated),
        truncated=to_device(truncated),
        actor_state=to_device(np.stack(actor_states)),
        episodes=episodes,
    )
    return rollout, Carry(current_obs.copy(), starts, state)


def run_critics(
    agent: Agent, rollout: Rollout, obs: Tensor, next_obs: Tensor, state: Tensor, args: Args
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predict the return distribution of every state s_t and of every true successor s'_t.

    obs and next_obs are (T, N, D), normalised. Of next_obs only the last steps of stretches (below)
    are read. state is (2, N, H), that of the critics' LSTM before step 0. Returns the outputs of
    all critics for both, each (C, T, N, K or K + 1), the states (T / L, 2, N, H) before each
    training sequence, and the state after the last step.

    The pass over time is cut into stretches. A stretch ends for one of two reasons:

        a training sequence ends        The next one starts from the state after it, and nn.LSTM
                                        returns only the state after its last step.
        a time limit cuts an episode    There s'_t is not s_{t+1} but the final observation, in one
                                        environment or more (Pardo et al. 2018).

    Elsewhere s'_t is s_{t+1}, so the outputs for successors are those for states, one step later.
    The last step of a stretch has no successor inside it. So the LSTM takes one extra step, to
    s'_t, from the state after the last one. The state that this leaves is dropped.

    A termination cuts nothing. The outputs for its s'_t may be of the next episode, but `gae` and
    the targets multiply them by 0. (0 times NaN would be NaN, but `gae` refuses values that
    are not finite.)

    The returned states are raw: where an episode opens, they still hold that of the previous one.
    `unroll_lstm` sets it to zero there. The update starts its training sequences from
    these states in every epoch, although the weights have moved since. The state ahead of step 0
    comes from the weights of earlier passes.
    """
    body = agent.critic_body
    time_limit = (rollout.truncated & ~rollout.terminated).any(1).tolist()
    ends = [t + 1 for t in range(args.num_steps)
            if time_limit[t] or (t + 1) % args.sequence_length == 0]  # fmt: skip
    inputs = body.encoder(obs)
    features = []
    next_features = []
    states = []

    for first, end in pairwise([0, *ends]):
        if first % args.sequence_length == 0:  # a training sequence begins; a limit only cuts
            states.append(state)
        starts = rollout.episode_start[first:end]
        stretch, state = body.unroll(inputs[first:end], state, starts)
        successor, _ = body.step(next_obs[end - 1], state)
        features.append(stretch)
        next_features.append(stretch[1:])
        next_features.append(successor[None])

    outputs = agent.value_outputs(torch.cat(features))
    next_outputs = agent.value_outputs(torch.cat(next_features))
    return outputs, next_outputs, torch.stack(states), state


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages A by GAE with correct time limits. Returns A, and A + V.

        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - (terminated_t or truncated_t)) * A_{t+1}

    All tensors are (T, N), and terminated and truncated are bool. s'_t is the true successor: the
    final observation where an episode ended. A step that is terminated and truncated counts as
    terminated. After the last step A is 0, since V(s') has what follows. A + V is the
    lambda-return, since next_values[t] is values[t + 1] inside episodes. The results keep the
    graphs of rewards, values and next_values. Where values have one, detach next_values.

    The two masks differ. Termination cuts the bootstrap, since nothing follows. Either end cuts the
    recursion, since the rewards of the next episode must not leak into this one.

    A program that imports this may pass rewards of several terms, (T, N, terms), and such values;
    the masks stay (T, N).

    Raises ValueError for other shapes, for no steps at all and for entries that are not finite, and
    TypeError for masks of another dtype.
    Source: Schulman et al. 2016, eq. 16; time limits: Pardo et al. 2018.
    """
    if terminated.dtype != torch.bool or truncated.dtype != torch.bool:  # ~1 would be -2
        raise TypeError("gae: terminated and truncated must be tensors of bool")
    shapes = [tuple(x.shape) for x in (rewards, values, next_values, terminated, truncated)]
    steps = rewards.shape[: terminated.dim()]  # masks lack further axes
    if not steps or shapes != [rewards.shape] * 3 + [steps] * 2:
        names = "rewards, values, next_values, terminated and truncated"
        raise ValueError(f"gae: the shapes of {names} are {shapes}")
    if not len(rewards):
        raise ValueError("gae: there are no steps")
    for name, x in (("rewards", rewards), ("values", values), ("next_values", next_values)):
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise ValueError(f"gae: {bad} of {x.numel()} {name} are not finite")

    shape = terminated.shape + (1,) * (values.dim() - terminated.dim())
    dtype = torch.promote_types(values.dtype, torch.float32)  # bfloat16 would round gamma
    not_terminated = (~terminated).to(dtype).view(shape)
    not_ended = (~(terminated | truncated)).to(dtype).view(shape)
    delta = rewards + gamma * not_terminated * next_values - values  # (T, N)
    decay = gamma * gae_lambda * not_ended

    advantage = torch.zeros_like(delta[0])
    advantages = []  # from the last step to the first
    for delta_t, decay_t in zip(delta.flip(0), decay.flip(0)):
        advantage = torch.addcmul(delta_t, decay_t, advantage)
        advantages.append(advantage)
    advantages = torch.stack(advantages).flip(0)
    return advantages, advantages + values


@torch.no_grad()
def prepare_batch(
    agent: Agent, rollout: Rollout, critic_state: Tensor, args: Args
) -> tuple[Batch, Tensor, dict]:
    """Turn a rollout into a batch. Returns it, the critics' state after the rollout, and metrics.

    The order matters (van Hasselt et al. 2016). The return statistics of earlier rollouts,
    `dist.moments`, turn this one's values into the task's units: std * value + mean. These values
    give advantages and targets. Then the statistics take in the targets' mean and a variance: that
    of the targets, or the mean of (V - the targets' mean)^2 if that is larger.
    The value heads are rescaled at the same time.

    The new statistics normalise targets and old values for the update, and decode the next rollout.
    So a rollout is decoded on the scale that its critics were last trained on. The first rollout
    has no such scale, so step 0 makes one from its rewards.

    Side effects: `dist.moments` moves, and the value heads are rescaled. A second call on the same
    rollout would move them again.
    """
    dist = agent.value_dist

    # 0. The first rollout has no statistics before it. The sums of its rewards set them. Its
    #    targets are taken in as well, in step 3. So it counts twice. Later ones soon outweigh it.
    if args.norm_returns and dist.moments.count == 0:
        dist.moments.merge(*first_return_moments(rollout, args), weight=1)

    # 1. The critics predict distributions of the return from every s_t and every s'_t.
    obs = agent.normalize_obs(rollout.obs)
    next_obs = agent.normalize_obs(rollout.next_obs)
    outputs, next_outputs, critic_states, last_critic_state = run_critics(
        agent, rollout, obs, next_obs, critic_state, args
    )
    reduced = dist.reduce_twins(outputs)  # (C, T, N, K or K + 1) -> (T, N, K or K + 1)
    next_reduced = dist.reduce_twins(next_outputs)

    # 2. They give advantages and targets, in the task's units.
    advantages, returns, targets = advantages_and_targets(
        dist, rollout, reduced, next_reduced, args
    )
    # This comes ahead of step 3, since it decodes by the old statistics.
    metrics = describe_critics(dist, rollout, outputs, reduced, next_reduced, returns)

    # 3. The targets move the return statistics, and the value heads are rescaled.
    old_predictions, moments_metrics = dist.move_statistics(agent.critic_heads, outputs, targets)
    metrics |= moments_metrics

    # 4. Time is cut into training sequences.
    cut = partial(cut_time, length=args.sequence_length)
    batch = Batch(
        obs=cut(obs),
        episode_start=cut(rollout.episode_start),
        actor_state=join_sequences(rollout.actor_state),
        critic_state=join_sequences(critic_states),
        actions=cut(rollout.actions),
        params=cut(rollout.params),
        log_probs=cut(agent.action_dist.log_prob(rollout.params, rollout.actions)),
        advantages=cut(advantages),
        targets=cut(dist.encode_targets(targets)),
        returns=cut(dist.moments.normalize(returns).float()),
        old_predictions=cut(old_predictions.movedim(0, 2).float()),  # C comes third
    )
    return batch, last_critic_state, metrics


def advantages_and_targets(
    dist: ValueDistribution, rollout: Rollout, reduced: Tensor, next_reduced: Tensor, args: Args
) -> tuple[Tensor, Tensor, Any]:
    """Return three things: advantages, lambda-returns, and targets of the value distribution.

    The first two are (T, N). All are in the task's units. reduced and next_reduced are the outputs
    (T, N, K or K + 1) for s_t and s'_t.
    """
    advantages, returns = gae(
        rollout.rewards,
        dist.value(reduced),
        dist.value(next_reduced),
        rollout.terminated,
        rollout.truncated,
        args.gamma,
        args.gae_lambda,
    )
    if args.value_target == "sr_lambda":
        targets = dist.sample_targets(rollout, next_reduced, args.gae_lambda)
    else:
        targets = dist.point_targets(returns)
    if args.cvar_weight > 0 and args.cvar_alpha < 1:
        risk_advantages = dist.risk_advantages(targets, reduced)
        advantages = advantages.lerp(risk_advantages, args.cvar_weight)
    return advantages, returns, targets


def cut_time(x: Tensor, length: int) -> Tensor:
    """Cut (T, N, ...) into training sequences of `length` steps, (L, M, ...)."""
    return join_sequences(x.unflatten(0, (-1, length)))


def join_sequences(x: Tensor) -> Tensor:
    """Put the sequences of all environments side by side: (T / L, S, N, ...) to (S, M, ...).

    Here M is T / L * N, and S is L, or 2 for the states of LSTMs.
    """
    return x.transpose(0, 1).flatten(1, 2)


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and population variance over the first axis, over the rows of all processes.

    All processes have equally many rows.
    """
    mean = average(x.mean(0))
    return mean, average((x - mean).square().mean(0))


def first_return_moments(rollout: Rollout, args: Args) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the discounted sums of rewards of the first rollout.

    A sum goes from a step to the end of its episode or of the rollout. The return statistics start
    from these moments, since untrained critics know nothing of the task's units.
    """
    # GAE of a critic that says 0, with lambda 1, sums the rewards to the end.
    zero = torch.zeros_like(rollout.rewards)
    sums, _ = gae(
        rollout.rewards, zero, zero, rollout.terminated, rollout.truncated, args.gamma, 1.0
    )
    return batch_moments(sums.flatten())


def scale_advantages(agent: Agent, advantages: Tensor, args: Args) -> Tensor:
    """Normalise the advantages of a rollout, but divide by no less than their usual std.

        A' = (A - mean) / max(std, running std)

    Advantages are those of one rollout, float64. The result has their shape, whatever it is. The
    running std is the root of the mean variance of recent rollouts, and `agent.adv_moments` holds
    it. Side effect: `agent.adv_moments` takes in this rollout, so call this function once for each.

    Where all returns are alike, advantages are noise, and dividing them by their own std would turn
    that noise into a gradient of full size. The running std prevents that once an earlier rollout
    has varied. The protection fades: Adam divides by the size of recent gradients, and after a few
    thousand small ones its steps are large again.

    The running std is our addition. `norm_adv_memory` 0 leaves it out, and without `norm_adv` the
    advantages stay as they are.
    """
    if not args.norm_adv:
        return advantages
    eps = 1e-30  # not 1e-8: a task may pay in tiny units, and float64 resolves this
    normalized = normalize_advantages(advantages, eps, average)
    if not args.norm_adv_memory:
        return normalized

    # The running std takes in this rollout. With means of 0 `merge` averages the variances alone.
    _, variance = batch_moments(advantages.flatten())
    agent.adv_moments.merge(torch.zeros_like(variance), variance, weight=1)
    std_ratio = (variance / agent.adv_moments.var).sqrt()
    std_ratio = std_ratio.nan_to_num(1.0)  # 0 / 0: no rollout has varied yet
    # The result is (A - mean) / std * min(1, std / running std), which is
    #               (A - mean) / max(std, running std).
    return normalized * std_ratio.clamp(max=1)


def normalize_advantages(
    advantages: Tensor, eps: float = 1e-8, across: Callable = lambda x: x
) -> Tensor:
    """Compute (A - mean) / (std + eps), with the population std over all entries.

    The formula has no branch on the size of std, which would make it discontinuous. Constant input
    gives zeros. With one process they are exact, because one entry is subtracted from all first.
    `across` gives the mean of a number over several processes that hold equal parts of the
    advantages. Every entry counts, so leave out padding. There must be at least one. (The defaults
    are for other programs; `scale_advantages` passes both.)
    """
    shifted = advantages
    for _ in range(2):  # twice, since a mean over processes of equal numbers is rounded
        shifted = shifted - across(shifted.flatten()[0])
    centered = shifted - across(shifted.mean())
    return centered / (across(centered.square().mean()).sqrt() + eps)


def minibatches(batch: Batch, args: Args) -> Iterator[Batch]:
    """Give the minibatches of all epochs. Each epoch shuffles the training sequences (axis 1).

    `update` calls it once for the actor and once for the critics. Their orders differ, and nothing
    needs them to agree.

    The number of minibatches divides that of the sequences; `check_sizes` requires it. The orders
    are drawn at once: the loops of actor and critics may run in two threads, and random numbers
    must not depend on which one is faster.
    """
    orders = [torch.randperm(batch.obs.shape[1]) for _ in range(args.update_epochs)]
    orders = torch.stack(orders).to(batch.obs.device)
    parts = (part for order in orders for part in order.chunk(args.num_minibatches))
    return (some_sequences(batch, part) for part in parts)


def some_sequences(batch: Batch, indices: Tensor) -> Batch:
    """Return some training sequences of a batch. Fields that are None stay None."""
    return Batch(*(None if x is None else x.index_select(1, indices) for x in batch))


def policy_loss(
    agent: Agent, mb: Batch, args: Args, ent_coef: float | Tensor
) -> tuple[Tensor, Tensor, dict]:
    """Compute the actor's loss on a minibatch: clipped surrogate and entropy.

    The advantages of the minibatch are already normalised. Without any flag of the entropy
    (`args.uses_entropy`) its term is left out, and `ent_coef` is not used. Returns the loss, a
    scalar with its graph, the mean KL(old || new) in nats, and metrics. A metric is a tensor
    without axes, or with one number for each sample; `policy/log_ratio` and `policy/kl_exact` must
    be among them.

    This is a pure function of the parameters and the minibatch, except that several processes share
    the mean of the entropy. It must not draw random numbers: the critics' loop may run beside it in
    another thread.

    Source: Schulman et al. 2017, eq. 9, without the critics' part.
    """
    features = agent.actor_body(mb.obs, mb.actor_state, mb.episode_start)
    params = agent.policy_params(features)
    log_ratio = agent.action_dist.log_prob(params, mb.actions) - mb.log_probs  # (L, M)
    pg_loss, approx_kl, clipfrac = clipped_policy_loss(
        log_ratio.flatten(), mb.advantages.flatten(), args.clip_coef
    )

    entropy = agent.action_dist.entropy(params)
    loss = pg_loss
    if args.uses_entropy:
        # The floor applies to the mean entropy of all processes, not to that of each.
        shifted = with_common_mean(entropy)
        loss = loss + entropy_loss(shifted, ent_coef, args.min_entropy, args.min_entropy_penalty)

    kl = agent.action_dist.kl(mb.params, params.detach()).mean()
    metrics = {
        "losses/policy_loss": pg_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": approx_kl,
        "losses/clipfrac": clipfrac,
        "policy/log_ratio": log_ratio.flatten(),
        "policy/kl_exact": kl,
    }
    return loss, kl, metrics


def value_loss(agent: Agent, mb: Batch, args: Args) -> tuple[Tensor, dict]:
    """Compute the critics' loss on a minibatch: the mean over samples, then over critics.

    Returns the loss, a scalar with its graph, and metrics, which are tensors without axes. This is
    a pure function of the parameters and the minibatch, and it must not draw random numbers: the
    actor's loop may run beside it in another thread. A loss that needs draws, such as that of IQN,
    gets them as a part of its targets, from `encode_targets`.

    `args` is for a loss of your own that reads flags. Those of this one are in `agent.value_dist`.
    """
    features = agent.critic_body(mb.obs, mb.critic_state, mb.episode_start)
    outputs = agent.value_outputs(features)  # (C, L, M, K or K + 1)
    old_predictions = mb.old_predictions.movedim(2, 0)
    losses, clipped = agent.value_dist.loss(outputs, mb.targets, mb.returns, old_predictions)
    means = losses.flatten(1).mean(1)  # (C,)
    loss = means.mean()
    metrics = {
        "losses/value_loss": loss,
        "twin/loss_1": means[0],
        "twin/loss_2": means[-1],
        "value/clip_fraction": clipped.mean(),
    }
    return loss, metrics


def update(
    agent: Agent, optimizers: Optimizers, batch: Batch, args: Args, progress: float
) -> dict[str, float]:
    """Train the actor and the critics on a rollout. The actor shares no parameter with the critics.

    Each of the two has its own loss, its own Adam and its own gradient norm, and goes through the
    rollout for `update_epochs` epochs of shuffled minibatches. With `target_kl` the actor may stop
    early. The critics then stop after as many minibatches as it has evaluated.

    `progress` is the share of the run that is done, 0 to 1. It sets the learning rates and the
    entropy coefficient (`schedules`). Then the advantages are normalised (`scale_advantages`). The
    rest is what two loops do, one after the other:

        for mb in actor_batches:
            loss, kl, _ = policy_loss(agent, mb, args, ent_coef)
            if kl > target_kl: break
            take a clipped step of the actor, and keep its log-std in range
        for mb in the first n of critic_batches:  # n minibatches had their policy_loss computed
            loss, _ = value_loss(agent, mb, args)
            take a clipped step of the critics

    Where that is faster (`second_thread_pays`) and there are cores for it, both loops run at the
    same time (`run_both`). The result is the same, since neither draws random numbers, and neither
    writes what the other reads. The critics do not know when the actor will stop, so they wait for
    a ticket before each step. The actor puts one into a queue for each minibatch that it
    has evaluated, and `run_both` puts None when its loop is over.

    Returns the metrics of `describe_advantages` and `describe_update`, and what `schedules` gave.
    Raises RuntimeError for a loss or a gradient that is not finite.
    """
    learning_rate, critic_learning_rate, ent_coef = schedules(args, progress)
    scaled = scale_advantages(agent, batch.advantages, args)
    described = describe_advantages(batch.advantages, scaled)
    batch = batch._replace(advantages=scaled.float())
    optimizers.actor.param_groups[0]["lr"] = learning_rate
    optimizers.critics.param_groups[0]["lr"] = critic_learning_rate

    actor_batches = minibatches(batch.for_actor(), args)
    critic_batches = minibatches(batch.for_critics(), args)
    tickets = SimpleQueue()  # one for each minibatch that the actor has evaluated, and None last
    (actor_metrics, actor_norms), (critic_metrics, critic_norms) = run_both(
        partial(train_actor, agent, optimizers.actor, actor_batches, args, ent_coef, tickets),
        partial(train_critics, agent, optimizers.critics, critic_batches, args, tickets),
        agent,
        between=partial(tickets.put, None),
    )
    described |= describe_update(actor_metrics, critic_metrics, actor_norms, critic_norms, args)
    return described | {
        "charts/learning_rate": learning_rate,
        "charts/critic_learning_rate": critic_learning_rate,
        "policy/entropy_coef": ent_coef,
    }


def train_actor(
    agent: Agent,
    optimizer: optim.Adam,
    batches: Iterator[Batch],
    args: Args,
    ent_coef: float,
    tickets: SimpleQueue,
) -> tuple[list[dict], list[float]]:
    """Take a step of the actor on each minibatch.

    The exact KL(old || new) of a minibatch is measured ahead of its step. The first one above
    `target_kl` ends the loop. A ticket lets the critics take a step. With a learning rate of 0
    the actor does not change, so only the first epoch is evaluated; the others give tickets alone.

    Returns metrics of each minibatch that was evaluated, and the norm of the gradient of each step
    that was taken.
    """
    evaluated = []  # metrics of each minibatch
    norms = []
    # A policy that is not trained does not move: its KL divergence is rounding.
    is_limited = args.target_kl is not None and args.learning_rate > 0
    largest_kl = args.target_kl if is_limited else math.inf
    parameters, _ = agent.parts()
    for i, mb in enumerate(batches):
        if args.learning_rate == 0 and i >= args.num_minibatches:
            tickets.put(True)  # nothing more to evaluate, but the critics get all their epochs
            continue

        inputs = (agent, mb, args, ent_coef)
        gradient, loss, kl, metrics = with_gradient(policy_loss, parameters, *inputs)
        mean_loss, mean_kl = average(torch.stack([loss, kl])).tolist()
        gradient = average(gradient)
        norm = float(gradient.norm())
        check_step(mean_loss, norm, f"minibatch {i} of the actor's update", "--learning-rate")

        evaluated.append(metrics)
        tickets.put(True)  # ahead of the break: the critics train on its minibatch as well
        if mean_kl > largest_kl:
            break

        norms.append(norm)
        take_step(optimizer, gradient, norm, args.max_grad_norm)
        agent.action_dist.clamp_parameters()
    return evaluated, norms


def train_critics(
    agent: Agent,
    optimizer: optim.Adam,
    batches: Iterator[Batch],
    args: Args,
    tickets: SimpleQueue,
) -> tuple[list[dict], list[float]]:
    """Take a step of the critics on each minibatch, on as many as the actor has evaluated.

    A ticket permits one step, and None ends the loop. Returns metrics of each minibatch, and the
    norm of each gradient.
    """
    evaluated = []
    norms = []
    _, parameters = agent.parts()
    for i, mb in enumerate(batches):
        if tickets.get() is None:  # the actor has stopped
            break
        gradient, loss, metrics = with_gradient(value_loss, parameters, agent, mb, args)
        mean_loss = float(average(loss))
        gradient = average(gradient)
        norm = float(gradient.norm())
        name = f"minibatch {i} of the critics' update"
        check_step(mean_loss, norm, name, "--critic-learning-rate")
        evaluated.append(metrics)
        norms.append(norm)
        take_step(optimizer, gradient, norm, args.max_grad_norm)
    return evaluated, norms


def with_gradient(compute_loss: Callable, parameters: list[nn.Parameter], *inputs: Any) -> tuple:
    """Compute a loss of `inputs` and its gradient, which is one vector for all parameters.

    Parameters that the loss does not use have a gradient of 0. Returns the gradient, and what
    `compute_loss` returns, with the loss and the metrics detached.
    """
    loss, *others, metrics = compute_loss(*inputs)  # others: the KL of `policy_loss`
    gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
    gradient = torch.cat([x.flatten() for x in gradients])
    metrics = {tag: x.detach() for tag, x in metrics.items()}
    return gradient, loss.detach(), *others, metrics


def take_step(optimizer: optim.Adam, gradient: Tensor, norm: float, max_norm: float) -> None:
    """Take a step of Adam down a gradient, whose norm is clipped.

    Adam has one parameter, the vector of `make_optimizers`. The parameters of the network are parts
    of it, in the order of `agent.parts()`.
    """
    [vector] = optimizer.param_groups[0]["params"]
    vector.grad = gradient * min(1.0, max_norm / (norm + 1e-6))
    optimizer.step()


class Optimizers(NamedTuple):
    """The actor and the critics have an Adam each. They share no parameter with each other."""

    actor: optim.Adam
    critics: optim.Adam


def make_optimizers(agent: Agent, args: Args) -> Optimizers:
    """Make Adam for the actor and for the critics, each for one vector of all their parameters.

    Side effect: the agent's parameters become views of these vectors, since a step costs time for
    each tensor, however small. A later `agent.to(...)` would break that. `VectorAdam` skips Adam's
    hooks, which cost time as well. `update` sets the learning rates anew. Raises ValueError for
    parameters that `agent.parts()` lacks.
    """
    trained = {id(x) for part in agent.parts() for x in part}
    named = agent.named_parameters()
    if lacking := [name for name, x in named if x.requires_grad and id(x) not in trained]:
        raise ValueError(f"Agent.parts: {', '.join(lacking)} would never be trained; add them")
    adams = []
    learning_rates = schedules(args, 0.0)[:2]
    for parameters, learning_rate in zip(agent.parts(), learning_rates):
        vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
        nn.utils.vector_to_parameters(vector, parameters)
        adams.append(VectorAdam([vector], learning_rate, eps=1e-5, fused=True))
    return Optimizers(*adams)


# ------------------------------------------------------------------------------------------ presets
class Preset(NamedTuple):
    """Flags for a kind of task or for a purpose."""

    about: str  # what it is for and where it comes from; --help shows it
    flags: dict[str, Any]


# First those of tasks, then those of a purpose. benchmarks/tuning.md tells which were tuned, and
# how. The preset `atari` has CleanRL's sizes and rates.
PURPOSES = ("calibrated", "averse", "critics")  # they go after the preset of a task
PRESETS = {
    "cartpole_novel": Preset("CartPole without its velocities: the defaults.", {}),
    "pendulum_novel": Preset(
        "Pendulum without its velocity, with a floor for the entropy.",
        {
            "env_id": "PendulumNoVel-v1",
            "num_envs": 4,
            "num_steps": 1000,
            "activation": "tanh",
            "learning_rate": 2e-3,
            "gamma": 0.9,
            "gae_lambda": 0.95,
            "num_minibatches": 20,
            "seq_len": 100,
            "update_epochs": 10,
            "min_entropy": 1.4,
            "min_entropy_penalty": 0.1,
        },
    ),
    "mountaincar_novel": Preset(
        "MountainCarContinuous without its velocity.",
        {
            "env_id": "MountainCarContinuousNoVel-v0",
            "total_timesteps": 300_000,
            "num_envs": 16,
            "num_steps": 500,
            "log_std_init": 2.0,
            "learning_rate": 3e-3,
            "gamma": 0.999,
            "gae_lambda": 0.95,
            "num_minibatches": 16,
            "seq_len": 250,
            "update_epochs": 10,
        },
    ),
    "mujoco_novel": Preset(
        'HalfCheetahNoVel-v5, or --env-id AntNoVel-v5 ... (pip install "gymnasium[mujoco]").',
        {
            "env_id": "HalfCheetahNoVel-v5",
            "total_timesteps": 1_000_000,
            "num_steps": 256,
            "log_std_init": -0.5,
            "activation": "tanh",
            "learning_rate": 3e-4,
            "critic_learning_rate": 1e-3,
            "num_minibatches": 16,
            "seq_len": 64,
            "update_epochs": 10,
            "norm_adv_memory": 0,
            "target_kl": 0.02,
            **ROBOTS,
        },
    ),
    "memory": Preset(
        "popgym:popgym-RepeatPreviousEasy-v0, or others by --env-id (pip install popgym).",
        {
            "env_id": "popgym:popgym-RepeatPreviousEasy-v0",
            "total_timesteps": 500_000,
            "eval_sampled": True,
        },
    ),
    "minigrid": Preset(
        "MiniGrid's memory task, codes one-hot (pip install minigrid, and benchmarks/envs.py).",
        {
            "env_id": "benchmarks.envs:MiniGrid-MemoryS7-OneHot-v0",
            "total_timesteps": 300_000,
            "eval_sampled": True,
            "lstm_hidden_size": 128,
            "learning_rate": 3e-3,
            "critic_learning_rate": 1e-3,
            "ent_coef": 0.02,
        },
    ),
    "atari": Preset(
        "Breakout, or --env-id ale_py:ALE/Pong-v5 (pip install ale-py opencv-python-headless).",
        {
            "env_id": "ale_py:ALE/Breakout-v5",
            "total_timesteps": 10_000_000,
            "num_steps": 128,
            "hidden_size": 512,
            "lstm_hidden_size": 128,
            "learning_rate": 2.5e-4,
            "gae_lambda": 0.95,
            "num_minibatches": 4,
            "update_epochs": 4,
            "clip_coef": 0.1,
            "ent_coef": 0.01,
        },
    ),
    "calibrated": Preset(
        "Predicts distributions of returns, not of lambda-returns. Name a task's preset first.",
        {
            "value_target": "sr_lambda",
            "twin_reduce": "mean",
            **CALIBRATED,
        },
    ),
    "averse": Preset(
        "Learns from the worst tenth of the returns. Name a task's preset first.",
        {
            "value_target": "sr_lambda",
            "twin_reduce": "mean",
            **CALIBRATED,
            "cvar_alpha": 0.1,
            "cvar_weight": 0.5,
        },
    ),
    "critics": Preset(
        "Trains the critics of --init-from alone, with that run's flags of learning.",
        {
            "total_timesteps": 200_000,
            "num_steps": 1000,
            "seq_len": 100,
            "num_minibatches": 20,
            "update_epochs": 6,
            "learning_rate": 0.0,
            "critic_learning_rate": 1e-3,
            "gae_lambda": 1.0,
        },
    ),
}


# ------------------------------------------------------------------ formulas of policy and moments
def schedules(args: Args, progress: float) -> tuple[float, float, float]:
    """Return both learning rates and the entropy coefficient at this fraction of the run.

    The rates are those of the actor and of the critics.
    """
    critic_learning_rate = args.critic_learning_rate
    if critic_learning_rate is None:
        critic_learning_rate = args.learning_rate
    rate_left = linear_schedule(1.0, 0.0, progress) if args.anneal_lr else 1.0
    final_ent_coef = args.ent_coef if args.ent_coef_final is None else args.ent_coef_final
    ent_coef = linear_schedule(args.ent_coef, final_ent_coef, progress)
    return rate_left * args.learning_rate, rate_left * critic_learning_rate, ent_coef


def linear_schedule(start: float, end: float, progress: float) -> float:
    """Compute start + (end - start) * progress, with progress clamped to [0, 1]."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute PPO's clipped surrogate. Returns loss, approx_kl and clip fraction, all scalars.

        r = exp(clamp(log_ratio, -20, 20)),  log_ratio = log pi_new(a|s) - log pi_old(a|s)
        loss = -mean(min(r * A, clip(r, 1 - eps, 1 + eps) * A))
        approx_kl = mean((r - 1) - log r)            in nats, >= 0 (Schulman's k3 estimator)
        clip fraction = mean(|r - 1| > eps)

    Both inputs are (B,), and each entry counts. ValueError is raised if they differ. Advantages
    should have no graph, or their gradient counts. The clamp keeps exp finite. Beyond it there is
    no gradient, so it is wide: a tight one would remove the gradient where r is far above 1 and A
    is negative, where PPO needs it most.
    Source: Schulman et al. 2017, eq. 7.
    """
    if log_ratio.shape != advantages.shape:  # (B,) and (B, 1) would give (B, B)
        shapes = f"{tuple(log_ratio.shape)} and {tuple(advantages.shape)}"
        raise ValueError(f"clipped_policy_loss: log_ratio and advantages are {shapes}")
    log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = (log_ratio.expm1() - log_ratio).mean()  # r - 1 would lose digits near r = 1
        clip_fraction = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
    return loss, approx_kl, clip_fraction


def entropy_loss(
    entropy: Tensor, ent_coef: float | Tensor, min_entropy: float, penalty_coef: float
) -> Tensor:
    """Compute -ent_coef * mean(H) + penalty_coef * relu(min_entropy - mean(H)), a scalar.

    entropy holds a number for each sample, in nats. That of a Gaussian may be negative, so a floor
    of 0 is not neutral. Source: Schulman et al. 2017, eq. 9; the floor is ours.
    """
    mean = entropy.mean()
    return -ent_coef * mean + penalty_coef * torch.relu(min_entropy - mean)


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute 1 - Var(targets - predictions) / Var(targets), a scalar.

    It is 0 where the targets do not vary. Raises ValueError where the shapes differ.
    """
    if predictions.shape != targets.shape:  # (B,) and (B, 1) would give (B, B)
        shapes = f"{tuple(predictions.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"explained_variance: predictions and targets are {shapes}")
    variance = targets.var(correction=0)
    residual = (targets - predictions).var(correction=0)
    # Equal targets may vary by rounding.
    constant = (variance == 0) | (targets.max() == targets.min())
    return torch.where(constant, 0, 1 - residual / variance)


class RunningMoments(nn.Module):
    """Running mean and variance, in float64, saved with the weights.

    `count` starts at 0, so the first update gives exactly the moments of its batch. A count above
    `max_count` is capped, so that old data fade. Moments are merged as in Chan et al. 1983; the
    difference E[x^2] - E[x]^2 would lose all digits where the mean is large. Do not cast a module
    that has these: float32 has no 1e-60, so that `floor` could be 0.
    """

    def __init__(self, shape: tuple[int, ...] = (), max_count: float | None = None) -> None:
        super().__init__()
        self.max_count = math.inf if max_count is None else max_count
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def floor(self) -> Tensor:
        """Return a small variance that `std` adds to `var`. It matters where data hardly vary.

        It is the square of a ten-millionth of the mean, which is what float32 resolves. It scales
        with the data, so their unit does not matter. 1e-60 serves data that are all 0.
        """
        return (1e-7 * self.mean).square() + 1e-60

    @property
    def at_floor(self) -> bool:
        """Tell whether the std is within 100 times its least value, as when all data are equal."""
        return bool((self.var <= 1e4 * self.floor).all())  # (100 times the least std) squared

    @property
    def std(self) -> Tensor:
        """Return sqrt(var + floor), the scale of `normalize` and `denormalize`."""
        return (self.var + self.floor).sqrt()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in a batch. Training does not call this; it uses `merge`.

        All axes ahead of the shape of the moments are samples. An empty batch changes nothing.
        `max_count` counts samples here. Entries have to be finite, here and in `merge`. Raises
        ValueError for a batch of another shape.
        """
        if x.shape[x.dim() - self.mean.dim() :] != self.mean.shape:  # entries would be mixed
            shapes = f"{tuple(x.shape)}, not (..., {', '.join(map(str, self.mean.shape))})"
            raise ValueError(f"RunningMoments: the batch is {shapes}")
        x = x.double().reshape(-1, *self.mean.shape)
        if len(x) == 0:
            return
        mean = x.mean(0)
        self.merge(mean, (x - mean).square().mean(0), len(x))

    @torch.no_grad()
    def merge(self, mean: Tensor, var: Tensor, weight: float) -> None:
        """Take in moments that were computed elsewhere, with this weight.

        `count` and `max_count` are in the unit of the weights: samples for observations, rollouts
        of weight 1 for returns and advantages. The first call needs a weight above 0.
        """
        old_count = self.count.clamp(max=self.max_count)  # one that was loaded may exceed it
        past = old_count / (old_count + weight)  # weight of the past in the merged moments
        delta = mean - self.mean
        between = past * delta.square()
        self.var = past * self.var + (1 - past) * (var + between)
        self.mean = self.mean + (1 - past) * delta  # a new tensor: callers may hold the old one
        self.count = (old_count + weight).clamp(max=self.max_count)

    def normalize(self, x: Tensor) -> Tensor:
        """Compute (x - mean) / std in float64, and return it in the dtype of x.

        Raises TypeError for integers.
        """
        if not x.is_floating_point():  # the result would be cut to integers
            raise TypeError(f"RunningMoments.normalize: x is {x.dtype}, not a float")
        return ((x.double() - self.mean) / self.std).to(x.dtype)

    def denormalize(self, z: Tensor) -> Tensor:
        """Compute std * z + mean, the inverse of `normalize`.

        It has the dtype of z. float32 loses the spread of data whose mean is large.
        """
        return (z * self.std + self.mean).to(z.dtype)


# ---- value distribution: quantiles (functions) ---------------------------------------------------
def quantile_midpoints(num_quantiles: int) -> Tensor:
    """Return the levels tau_i = (i + 0.5) / K, (K,). Source: Dabney et al. 2018a, lemma 2."""
    return (torch.arange(num_quantiles) + 0.5) / num_quantiles


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
    """Regress every predicted quantile on every target sample, (..., K) and (..., J) -> (...).

        u[b, i, j] = targets[b, j] - quantiles[b, i]
        L(u)       = 0.5 u^2 where |u| <= kappa, kappa (|u| - 0.5 kappa) elsewhere
        loss[b]    = mean_i mean_j |tau_i - 1{u < 0}| L(u) / kappa

    For kappa = 0 the factor |u| takes the place of L / kappa. That is the pinball loss. taus are
    (K,), or (..., K) where each state has its own. Quantiles may have further leading axes, as that
    of the critics. The indicator carries no gradient. Targets should have no graph, or their
    gradient counts.

    The loss is divided by kappa as in IQN, so that it meets the pinball loss as kappa goes to 0. It
    is a mean over i, where QR-DQN sums, so that its size does not depend on K.
    Raises ValueError for a kappa below 0, for levels that are not K, and unless targets are
    (..., J) for the same states as the quantiles. Targets of one number for each state, (...),
    would be taken for samples that all states share: give them as (..., 1). No error tells where
    they are (T, N) and T equals N.
    Source: Dabney et al. 2018a (QR-DQN), eq. 8 to 10; 2018b (IQN), eq. 3.
    """
    states = quantiles.shape[-targets.dim() : -1]
    lacks_samples = targets.dim() == 1 and quantiles.dim() > 1
    if lacks_samples or targets.shape[:-1] != states:
        shapes = f"{tuple(targets.shape)} and quantiles {tuple(quantiles.shape)}"
        raise ValueError(f"quantile_huber_loss: targets are {shapes}; give (..., J) samples")
    if kappa < 0:
        raise ValueError(f"quantile_huber_loss: kappa is {kappa}; it must not be below 0")
    if taus.shape[-1] != quantiles.shape[-1]:
        shapes = f"{tuple(taus.shape)} and quantiles {tuple(quantiles.shape)}"
        raise ValueError(f"quantile_huber_loss: taus are {shapes}; give a level for each")
    u = targets[..., None, :] - quantiles[..., None]  # (..., K, J)
    distance = u.abs()
    error = distance  # the pinball loss, for kappa = 0
    if kappa > 0:
        error = torch.where(distance < kappa, 0.5 * u.square() / kappa, distance - 0.5 * kappa)
    weight = (taus[..., None] - (u < 0).to(u.dtype)).abs()
    return (weight * error).mean((-2, -1))


def clip_quantiles(
    quantiles: Tensor, old_quantiles: Tensor, clip_delta: float, mode: str
) -> Tensor:
    """Keep quantiles, or only their mean, within d = clip_delta of the old, (..., K) -> (..., K).

    m is the mean over the K quantiles, and s = sqrt(variance + 1e-12):

        per_quantile:       q_old + clamp(q - q_old, -d, d)
        mean_only:          q + (m_c - m),  m_c = m_old + clamp(m - m_old, -d, d)
        mean_and_variance:  m_c + (q - m) * min(1, 2 s_old / s)

    Old quantiles should have no graph, or their gradient counts. For K = 1 each mode is PPO's value
    clipping, which is in the reference code of Schulman et al. 2017 but not in the paper. The modes
    are ours. Raises ValueError for another mode.
    """
    if mode == "per_quantile":
        return old_quantiles + (quantiles - old_quantiles).clamp(-clip_delta, clip_delta)
    mean = quantiles.mean(-1, True)
    old_mean = old_quantiles.mean(-1, True)
    clipped_mean = old_mean + (mean - old_mean).clamp(-clip_delta, clip_delta)
    if mode == "mean_only":
        return quantiles + (clipped_mean - mean)
    if mode != "mean_and_variance":
        raise ValueError(f"clip_quantiles: unknown mode {mode!r}")
    std = ((quantiles - mean).square().mean(-1, True) + 1e-12).sqrt()
    old_std = ((old_quantiles - old_mean).square().mean(-1, True) + 1e-12).sqrt()
    return clipped_mean + (quantiles - mean) * (2 * old_std / std).clamp(max=1)


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """Compute 0.5 (V - R)^2 of values (..., 1) and returns (...). Values (..., 0) give 0.

    Values may have further leading axes, as that of the critics. Returns should have no graph, or
    their gradient counts. Raises ValueError for other shapes, such as returns (B, 1).
    """
    leading = values.dim() - 1 - returns.dim()  # axes that returns lack
    alike = values.shape[max(leading, 0) : -1] == returns.shape
    if values.shape[-1] > 1 or not alike:  # all pairs would be compared
        shapes = f"{tuple(values.shape)} and returns {tuple(returns.shape)}"
        raise ValueError(f"squared_error: values are {shapes}; give (..., 1) and (...)")
    return 0.5 * (values - returns[..., None]).square().sum(-1)


def clip_values(values: Tensor, old_values: Tensor, clip_delta: float) -> Tensor:
    """Compute V_old + clamp(V - V_old, -d, d), as the reference code of Schulman et al. 2017.

    Both have one shape, and so has the result. ValueError is raised if they differ. Old values
    should have no graph, or their gradient counts.
    """
    if values.shape != old_values.shape:  # (B, 1) and (B,) would give (B, B)
        shapes = f"{tuple(values.shape)} and {tuple(old_values.shape)}"
        raise ValueError(f"clip_values: values and old values are {shapes}")
    return old_values + (values - old_values).clamp(-clip_delta, clip_delta)


def clipped_value_loss(loss: Tensor, loss_clipped: Tensor) -> Tensor:
    """Take max(loss, loss_clipped) for each state and critic, ahead of the minibatch's mean.

    Both have one shape, which the result has as well. Raises ValueError for other shapes.
    """
    if loss.shape != loss_clipped.shape:  # (B, 1) and (B,) would give (B, B)
        shapes = f"{tuple(loss.shape)} and {tuple(loss_clipped.shape)}"
        raise ValueError(f"clipped_value_loss: losses are {shapes}")
    return torch.max(loss, loss_clipped)


def cvar_weights(num_quantiles: int, alpha: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weights (K,) that the sorted quantiles have in their CVaR. Their sum is 1.

        CVaR_alpha = (1 / alpha) * integral_0^alpha F^-1(tau) dtau

    Quantile k lies at x = k on the axis x = K tau - 0.5. F^-1 is linear between neighbours: segment
    k runs from k to k + 1. The first one is continued to -0.5 and the last one to K - 0.5, so a
    CVaR may lie below the smallest quantile.

    Let [a, b] be the part of segment k below x = alpha K - 0.5, and m = (a + b) / 2 - k its middle.
    Over the part a linear function has the mean that it has in its middle, (1 - m) q_k + m q_{k+1}.
    The part's share of the integral is (b - a) / (alpha K).

    For alpha = 1 all weights are 1 / K instead, which gives the mean of the quantiles. So the
    weights jump as alpha reaches 1.

    The weights are on the CPU. Raises ValueError for alpha outside [1e-3, 1].
    Source: Rockafellar & Uryasev 2000, who have losses, the negative of returns, and the level
    1 - alpha; the interpolation is ours.
    """
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"cvar: alpha {alpha} is outside [1e-3, 1]")
    if alpha == 1 or num_quantiles == 1:
        return torch.full((num_quantiles,), 1 / num_quantiles, dtype=dtype)
    edges = torch.arange(num_quantiles).double()  # of the K - 1 segments, on the axis x
    edges[0] = -0.5  # the outermost segments reach on to the ends of the axis
    edges[-1] = num_quantiles - 0.5
    edges = edges.clamp(max=alpha * num_quantiles - 0.5)
    middle = (edges[1:] + edges[:-1]) / 2
    m = middle - torch.arange(num_quantiles - 1)
    share = edges.diff() / (alpha * num_quantiles)
    left = nn.functional.pad(share * (1 - m), (0, 1))  # goes to q_k
    right = nn.functional.pad(share * m, (1, 0))  # goes to q_{k+1}
    return (left + right).to(dtype or torch.get_default_dtype())


def cvar(quantiles: Tensor, alpha: float) -> Tensor:
    """Compute the mean of the lower tail of mass alpha, (..., K) -> (...). See `cvar_weights`.

    The levels are those of `quantile_midpoints`, in any order. Raises TypeError for integers, and
    ValueError for alpha outside [1e-3, 1].
    """
    if not quantiles.is_floating_point():  # weights would be cut to 0
        raise TypeError(f"cvar: quantiles are {quantiles.dtype}, not floats")
    weights = cvar_weights(quantiles.shape[-1], alpha, torch.float64).to(quantiles)
    return (quantiles.sort(-1).values * weights).sum(-1)


def value_at_risk(quantiles: Tensor, alpha: float) -> Tensor:
    """Compute F^-1(alpha) by the interpolation that `cvar_weights` describes, (..., K) -> (...).

    The levels are those of `quantile_midpoints`, in any order. Raises TypeError for integers, and
    ValueError for alpha outside [1e-3, 1]. Source: Rockafellar & Uryasev 2000.
    """
    if not quantiles.is_floating_point():  # a mean of two integers need not be one
        raise TypeError(f"value_at_risk: quantiles are {quantiles.dtype}, not floats")
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"value_at_risk: alpha {alpha} is outside [1e-3, 1]")
    ordered = quantiles.sort(-1).values
    num_quantiles = quantiles.shape[-1]
    position = alpha * num_quantiles - 0.5  # on the axis of the quantiles' indices
    left = max(min(math.floor(position), num_quantiles - 2), 0)
    right = min(left + 1, num_quantiles - 1)
    return ordered[..., left].lerp(ordered[..., right], position - left)


def sr_lambda_targets(
    rewards: Tensor,
    next_quantiles: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    gae_lambda: float,
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
) -> Tensor:
    """Draw samples of the return by sample replacement SR(lambda), (T, N, K).

        X_t,i = r_t + gamma * (1 - terminated_t) * Y_t,i
        Y_t,i = X_{t+1},i with probability lambda, if the episode goes on after t
                theta_i(s'_t) otherwise, and at time limits and at the end of the rollout

    rewards, terminated and truncated are (T, N). next_quantiles are theta(s'_t), (T, N, K), of true
    successors. Where V is the mean of theta, and V(s'_t) is V(s_{t+1}) inside episodes, the mean of
    X_t,i over draws and over i is the lambda-return of `gae`.
    All are in the units of the rewards. `draws` are uniform numbers in [0, 1), (T, N, K), to use in
    place of new ones. Raises ValueError for other shapes and for no steps at all, and TypeError for
    masks that are not bool and for integer quantiles.
    Source: Nam et al. 2021 (GMAC).
    """
    if terminated.dtype != torch.bool or truncated.dtype != torch.bool:  # ~1 would be -2
        raise TypeError("sr_lambda_targets: terminated and truncated must be tensors of bool")
    if not next_quantiles.is_floating_point():  # targets would be cut to integers
        raise TypeError(f"sr_lambda_targets: quantiles are {next_quantiles.dtype}, not floats")
    shapes = [tuple(x.shape) for x in (rewards, next_quantiles[..., 0], terminated, truncated)]
    if len({*shapes}) > 1 or not len(rewards):
        names = "rewards, next_quantiles without K, terminated and truncated"
        raise ValueError(f"sr_lambda_targets: the shapes of {names} are {shapes}")
    if draws is None:
        draws = torch.rand(next_quantiles.shape, generator=generator, device=rewards.device)
    bootstraps = (draws >= gae_lambda) | (terminated | truncated)[..., None]
    discount = gamma * (~terminated).to(rewards.dtype)[..., None]
    targets = torch.empty_like(next_quantiles)
    x = next_quantiles[-1]  # so that the last step bootstraps, whatever is drawn
    for t in reversed(range(len(rewards))):
        y = next_quantiles[t].where(bootstraps[t], x)
        x = rewards[t, :, None] + discount[t] * y
        targets[t] = x
    return targets


def cvar_advantages(targets: Tensor, quantiles: Tensor, alpha: float) -> Tensor:
    """Compute advantages for CVaR_alpha of every state's return, (T, N), without a gradient.

        nu  = VaR_alpha(Z(s_t)),  u(x) = nu + min(x - nu, 0) / alpha
        A_t = mean_j u(X_t,j) - CVaR_alpha(Z(s_t))

    targets X are (T, N, J), quantiles of Z are (T, N, K). For alpha = 1 nu is the largest target,
    so that u(x) = x. Raises ValueError for alpha outside [1e-3, 1], and for targets without an
    axis of samples.

    The mean of u(Z) is CVaR_alpha(Z), so a target that is distributed as Z has an advantage of 0.
    (Over samples the mean differs by a small part of the gap between the lowest quantiles.)
    With alpha 1 the advantage is the target's mean minus that of Z.

    Every state is averse to the tail of its own return from there on, whatever was earned before.
    That is not the policy gradient of the start state's CVaR (Tamar et al. 2015).
    Source of u: Rockafellar & Uryasev 2000. Its use state by state is ours.
    """
    if targets.shape[:-1] != quantiles.shape[:-1]:  # the samples of all states would be mixed
        shapes = f"{tuple(targets.shape)} and quantiles {tuple(quantiles.shape)}"
        raise ValueError(f"cvar_advantages: targets are {shapes}; give (..., J) samples")
    targets = targets.detach()
    quantiles = quantiles.detach()
    nu = value_at_risk(quantiles, alpha)[..., None] if alpha < 1 else targets.amax(-1, True)
    utility = nu + (targets - nu).clamp(max=0) / alpha  # (T, N, J)
    return utility.mean(-1) - cvar(quantiles, alpha)


def rescale_head(
    linear: nn.Linear, old_mean: Tensor, old_std: Tensor, new_mean: Tensor, new_std: Tensor
) -> None:
    """Change a linear layer in place so that std * output + mean stays what it was (PopArt).

        w' = w s / s',    b' = b s / s' + (mu - mu') / s'

    Means and stds have no axes: one mean and one std for all outputs of the layer. Before the call
    its outputs are normalised by the old ones, and after it by the new ones. If old_std is almost
    0, the new weights are almost 0 too. So leave the layer alone as long as no return has varied.
    The bias is computed in float64, since mu may be 100,000 times s. Adam's moments are not
    rescaled.
    Source: van Hasselt et al. 2016, eq. 5.
    """
    ratio = old_std / new_std
    bias = linear.bias.double() * ratio + (old_mean - new_mean) / new_std
    with torch.no_grad():
        linear.weight.copy_(linear.weight.double() * ratio)
        linear.bias.copy_(bias)


# A value distribution is a module with these members. An iteration uses those from `reduce_twins`
# on, in this order:
#
#     args, support             its flags, and the levels or the atoms
#     meaning                   names of flags that --init-from compares besides the shapes
#     num_outputs, moments      the number O of a critic's outputs, and `RunningMoments` of returns
#     reduce_twins(outputs)     one set of outputs, (..., O), from those of C critics, (C, ..., O)
#     value(outputs)            V, (...), float64
#     point_targets(returns)    targets, of a type of its own, from lambda-returns (T, N)
#     sample_targets(rollout, next_outputs, gae_lambda)   targets from samples of the return
#     risk_advantages(targets, outputs)                   advantages for the CVaR, (T, N)
#     describe(outputs, samples)                          metrics, by the statistics so far
#     move_statistics(heads, outputs, targets)
#                               old predictions, (C, T, N, any), for `loss`, and metrics. A head
#                               may be rescaled: its last layer is linear.
#     encode_targets(targets)   one tensor, (T, N, any), by the statistics from then on
#     loss(outputs, targets, returns, old)
#                               losses, (C, ...), and where value clipping acted, (C, ...)
#
# Whoever reads a trained agent also takes quantile(outputs, level), (...).
class ValueDistribution(nn.Module):
    """The critics predict this value distribution: K quantiles at the levels `support`.

    A critic's outputs are K quantiles and, with `value_from` mean_head, the mean output, which is
    V: (..., K or K + 1). They are normalised by `moments`, and so are the arguments of `loss`. What
    `encode_targets` and `move_statistics` return is normalised as well. All else is in the task's
    units. The targets of a rollout are J equally likely returns for each step, (T, N, J): its
    lambda-return, or samples.
    """

    def __init__(self, args: Args) -> None:
        super().__init__()
        if args.dist_coef != 1 and args.value_from == "distribution":
            text = "must be 1 with --value-from distribution, which has no other loss"
            raise flag_error(args, "dist_coef", text)
        uses_tail = args.cvar_weight > 0 and args.cvar_alpha < 1 and args.learning_rate > 0
        if uses_tail and args.cvar_alpha * args.num_quantiles < 1:
            K = args.num_quantiles
            text = f"the tail of --cvar-weight is smaller than one of {K} quantiles"
            least = f"at least {math.ceil(1e4 / K) / 1e4}, or " if K > 1 else ""
            raise flag_error(args, "cvar_alpha", f"{text}; take {least}more --num-quantiles")
        if args.dist_coef == 0 and uses_tail:
            text = "must be above 0 with --cvar-weight, which reads the distribution"
            raise flag_error(args, "dist_coef", text)
        self.args = args
        # Without `norm_returns` these never move. Their mean of 0 and std of 1 change nothing.
        self.moments = RunningMoments((), max_count=args.norm_returns_memory)
        # The levels tau of the quantiles. The name is that of the other script's atoms.
        self.register_buffer("support", quantile_midpoints(args.num_quantiles), persistent=False)
        self.num_outputs = args.num_quantiles + (args.value_from == "mean_head")
        self.meaning: tuple[str, ...] = ()  # the shapes tell all

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantiles (..., K) and the mean output (..., 0 or 1)."""
        K = len(self.support)
        return outputs.split([K, outputs.shape[-1] - K], -1)

    def decode(self, x: Tensor) -> Tensor:
        """Return x in the task's units.

        It is float64: float32 would lose the spread of returns whose mean is large.
        """
        return self.moments.denormalize(x.double())

    def mean(self, outputs: Tensor) -> Tensor:
        """Return the mean of the distribution, (...)."""
        return self.decode(self.split(outputs)[0]).mean(-1)

    def value(self, outputs: Tensor) -> Tensor:
        """Return V, (...), the mean of the distribution or the mean output, by `value_from`."""
        if self.args.value_from == "distribution":
            return self.mean(outputs)
        return self.decode(outputs[..., -1])

    def quantile(self, outputs: Tensor, level: float) -> Tensor:
        """Return the quantile of the distribution at a level, (...), in the task's units."""
        return self.decode(value_at_risk(self.split(outputs)[0], level))

    def reduce_twins(self, outputs: Tensor) -> Tensor:
        """Reduce outputs of C critics, (C, ..., K or K + 1), to one set (...), by `twin_reduce`.

        min:   the critic with the smaller V. Fujimoto et al. 2018 take it against a maximum over
               actions. There is none here, so V is a little too small.
        mean:  the 2 K quantiles of both, sorted, each pair of neighbours averaged, which narrows
               them a little; the mean output is the mean of both
        """
        if len(outputs) != self.args.num_critics:  # axis 0 would be one of states
            raise ValueError(f"reduce_twins: {len(outputs)} critics, not {self.args.num_critics}")
        if len(outputs) == 1:
            return outputs[0]
        if self.args.twin_reduce == "min":
            values = self.value(outputs)
            return torch.where((values[0] <= values[1])[..., None], outputs[0], outputs[1])
        quantiles, mean_outputs = self.split(outputs)
        pooled = torch.cat((*quantiles,), -1).sort(-1).values  # (..., 2 K)
        averaged = pooled.unflatten(-1, (-1, 2)).mean(-1)
        return torch.cat((averaged, mean_outputs.mean(0)), -1)

    def point_targets(self, returns: Tensor) -> Tensor:
        """Make targets that are one number for each step, from lambda-returns (T, N)."""
        return returns[..., None]

    def sample_targets(self, rollout: Rollout, next_outputs: Tensor, gae_lambda: float) -> Tensor:
        """Make targets by SR(lambda), from the outputs (T, N, K or K + 1) for true successors.

        With lambda 1 every sample goes on to the end, so no random numbers are needed.
        `describe_critics` relies on that: a metric must not move the generator.
        """
        theta = self.decode(self.split(next_outputs)[0])
        size = (len(theta), self.args.num_envs, theta.shape[-1])
        draws = torch.zeros(size)  # those of all processes, see `own`
        if gae_lambda < 1:
            draws.uniform_()  # on the CPU, whose generator is kept apart from what tasks draw
        return sr_lambda_targets(
            rollout.rewards, theta, rollout.terminated, rollout.truncated,
            self.args.gamma, gae_lambda, draws=own(draws).to(theta.device),
        )  # fmt: skip

    def risk_advantages(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Compute `cvar_advantages` of targets, given the outputs (T, N, ...) for s_t."""
        quantiles = self.decode(self.split(outputs)[0])
        return cvar_advantages(targets, quantiles, self.args.cvar_alpha)

    def move_statistics(
        self, heads: nn.ModuleList, outputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict]:
        """Take the targets into the return statistics, and rescale the heads at the same time.

        The running moments take in a mean and a variance. The mean is that of the targets. The
        variance is that of the targets or the mean of (V - their mean)^2, over steps and critics,
        whichever is larger. Where all returns are equal, that of the targets would go to 0, and a
        small error of V would be divided by almost nothing.

        Decoded predictions stay what they were (PopArt, van Hasselt et al. 2016), with one
        exception. Where the old std is almost its floor, returns have hardly varied lately, by
        1e-5 of their mean or less, and heads that are rescaled from there would vanish. So they
        and `outputs` stay as they are. (Where returns were 0 for hundreds of rollouts, the std is
        tiny and not at its floor, and the heads shrink with the first reward.)

        The last layers of the heads change in place. Returns `outputs` (C, T, N, K or K + 1) in
        the new units, and metrics.
        """
        # 1. The old statistics decode what the critics predicted.
        values = self.value(outputs)  # (C, T, N)
        decoded = self.decode(outputs)
        old_mean = self.moments.mean
        old_std = self.moments.std
        rescales = not self.moments.at_floor

        # 2. The statistics take in the targets.
        if self.args.norm_returns:
            self.merge_targets(targets, values)

        # 3. Predictions and heads are converted to the new units. (Without `norm_returns` these are
        #    the old ones.)
        new_outputs = outputs
        if rescales:
            new_outputs = self.moments.normalize(decoded).to(outputs)
            for head in heads:
                rescale_head(head[-1], old_mean, old_std, self.moments.mean, self.moments.std)

        crossing = self.split(new_outputs)[0].diff(dim=-1) < 0
        shift = self.value(new_outputs) - values
        return new_outputs, {
            "value/crossing_fraction": crossing.float().mean().nan_to_num(),  # 0 for K = 1
            "norm/return_mean": self.moments.mean,
            "norm/return_std": self.moments.std,
            # It is rounding alone where outputs were converted. It does not test `rescale_head`.
            "norm/value_shift": shift.abs().mean(),
        }

    def merge_targets(self, targets: Tensor, values: Tensor) -> None:
        """Take targets into the running moments, as `move_statistics` tells.

        values (C, T, N) are V, decoded by the moments as they are before.
        """
        mean = average(targets.mean())
        variance = average((targets - mean).square().mean())
        around_mean = average((values - mean).square().mean())  # how far V is from that mean
        self.moments.merge(mean, torch.maximum(variance, around_mean), weight=1)

    def encode_targets(self, targets: Tensor) -> Tensor:
        """Return what the loss regresses on, the samples (T, N, J), normalised."""
        return self.moments.normalize(targets).float()

    def loss(
        self, outputs: Tensor, targets: Tensor, returns: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return losses of C critics, (C, ...), and 1 where value clipping moves the prediction.

            dist_coef * quantile regression on targets (..., J)
              +  0.5 (V - returns)^2, with a mean output

        returns are lambda-returns whatever the targets are. The mean output learns them by squared
        error, which weighs rare large returns; these hardly move quantiles. All arguments are
        normalised, outputs and old are (C, ..., K or K + 1). With clipping each of the two terms is
        the larger one of its plain and its clipped form. Each critic is clipped around its own old
        outputs. Targets are never clipped.
        """
        args = self.args
        quantiles, mean_outputs = self.split(outputs)
        dist_loss = quantile_huber_loss(quantiles, targets, self.support, args.kappa)
        v_loss = squared_error(mean_outputs, returns)
        if args.vf_clip == "none":
            return args.dist_coef * dist_loss + v_loss, torch.zeros_like(dist_loss)

        old_quantiles, old_mean_outputs = self.split(old)
        clipped = clip_quantiles(quantiles, old_quantiles, args.vf_clip_coef, args.vf_clip)
        clipped_loss = quantile_huber_loss(clipped, targets, self.support, args.kappa)
        dist_loss = clipped_value_loss(dist_loss, clipped_loss)
        clipped_means = clip_values(mean_outputs, old_mean_outputs, args.vf_clip_coef)
        v_loss = clipped_value_loss(v_loss, squared_error(clipped_means, returns))
        changes = torch.cat((clipped - quantiles, clipped_means - mean_outputs), -1)
        rounding = 1e-6 * (1 + old.abs().amax(-1, keepdim=True))  # of float32, a few digits
        losses = args.dist_coef * dist_loss + v_loss
        return losses, (changes.abs() > rounding).any(-1).float()

    def describe(self, outputs: Tensor, samples: Tensor) -> dict:
        """Describe the outputs (T, N, K or K + 1) for s_t, beside samples of the return."""
        quantiles = self.split(outputs)[0]
        deciles = torch.stack([self.quantile(outputs, level) for level in (0.1, 0.5, 0.9)])
        value_at_alpha = self.quantile(outputs, self.args.cvar_alpha)
        std = quantiles.std(-1, correction=0).double() * self.moments.std
        return {
            "value/p10": deciles[0].mean(),
            "value/p50": deciles[1].mean(),
            "value/p90": deciles[2].mean(),
            "value/predicted_returns": deciles,
            "value/realised_returns": samples.mean(-1),
            "value/std_predicted": std.mean(),
            "value/distribution_gap": (self.mean(outputs) - self.value(outputs)).abs().mean(),
            "cvar/predicted": self.decode(cvar(quantiles, self.args.cvar_alpha)).mean(),
            "cvar/coverage": (samples < value_at_alpha[..., None]).double().mean(),
        }


# ---- end of value distribution -------------------------------------------------------------------


# ---------------------------------------------------------------------------------------- networks
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def unroll_lstm(
    lstm: nn.LSTM, inputs: Tensor, state: Sequence[Tensor], episode_start: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run a one-layer LSTM over a rollout whose episodes begin anywhere.

    It computes what this slow loop computes:

        for t in range(T):
            state = [x * ~episode_start[t, :, None] for x in state]
            outputs[t], state = lstm(inputs[t : t + 1], state)

    The function makes one fused call instead of T. inputs are (T, N, F). state is (h, c), each
    (1, N, H), ahead of step 0. episode_start is (T, N) bool: the state is multiplied by zero when a
    step opens an episode. Returns outputs (T, N, H) and the state after the last step. The lstm has
    one layer, one direction, biases, no projection, and batch_first=False. Raises ValueError for
    another lstm or another shape of episode_start, and TypeError for another dtype of it.

    The trick is that a reset becomes one more time step of the LSTM. Each environment is a column
    of rows: its T steps, and one reset row before each step that opens an episode. Columns with
    fewer resets end with rest rows. With T = 3, where the second environment opens an episode at
    step 1, the two columns are

        row    first environment    second environment
        0      step 0               step 0
        1      step 1               reset
        2      step 2               step 1
        3      rest                 step 2

    Two further inputs mark the rows that are no steps. Their weights of 1e4 outweigh what biases
    and h add, so that these gates are exactly 0 or 1 in floating point:

        step       (0, 0):  an ordinary step
        reset row  (1, 0):  input gate 0, forget gate 0, so c = 0 and h = 0, and no gradient passes
        rest row   (0, 1):  input gate 0, forget gate 1, so c stays
    """
    if episode_start.dtype != torch.bool:  # integers would pick steps by their number
        raise TypeError("unroll_lstm: episode_start must be a tensor of bool")
    is_lstm = isinstance(lstm, nn.LSTM) and len(lstm.all_weights[0]) == 4
    if not is_lstm or len(lstm.all_weights) > 1 or lstm.batch_first:
        text = "one layer, one direction, biases, no projection, and batch_first=False"
        raise ValueError(f"unroll_lstm: the lstm must be an nn.LSTM with {text}")
    if episode_start.shape != inputs.shape[:2]:
        shapes = f"{tuple(episode_start.shape)} and inputs {tuple(inputs.shape)}"
        raise ValueError(f"unroll_lstm: episode_start is {shapes}; give (T, N) and (T, N, F)")
    if not episode_start.any():
        return lstm(inputs, state)
    T, N, F = inputs.shape

    # Step t of a column goes to row t plus the number of reset rows so far.
    row = torch.arange(T, device=inputs.device)[:, None] + episode_start.cumsum(0)
    position = row * N + torch.arange(N, device=inputs.device)  # (T, N), rows and columns flattened
    steps = position.flatten()
    num_rows = int(row[-1].max()) + 1

    # Every row is a rest row, but for the steps, and a reset row ahead of each that opens.
    marks = inputs.new_tensor([0, 1]).repeat(num_rows * N, 1)
    marks[steps] = 0
    above = position[episode_start] - N  # one row above the step, which `row` has kept free
    marks[above] = inputs.new_tensor([1, 0])
    rows = inputs.new_zeros(num_rows * N, F).index_copy(0, steps, inputs.flatten(0, 1))
    rows = torch.cat((rows, marks), 1).view(num_rows, N, F + 2)

    # The weights of the marks, for the gates i, f, g, o in torch's order.
    gates = inputs.new_tensor([[-1e4, -1e4], [-1e4, 1e4], [0, 0], [0, 0]])
    gates = gates.repeat_interleave(lstm.hidden_size, 0)
    input_weight = torch.cat((lstm.weight_ih_l0, gates), 1)

    # torch.lstm is what nn.LSTM calls. nn.LSTM itself would refuse the two further inputs.
    weights = (input_weight, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0)
    outputs, _, c = torch.lstm(
        rows, state, weights, has_biases=True, num_layers=1, dropout=0.0, train=True,
        bidirectional=False, batch_first=False,
    )  # fmt: skip
    outputs = outputs.flatten(0, 1).index_select(0, steps).view(T, N, -1)
    return outputs, (outputs[-1:], c)  # rest rows keep c but not h


def layer_init(layer: nn.Module, std: float = math.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    """Give a layer orthogonal weights of gain `std` and constant biases."""
    for name, parameter in layer.named_parameters():  # an LSTM has four
        if "bias" in name:
            nn.init.constant_(parameter, bias_const)
        else:
            nn.init.orthogonal_(parameter, std)
    return layer


class Convolutions(nn.Module):
    """Convolutions encode images (..., channels, height, width) as features (..., num_features).

    There is at least one axis ahead of the channels.
    Pixels are divided by their largest absolute bound, or by 1 if that is larger. Images with sides
    of 36 and more go through the layers of Mnih et al. 2015. Smaller grids go through the layer of
    Young & Tian 2019 (MinAtar). Raises ValueError where a bound is infinite.
    """

    def __init__(self, space: Box, activation: type[nn.Module]) -> None:
        super().__init__()
        channels, *sides = space.shape
        layers = [(16, 3, 1)]  # channels, kernel, stride
        self.memory_format = torch.contiguous_format  # the faster one on CPUs for small grids
        if min(sides) >= 36:
            layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
            self.memory_format = torch.channels_last
        largest = max(-float(space.low.min()), float(space.high.max()), 1)
        if math.isinf(largest):  # all images would be black
            raise ValueError("Convolutions: pixels need finite bounds")
        self.scale = 1 / largest
        self.layers = nn.Sequential()
        for size, kernel, stride in layers:
            self.layers.append(layer_init(nn.Conv2d(channels, size, kernel, stride)))
            self.layers.append(activation())
            channels = size
        nn.init.constant_(self.layers[0].bias, 0.1)  # else a black image would leave ReLUs dead
        self.num_features = self.layers(torch.zeros(1, *space.shape)).numel()

    def forward(self, images: Tensor) -> Tensor:
        # Floats take four times the memory of bytes. Without a graph only 256 images at a time are
        # held as floats, with a graph all are.
        parts = images.flatten(0, -4).split(256)
        features = torch.cat([self.encode(part) for part in parts])
        return features.unflatten(0, images.shape[:-3])

    def encode(self, images: Tensor) -> Tensor:
        """Encode (images, channels, height, width) as (images, num_features)."""
        pixels = images.contiguous(memory_format=self.memory_format).float() * self.scale
        return self.layers(pixels).flatten(1)


# A kind of action is a module with these members, and `make_action_dist` chooses it:
#
#     space, num_outputs       the space of the actions, and how many outputs the actor has for it
#     kind                     the space in words, which checkpoints hold and messages tell
#     forward(outputs)         params of the distribution; outputs may have any leading axes
#     log_prob, entropy, kl    of params, (...), in nats; kl(old, new) is exact
#     entropy_range()          the least and the largest entropy of any policy, in nats
#     noise(*size, generator)  (*size, ...) on the CPU; a rollout draws it once, `act` each time
#     sample(outputs, noise)   actions, in NumPy; noise 0.0 gives the mode
#     to_env(actions)          what `envs.step` takes
#     clamp_parameters()       after each step of the actor
class GaussianActions(nn.Module):
    """A diagonal Gaussian over the A floats of a Box. Its log-std does not depend on the state.

    params are mean and log-std, (..., 2, A). Dimensions are independent, so that log-probabilities,
    entropies and KL divergences add. Only what the environment receives is clipped to the bounds.
    """

    def __init__(self, space: Box, log_std_init: float) -> None:
        super().__init__()
        self.space = space
        self.num_outputs = math.prod(space.shape)
        self.kind = f"{self.num_outputs} floats"
        self.log_std = nn.Parameter(torch.full((self.num_outputs,), log_std_init))

    def forward(self, outputs: Tensor) -> Tensor:
        """Turn the actor's outputs (..., A) into params."""
        return torch.stack((outputs, self.log_std.expand_as(outputs)), -2)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Return the log-density (...) of actions (..., A), in nats.

        The actions are those of `sample`. Those of `to_env`, and so of `Agent.act`, are clipped,
        and have another density. Raises ValueError where the last axis is not A.
        """
        mean, log_std = params.unbind(-2)
        if actions.shape[-1] != self.num_outputs:  # (N,) would be taken for (1, N)
            shape = f"(..., {self.num_outputs})"
            raise ValueError(f"log_prob: actions are {tuple(actions.shape)}, not {shape}")
        z = (actions - mean) * (-log_std).exp()
        densities = -0.5 * z.square() - log_std - HALF_LOG_2PI
        return densities.sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Return the differential entropy (...), in nats. It may be negative."""
        log_std = params[..., 1, :]
        return (log_std + HALF_LOG_2PI + 0.5).sum(-1)

    def entropy_range(self) -> tuple[float, float]:
        """Return the entropies of the smallest and of the largest standard deviations, in nats."""
        least, largest = (self.num_outputs * (end + HALF_LOG_2PI + 0.5) for end in LOG_STD_RANGE)
        return least, largest

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new), (...), in nats."""
        old_mean, old_log_std = old.unbind(-2)
        mean, log_std = new.unbind(-2)
        difference = ((old_mean - mean) * (-log_std).exp()).square()
        log_ratio = 2 * (old_log_std - log_std)
        # expm1, since exp - 1 would lose the digits of a small divergence
        return 0.5 * (log_ratio.expm1() - log_ratio + difference).sum(-1)

    def noise(self, *size: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Gaussian numbers (*size, A), times the policy's std. `sample` adds them to means."""
        floats = {"dtype": torch.float32, "device": "cpu"}  # a program may have set other defaults
        drawn = torch.randn(*size, self.num_outputs, generator=generator, **floats)
        return drawn * self.log_std.detach().exp().cpu()

    def sample(self, outputs: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        """Turn the actor's outputs (..., A) into random actions. Noise 0 gives the mode."""
        return outputs + noise  # mean + std z: `noise` has the std already

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Turn actions (N, A) into those of the space, (N, ...), clipped to its bounds."""
        array = actions.reshape(-1, *self.space.shape)
        return array.clip(self.space.low, self.space.high).astype(self.space.dtype)

    def clamp_parameters(self) -> None:
        """Keep the log-std in its range after a step. A clamp in `forward` would stop gradients."""
        self.log_std.data.clamp_(*LOG_STD_RANGE)


class CategoricalActions(nn.Module):
    """An action has P categorical parts: Discrete (P = 1), MultiDiscrete or MultiBinary.

    params are log-probabilities, (..., P, largest part). Smaller parts are padded with -1e9. Parts
    are independent, so that log-probabilities, entropies and KL divergences add.
    """

    def __init__(self, space: Discrete | MultiDiscrete | MultiBinary) -> None:
        super().__init__()
        self.space = space
        if isinstance(space, Discrete):
            sizes = [int(space.n)]
        elif isinstance(space, MultiDiscrete):
            sizes = space.nvec.flatten().tolist()
        else:
            sizes = [2] * math.prod(space.shape)
        told = sizes if len({*sizes}) > 1 else sizes[:1]
        choices = ", ".join(map(str, told))
        self.kind = f"{len(sizes)} parts with {choices} choices"  # checkpoints hold this text
        self.missing = np.arange(max(sizes)) >= np.array(sizes)[:, None]  # (P, largest part)
        padding = -1e9 * torch.tensor(self.missing, dtype=torch.float32)
        self.register_buffer("padding", padding, persistent=False)
        self.num_outputs = self.missing.size

    def forward(self, outputs: Tensor) -> Tensor:
        """Turn the actor's outputs (..., num_outputs) into params."""
        logits = outputs.reshape(*outputs.shape[:-1], *self.padding.shape) + self.padding
        return logits.log_softmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of actions (..., P), in nats.

        The actions are the indices of `sample`. Those of `to_env`, and so of `Agent.act`, count
        from the space's `start`. Raises ValueError unless there is one for each part.
        """
        if actions.shape != params.shape[:-1]:  # the other parts would count as certain
            shapes = f"{tuple(actions.shape)} and params {tuple(params.shape)}"
            raise ValueError(f"log_prob: actions are {shapes}; give (..., P)")
        chosen = params.gather(-1, actions[..., None])
        return chosen.sum((-2, -1))

    def entropy(self, params: Tensor) -> Tensor:
        """Return the entropy (...), in nats."""
        return -(params.exp() * params).sum((-2, -1))

    def entropy_range(self) -> tuple[float, float]:
        """Return the entropies of a certain action and of equal probabilities, in nats."""
        return 0.0, float(self.entropy(self(torch.zeros_like(self.padding).flatten())))

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new), (...), in nats."""
        return (old.exp() * (old - new)).sum((-2, -1))

    def noise(self, *size: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Gumbel numbers (*size, P, largest part) for `sample`."""
        drawn = torch.empty(*size, *self.padding.shape, dtype=torch.float32, device="cpu")
        return -drawn.exponential_(generator=generator).log()

    def sample(self, outputs: np.ndarray, noise: np.ndarray | float) -> np.ndarray:
        """Turn the actor's outputs into random actions (..., P). Noise 0 gives the mode.

        The index of the largest sum of a logit and Gumbel noise is a sample (Gumbel-max). Logits
        need no normalisation for that.
        """
        logits = outputs.reshape(*outputs.shape[:-1], *self.missing.shape)
        return np.where(self.missing, -np.inf, logits + noise).argmax(-1)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Turn actions (N, P) into those of the space, (N, ...), counted from its `start`."""
        array = actions.reshape(-1, *self.space.shape)
        return (array + getattr(self.space, "start", 0)).astype(self.space.dtype)

    def clamp_parameters(self) -> None:
        """Do nothing: these distributions have no parameters."""


def make_action_dist(space: gym.Space, args: Args) -> GaussianActions | CategoricalActions:
    """Make the distribution of actions for a space. Raises `UsageError` for spaces without one."""
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape:
        return GaussianActions(space, args.log_std_init)
    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        return CategoricalActions(space)
    text = "must be one or more floats (Box), Discrete, MultiDiscrete or MultiBinary"
    raise UsageError(f"--env-id {args.env_id}: its actions are {space}; they {text}")


def in_numpy(network: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function of a network for NumPy arrays, for acting.

    For a few rows NumPy takes a quarter of torch's time. On the CPU the function reads the
    network's own weights; from a GPU it takes copies. A network that contains other layers, such
    as convolutions, runs in torch.
    """
    kinds = {type(layer) for layer in network.modules()}
    if type(network) is nn.Linear:
        weight = network.weight.detach().cpu().numpy().T
        bias = 0 if network.bias is None else network.bias.detach().cpu().numpy()
        return lambda x: x @ weight + bias
    if type(network) is nn.ReLU:
        return lambda x: np.maximum(x, 0)
    if type(network) is nn.Tanh:
        return np.tanh
    if kinds <= {nn.Sequential, nn.Linear, nn.ReLU, nn.Tanh}:
        layers = [in_numpy(layer) for layer in network]

        def forward(x: np.ndarray) -> np.ndarray:
            for layer in layers:
                x = layer(x)
            return x

        return forward
    held = next(chain(network.parameters(), network.buffers()), None)
    device = "cpu" if held is None else held.device

    @torch.inference_mode()
    def forward_in_torch(x: np.ndarray) -> np.ndarray:
        return network(torch.as_tensor(x, device=device)).cpu().numpy()

    return forward_in_torch


def lstm_in_numpy(lstm: nn.LSTM) -> Callable[[np.ndarray, np.ndarray], tuple]:
    """Return one step of an LSTM for NumPy arrays: inputs (N, F), state (2, N, H) -> h, state.

        i, f, g, o = parts of W_ih x + b_ih + W_hh h + b_hh
        c' = sigmoid(f) c + sigmoid(i) tanh(g),  h' = sigmoid(o) tanh(c')

    With sigmoid(x) = (1 + tanh(x / 2)) / 2 one call of tanh serves all four. The weights of the
    sigmoids are halved once, so these are copies that later updates do not reach. Source:
    Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    H = lstm.hidden_size
    halves = np.repeat(np.float32([0.5, 0.5, 1, 0.5]), H)
    w_ih, w_hh, b_ih, b_hh = (x.detach().cpu().numpy() for x in lstm.all_weights[0])
    input_weights, state_weights = w_ih.T * halves, w_hh.T * halves
    bias = (b_ih + b_hh) * halves

    def step(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        h, c = state
        tanh = np.tanh(x @ input_weights + h @ state_weights + bias)
        sigmoid = 0.5 + 0.5 * tanh  # its columns of g are not used
        c = sigmoid[:, H : 2 * H] * c + sigmoid[:, :H] * tanh[:, 2 * H : 3 * H]
        h = sigmoid[:, 3 * H :] * np.tanh(c)
        return h, np.stack((h, c))

    return step


def make_encoder(space: Box, args: Args) -> nn.Sequential:
    """Make one hidden layer from observations to the LSTM. Images go through convolutions.

    Another module must take any number of leading axes, and must not draw random numbers. The actor
    runs it in NumPy if it consists of Sequential, Linear, ReLU and Tanh alone, and otherwise in
    torch.
    """
    activation = ACTIVATIONS[args.activation]
    if len(space.shape) == 3:
        convolutions = Convolutions(space, activation)
        last = layer_init(nn.Linear(convolutions.num_features, args.hidden_size))
        return nn.Sequential(convolutions, last, activation())
    first = layer_init(nn.Linear(space.shape[0], args.hidden_size))
    return nn.Sequential(first, activation())


class Body(nn.Module):
    """An encoder and an LSTM turn observations into features. A state is h and c, (2, N, H)."""

    def __init__(self, space: Box, args: Args) -> None:
        super().__init__()
        self.encoder = make_encoder(space, args)
        self.lstm = layer_init(nn.LSTM(args.hidden_size, args.lstm_hidden_size), 1.0)

    def forward(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:
        """Return features (L, M, H) of sequences (L, M, D), from the states ahead of them."""
        features, _ = self.unroll(self.encoder(obs), state, episode_start)
        return features

    def unroll(self, x: Tensor, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (L, M, H) of encoded observations, and the state after the last step."""
        h_and_c = state.split(1)  # (1, M, H) each
        features, after = unroll_lstm(self.lstm, x, h_and_c, episode_start)
        return features, torch.cat(after)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (N, H) of one step (N, D), and the next state.

        torch.lstm_cell is what nn.LSTMCell calls, here with the weights of the nn.LSTM.
        """
        h, c = torch.lstm_cell(self.encoder(obs), (*state,), *self.lstm.all_weights[0])
        return h, torch.stack((h, c))


class Agent(nn.Module):
    """An agent holds actor, critics, and the statistics of what they see and predict.

    The spaces are those of `make_env`: vectors (D,) or images, channels first. Arrays of
    observations are raw, and so are the arguments of `normalize_obs` and `update_obs_moments`. The
    bodies take what `normalize_obs` gives, and make the features of `policy_params` and
    `value_outputs`.

    A function that takes an agent and `args` expects `agent.args`: the value distribution reads
    these, and other flags would be mixed with them.
    """

    def __init__(self, observation_space: Box, action_space: gym.Space, args: Args) -> None:
        super().__init__()
        self.args = args
        self.observation_space = observation_space
        self.obs_shape = observation_space.shape
        self.sees_images = len(self.obs_shape) == 3
        self.action_dist = make_action_dist(action_space, args)
        self.value_dist = ValueDistribution(args)
        self.obs_moments = RunningMoments(() if self.sees_images else self.obs_shape)
        self.adv_moments = RunningMoments((), max_count=args.norm_adv_memory)

        self.actor_body = Body(observation_space, args)
        self.critic_body = Body(observation_space, args)
        actor_head = nn.Linear(args.lstm_hidden_size, self.action_dist.num_outputs)
        self.actor_head = layer_init(actor_head, 0.01)  # small: all actions are almost alike
        self.critic_heads = nn.ModuleList()
        for _ in range(args.num_critics):
            hidden = nn.Linear(args.lstm_hidden_size, args.hidden_size)
            hidden = layer_init(hidden, bias_const=0.1)  # a ReLU at 0 passes no gradient
            output = layer_init(nn.Linear(args.hidden_size, self.value_dist.num_outputs), 0.1)
            self.critic_heads.append(nn.Sequential(hidden, ACTIVATIONS[args.activation](), output))
        self.to("cuda" if args.cuda else "cpu")
        if args.cuda:  # cuDNN copies the LSTM's weights, which lie in other memory, and says so
            warnings.filterwarnings("ignore", "RNN module weights are not part of single")

    @property
    def device(self) -> torch.device:
        return self.obs_moments.mean.device

    @property
    def second_thread_pays(self) -> bool:
        """Tell whether training in two threads is faster. With an LSTM it is, on CPUs."""
        return not self.args.cuda

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of the actor, and those of the critics.

        Add new modules here. `make_optimizers` refuses what is in neither list and not frozen.
        Frozen parameters are in neither.
        """
        actor = nn.ModuleList((self.action_dist, self.actor_body, self.actor_head))
        critics = nn.ModuleList((self.critic_body, self.critic_heads))

        def trained(part: nn.Module) -> list[nn.Parameter]:
            return [x for x in part.parameters() if x.requires_grad]

        return trained(actor), trained(critics)

    def obs_scaling(self) -> tuple[Tensor, Tensor]:
        """Return the mean that is subtracted from observations, and the factor that follows."""
        return self.obs_moments.mean.float(), (1 / self.obs_moments.std).float()

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Turn raw observations, float32, into what the networks see: within -10 to 10.

        Images, whose pixels `Convolutions` scales, are returned as they are, and so are vectors
        without `norm_obs`.
        """
        if self.sees_images or not self.args.norm_obs:
            return obs
        mean, scale = self.obs_scaling()
        return ((obs - mean) * scale).clip(-10, 10)

    def update_obs_moments(self, obs: Tensor) -> None:
        """Take in a rollout's raw observations (T, N, D), merged with those of other processes.

        Their weight is `args.batch_size`, the samples of all processes together. A policy that is
        not trained (a learning rate of 0) keeps statistics that it has, since others would change
        what it does.
        """
        keeps = self.args.learning_rate == 0 and self.obs_moments.count > 0
        if self.args.norm_obs and not self.sees_images and not keeps:
            moments = batch_moments(obs.double().flatten(0, -2))
            self.obs_moments.merge(*moments, weight=self.args.batch_size)

    def initial_state(self, num_envs: int) -> Tensor:
        """Return the state (2, N, H) of actor or critics where an episode opens: zeros."""
        size = (2, num_envs, self.args.lstm_hidden_size)
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    def policy_params(self, features: Tensor) -> Tensor:
        """Turn features (..., H) into params of the action distributions."""
        return self.action_dist(self.actor_head(features))

    def numpy_policy(self) -> Callable[[np.ndarray, np.ndarray], tuple]:
        """Return a function for acting: raw observations (N, D), state -> outputs, next state.

        It does what `normalize_obs`, one step of `actor_body` and `actor_head` do.
        A state is (2, N, H). Make a new policy when weights or statistics change. Never use an
        older one: parts of it have followed the weights, and others have not. To keep a policy,
        copy the agent.
        """
        encoder = in_numpy(self.actor_body.encoder)
        lstm = lstm_in_numpy(self.actor_body.lstm)
        head = in_numpy(self.actor_head)
        normalizes = self.args.norm_obs and not self.sees_images
        mean, scale = (x.cpu().numpy() for x in self.obs_scaling())

        def policy(obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if normalizes:
                obs = ((obs - mean) * scale).clip(-10, 10)
            features, state = lstm(encoder(obs), state)
            return head(features), state

        return policy

    def value_outputs(self, features: Tensor) -> Tensor:
        """Turn features (..., H) into outputs (C, ..., K or K + 1) of all critics."""
        return torch.stack([head(features) for head in self.critic_heads])

    def act(
        self,
        obs: np.ndarray,
        state: np.ndarray | None = None,
        deterministic: bool = True,
        policy: Callable | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give actions for `env.step`, and the state to hand back with the next observation.

        obs are (D,) or (N, D), as `make_env` gives them. State None opens an episode. Where only
        episode i of N has ended, set state[:, i] = 0 ahead of the next call.

        The policy's mode is taken if `deterministic`, otherwise a sample, drawn from `generator`.
        Without one it is torch's own. Steps with the same weights and statistics may share a
        `policy`, one of `numpy_policy`; this saves time. Raises ValueError for observations of
        other shapes, for those that are not finite, and for a state of the wrong shape. Raises
        TypeError for the critics' state.
        """
        rows, alone = as_rows(obs, self.observation_space)
        state = self.initial_state(len(rows)).cpu().numpy() if state is None else state
        if not isinstance(state, np.ndarray):  # the critics' has the same shape
            raise TypeError("act: the state must be the array that `act` returned")
        self.check_state(state, len(rows))
        policy = policy or self.numpy_policy()
        outputs, state = policy(rows.astype(self.observation_space.dtype), state)
        noise = 0.0
        if not deterministic:
            noise = self.action_dist.noise(len(rows), generator=generator).numpy()
        actions = self.action_dist.to_env(self.action_dist.sample(outputs, noise))
        return (actions[0] if alone else actions), state

    def check_state(self, state: np.ndarray | Tensor, num_rows: int) -> None:
        """Raise ValueError for a state that is not one of `num_rows` observations."""
        expected = tuple(self.initial_state(num_rows).shape)
        if tuple(state.shape) != expected:
            raise ValueError(f"state has the shape {tuple(state.shape)}; it must have {expected}")

    def as_batch(self, obs: np.ndarray) -> tuple[Tensor, bool]:
        """Return what networks see of raw observations, (N, D), and whether it was one alone."""
        rows, alone = as_rows(obs, self.observation_space)
        rows = rows.astype(self.observation_space.dtype)  # a copy: views may have odd strides
        batch = torch.as_tensor(rows, device=self.device).float()
        return self.normalize_obs(batch), alone

    @torch.no_grad()
    def predict_returns(
        self, obs: np.ndarray, levels: tuple[float, ...], state: Tensor | None = None
    ) -> tuple[np.ndarray, Tensor]:
        """Predict quantiles of the discounted return, (len(levels),) or (N, len(levels)).

        Returns them and the critics' state, to hand back with the next observation: a tensor
        (2, N, H) on the agent's device. `act` has a state of its own, an array. State None opens an
        episode. obs are those of `act`, levels lie in [0.001, 1]. The quantiles are in the task's
        units, but rewards of Atari games count as clipped. By default they are those of
        lambda-returns, which vary less than returns do.

        Raises ValueError like `act`, for levels outside [0.001, 1], and with `dist_coef` 0.
        """
        check_levels(levels, self.args)
        outputs, state, alone = self.critics_step(obs, state)
        quantiles = [self.value_dist.quantile(outputs, level) for level in levels]
        return one_or_all(torch.stack(quantiles, -1), alone), state

    @torch.no_grad()
    def value(self, obs: np.ndarray, state: Tensor | None = None) -> tuple[np.ndarray, Tensor]:
        """Predict V, the estimated discounted return, () or (N,), and give the critics' next state.

        obs are those of `act`, the state is that of `predict_returns`. By default V need not be the
        mean of the quantiles, see `value_from`. Raises ValueError like `act`.
        """
        outputs, state, alone = self.critics_step(obs, state)
        return one_or_all(self.value_dist.value(outputs), alone), state

    def critics_step(self, obs: np.ndarray, state: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """Return the critics' outputs (N, K or K + 1), their state, and whether obs was one."""
        batch, alone = self.as_batch(obs)
        state = self.initial_state(len(batch)) if state is None else state
        if not isinstance(state, Tensor):  # the actor's has the same shape
            raise TypeError("the critics' state is a tensor; the array of `act` is another state")
        self.check_state(state, len(batch))
        state = torch.as_tensor(state, dtype=torch.float32, device=self.device)
        features, state = self.critic_body.step(batch, state)
        return self.value_dist.reduce_twins(self.value_outputs(features)), state, alone


# ==================================================================================================
# Nothing below is about the algorithm.
# The algorithm calls these functions from below:
#
#     start, open_episodes                 begin a run, anew or resumed
#     iterations, lap, end_iteration       keep its time, log, evaluations and checkpoints (`Run`)
#     results                              returns the last metrics and the run's directory
#     check_flags, flag_error, UsageError  refuse flags that cannot work
#     tasks_draw_apart                     keeps random numbers of tasks apart
#     finished_episodes                    reads returns and lengths from gymnasium's info
#     check_finite, check_step             raise where a number is not finite
#     describe_...                         compute metrics and change nothing
#     run_both, VectorAdam                 make the update faster
#     average, with_common_mean, own       return their argument where there is one process
#     as_rows, check_levels, one_or_all    check what users give to `Agent`, and shape the answer
#
# It relies on settings made below. `Run.iterations` seeds torch ahead of every iteration,
# `make_together` asks for the autoreset mode of `collect_rollout`, and `set_up_process` makes
# float32 the default.
# ==================================================================================================


# ------------------------------------------------------------------------------------ environments
VELOCITIES = {  # entries that are zero in the velocity-free tasks, as rl-baselines3-zoo names them
    "CartPoleNoVel": (1, 3),
    "MountainCarNoVel": (1,),
    "MountainCarContinuousNoVel": (1,),
    "PendulumNoVel": (2,),
    "LunarLanderNoVel": (2, 3, 5),
    "LunarLanderContinuousNoVel": (2, 3, 5),
    "HopperNoVel": range(5, 11),
    "HalfCheetahNoVel": range(8, 17),
    "Walker2dNoVel": range(8, 17),
    "AntNoVel": range(13, 105),  # contact forces as well
    "SwimmerNoVel": range(3, 8),
}


def velocities(env_id: str) -> tuple[int, ...]:
    """Return which entries an id without velocities hides; none for other ids."""
    return tuple(VELOCITIES.get(env_id.split("-")[0], ()))


def hidden_entries(args: Args | SimpleNamespace) -> set[int]:
    """Return the entries of an observation that are always shown as 0."""
    return {*args.masked_obs, *velocities(args.env_id)}


STATS = "episode_statistics"  # key of a finished episode's return and length


def channel_axis(space: gym.Space) -> int | None:
    """Return the axis of an image's channels: 0 or 2, and 2 if it has none. None: no image.

    An image is a Box of bytes with two or three dimensions, or a Box of three dimensions whose
    numbers all have the same bounds, of 65,535 at most. Its sides are 3, the kernel of
    `Convolutions`, or more. Everything else is a vector.

    Two equal sides are an image's height and width. Otherwise its channels are the shorter one of
    the first and the last axis.
    """
    if not isinstance(space, Box) or len(space.shape) not in (2, 3) or 0 in space.shape:
        return None
    a, b, c = (*space.shape, 1)[:3]
    if b == c != a:
        channels_first = True
    elif a == b:
        channels_first = False
    else:
        channels_first = a < c
    sides = (b, c) if channels_first else (a, b)
    low, high = float(space.low.max()), float(space.high.min())
    alike = low == space.low.min() and high == space.high.max()
    bounded_alike = alike and low < high and low >= -65_535 and high <= 65_535
    shown = space.dtype == np.uint8 or (len(space.shape) == 3 and bounded_alike)
    if not shown or min(sides) < 3:
        return None
    return 0 if channels_first else 2


def image_view(space: Box, args: Args) -> tuple[Callable, Box]:
    """Return how an image is seen, and the space of that: bytes or float32, channels first.

    Bytes and booleans become bytes, and all other numbers float32.
    """
    if args.masked_obs:
        raise UsageError(f"--masked-obs {args.masked_obs}: {args.env_id} shows images")
    axis = channel_axis(space)
    shape = (*space.shape, 1)[:3]
    dtype = np.uint8 if space.dtype in (np.uint8, np.bool_) else np.float32

    def see(image: np.ndarray) -> np.ndarray:
        image = np.moveaxis(np.asarray(image).reshape(shape), axis, 0)
        return np.array(image, dtype, order="C")  # a copy: a task may use its buffer again

    return see, Box(see(space.low), see(space.high), dtype=dtype)


def unfit_part(space: gym.Space, name: str = "observation") -> str:
    """Name the first part of a space that has no place in a vector, and a remedy.

    "" means that all have one.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        for key, part in parts:
            unfit = unfit_part(part, f"{name}[{key!r}]")
            if unfit:
                return unfit
        return ""

    if isinstance(space, Box):
        many_images = space.dtype == np.uint8 and len(space.shape) > 3
        if many_images:
            return f"{name} is {space}, a stack of images; move the stack into the channels"
        if channel_axis(space) is not None:
            text = "which counts as an image (a flat one would not); images are not joined with"
            return f"{name} is {space}, {text} other parts; wrap the task to give it alone"
        return ""

    if isinstance(space, Discrete | MultiDiscrete | MultiBinary):
        return ""
    remedy = "it has no place in a vector; wrap the task in a module of yours, module:id"
    return f"{name} is {space}; {remedy}"


def vector_view(space: gym.Space, args: Args, hidden: tuple[int, ...]) -> tuple[Callable, Box]:
    """Return how anything else is seen, and the space of that: flat float32 vectors.

    Masked and hidden entries are zeros, whatever the task gives there. Their bounds are 0, too.
    """
    unfit = unfit_part(space)
    if unfit:
        raise UsageError(f"--env-id {args.env_id}: {unfit}")
    is_flat = isinstance(space, Box) and len(space.shape) == 1
    keep = np.ones(gym.spaces.flatdim(space), bool)
    if not len(keep):
        raise UsageError(f"--env-id {args.env_id}: its observations are {space}, which is empty")
    if hidden and max(hidden) >= len(keep):
        text = f"it shows {len(keep)} entries, and its velocities are said to be further on"
        raise UsageError(f"--env-id {args.env_id}: {text}; use the newest version of the task")
    for index in (*args.masked_obs, *hidden):
        if not 0 <= index < len(keep):
            raise UsageError(f"--masked-obs {index}: must be in 0..{len(keep) - 1}")
        keep[index] = False
    unseen = (~keep).nonzero()[0]

    def see(obs: Any) -> np.ndarray:
        flat = obs if is_flat else gym.spaces.flatten(space, obs)
        seen = np.array(flat, np.float32)
        seen[unseen] = 0
        return seen

    bounds = np.where(keep, np.inf, 0).astype(np.float32)
    return see, Box(-bounds, bounds, dtype=np.float32)


def misfit(space: gym.Space, value: Any, name: str = "observation") -> str:
    """Say how an observation, or a part of it, does not fit its space. "" means that it fits.

    A Box compares shapes, and a Box of integers holds whole numbers that its dtype can hold. The
    bounds of a Box are not compared.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        for key, part in parts:
            try:
                found = misfit(part, value[key], f"{name}[{key!r}]")
            except (KeyError, IndexError, TypeError):
                found = f"{name} lacks {key!r}"
            if found:
                return found
        if isinstance(space, gym.spaces.Tuple) and len(value) > len(space):
            return f"{name} has {len(value)} parts, and its space has {len(space)}"
        return ""
    found = misfit_of_one(space, value)
    return f"{name} {found}; its space is {space!s:.200}" if found else ""


def misfit_of_one(space: gym.Space, value: Any) -> str:
    """Say how a value does not fit a space without parts. "" means that it fits."""
    if not isinstance(space, Box):
        kind = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        with contextlib.suppress(ValueError):  # a ragged list
            if value in space:
                return ""
        return f"is {value!r:.100}{kind}"

    try:
        array = np.asarray(value)
    except (ValueError, RuntimeError, TypeError) as error:  # ragged parts, tensors of a GPU
        return f"is no array ({error})"
    if array.shape != space.shape:
        return f"has the shape {array.shape}"
    if not holds_numbers(array):
        return f"has no numbers ({array.dtype})"

    if space.dtype.kind in "iub" and not np.can_cast(array.dtype, space.dtype):
        dtype = np.uint8 if space.dtype == np.bool_ else space.dtype
        try:
            with np.errstate(invalid="ignore"):
                whole = (array.astype(dtype) == array).all()
        except (ValueError, OverflowError):  # objects that are NaN, infinite, or too large
            whole = False
        if not whole:
            ends = f"from {array.min()!s:.20} to {array.max()!s:.20}"
            return f"has numbers {ends} of {array.dtype}"
    elif array.dtype == object:
        try:
            array.astype(np.float64)
        except OverflowError as error:
            return f"has numbers that are too large ({error})"
    return ""


def holds_numbers(array: np.ndarray) -> bool:
    """Tell whether an array has numbers alone. One of objects may, as a row of a table."""
    if array.dtype == object:
        return all(isinstance(one, numbers.Real) for one in array.flat)
    return array.dtype.kind in "biuf"


def as_rows(obs: np.ndarray, space: Box) -> tuple[np.ndarray, bool]:
    """Return observations as rows (N, ...), and whether it was one alone.

    Entries of vectors that `make_env` hides become 0 here, too. Their bounds in the space are 0.
    Raises ValueError for an observation that does not fit the space, or is not finite.
    """
    rows = np.asarray(obs)
    if rows.dtype == object and holds_numbers(rows):
        rows = rows.astype(np.float64)
    alone = rows.ndim <= len(space.shape)
    if alone:
        rows = rows[None]
    for row in rows:
        found = misfit(space, row)
        if found:
            raise ValueError(f"{found} (make_env's `see` makes it from the task's own observation)")
    if len(space.shape) == 1:
        rows = np.where((space.low == 0) & (space.high == 0), 0, rows)
    for row in rows:
        if not np.isfinite(row).all():
            raise ValueError(f"observation {row} is not finite")
    return rows, alone


def check_levels(levels: tuple[float, ...], args: Args) -> None:
    """Raise ValueError unless there are levels of quantiles, all of them numbers in [0.001, 1].

    It is also raised for critics that have learnt no distribution.
    """
    if args.dist_coef == 0:
        raise ValueError("predict_returns: trained with --dist-coef 0, the critics know V alone")
    given = np.array(levels) if isinstance(levels, tuple | list | np.ndarray) else np.empty(0)
    are_numbers = given.ndim == 1 and given.size and given.dtype.kind in "iuf"
    if not are_numbers or not np.all((given >= 1e-3) & (given <= 1)):
        text = "levels must be a tuple of numbers in [0.001, 1]"
        raise ValueError(f"predict_returns: {text}, and they are {levels!r:.100}")


def one_or_all(rows: Tensor, alone: bool) -> np.ndarray:
    """Return rows (N, ...), or the only one of them, as an array."""
    array = rows.cpu().numpy()
    return array[0] if alone else array


def torch_settings() -> tuple[torch.dtype, bool]:
    """Return the settings of torch that are kept apart for tasks: default dtype and gradients."""
    return torch.get_default_dtype(), torch.is_grad_enabled()


def set_torch(settings: tuple[torch.dtype, bool]) -> None:
    """Restore settings that `torch_settings` gave."""
    dtype, grad = settings
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


def reachable(space: Box) -> bool:
    """Tell whether actions around 0 with a std around 1 reach both bounds, and not far beyond."""
    ends = np.concatenate((-space.low, space.high), axis=None)
    return bool(((ends >= 0.1) & (ends <= 10)).all())


def place_in_task(error: BaseException) -> str:
    """Return file and line where a task's own code raised an error, or "" if others raised it.

    Others are gymnasium and this file. Python's own library is passed over: whoever called it made
    the fault.
    """
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        module = frame.f_globals.get("__name__", "")
        package = module.split(".")[0]
        if package in sys.stdlib_module_names and module != __name__:
            continue
        if module == __name__ or package == "gymnasium":
            break
        return f"{frame.f_code.co_filename}, line {line}"
    return ""


class Checked(gym.Wrapper):
    """It turns what a task gives into plain numbers of its own, or says why it cannot.

    `see` turns an observation that fits its space into a copy, an array of `seen`. The reward
    becomes a float. `info` is dropped, since nobody reads it, and gymnasium could not batch what
    some tasks put there. Tasks may change torch's default dtype and turn gradients off. Each task
    finds its own settings again, also where it is read back, and the networks keep theirs.
    """

    tasks_settings: ClassVar[dict[str, tuple]] = {}  # of torch, by env_id, where tasks change them
    in_other_process = False  # than the run, as with --async-envs

    def __init__(self, env: gym.Env, env_id: str, see: Callable, seen: Box) -> None:
        super().__init__(env)
        self.env_id = env_id
        self.see = see
        space = env.observation_space
        self.usual = (space.shape, space.dtype) if isinstance(space, Box) else None
        self.observation_space = seen

    def reset(self, **options: Any) -> tuple[np.ndarray, dict]:
        """Return the first observation of an episode."""
        try:
            found = self.ask(self.env_id, self.env.reset, **options)
        except TypeError as error:
            if "reset() got an unexpected keyword" not in str(error) or place_in_task(error):
                raise
            raise self.refusal("reset() must take seed and options, as gymnasium asks") from error
        if not isinstance(found, tuple) or len(found) != 2:
            text = "reset() must return a tuple of an observation and info, as gymnasium asks"
            raise self.refusal(text)
        return self.look(found[0]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Return what follows on an action."""
        try:
            obs, reward, terminated, truncated, _ = self.ask(self.env_id, self.env.step, action)
        except (TypeError, ValueError) as error:
            unfit = "(expected 5" in str(error) or "cannot unpack" in str(error)
            if not unfit or place_in_task(error):
                raise
            text = "step() must return five values, as gymnasium asks; old gym had four"
            raise self.refusal(text) from error
        ends = self.truth(terminated), self.truth(truncated)
        return self.look(obs), self.number(reward), *ends, {}

    def render(self) -> Any:
        """Return a frame, a copy."""
        frame = self.ask(self.env_id, self.env.render)
        return np.array(frame, order="C") if isinstance(frame, np.ndarray) else frame

    def close(self) -> None:
        """Close the task."""
        self.ask(self.env_id, self.env.close)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: attributes, and the task's settings of torch, if it has some."""
        return vars(self) | {"settings": self.tasks_settings.get(self.env_id)}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Take up what was pickled."""
        settings = attributes.pop("settings", None)  # older checkpoints have none
        vars(self).update(attributes)
        self.tasks_settings.pop(self.env_id, None)
        if settings is not None:
            self.tasks_settings[self.env_id] = settings

    @classmethod
    def ask(cls, env_id: str, call: Callable, *inputs: Any, **options: Any) -> Any:
        """Call a task under its own settings of torch. Its exit is a fault like others."""
        ours = torch_settings()
        if env_id in cls.tasks_settings:
            set_torch(cls.tasks_settings[env_id])
        try:
            return call(*inputs, **options)
        except SystemExit as error:
            raise RuntimeError(f"the task called exit({error.code})") from error
        finally:
            theirs = torch_settings()
            if theirs != ours:
                cls.tasks_settings[env_id] = theirs
                set_torch(ours)
            elif env_id in cls.tasks_settings:
                del cls.tasks_settings[env_id]

    def look(self, obs: Any) -> np.ndarray:
        """Return an observation as `see` gives it."""
        if isinstance(obs, Tensor):
            with contextlib.suppress(TypeError):  # of bfloat16, which NumPy lacks
                obs = obs.detach().cpu().numpy()
        fits = isinstance(obs, np.ndarray) and (obs.shape, obs.dtype) == self.usual  # the fast way
        found = "" if fits else misfit(self.env.observation_space, obs)
        if found:
            raise self.refusal(found)
        return self.see(obs)

    def number(self, reward: Any) -> float:
        """Return a reward, which some tasks pay as arrays, tensors, or large integers."""
        try:
            return float(reward.item() if hasattr(reward, "item") else reward)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise self.refusal(f"its reward must be a number, but it is {reward!r:.100}") from error

    def truth(self, ended: Any) -> bool:
        """Return whether an episode ended, which some tasks tell by arrays or numbers."""
        with contextlib.suppress(ValueError, RuntimeError):  # those of several entries
            ended = ended.item() if hasattr(ended, "item") else ended
        if not isinstance(ended, bool | int | float | None):  # a list would always be true
            text = f"terminated and truncated must be true or false, but one is {ended!r:.100}"
            raise self.refusal(text)
        return bool(ended)

    def refusal(self, text: str) -> ValueError:
        """Return an error that names the task.

        `UsageError` cannot be sent between processes. So another process raises ValueError, and
        `Run.__exit__` makes it a `UsageError` again.
        """
        kind = ValueError if self.in_other_process else UsageError
        return kind(f"--env-id {self.env_id}: {text}; mend the task")


def refuse_other_atari(env: gym.Env, args: Args) -> None:
    """Raise `UsageError` for ids of Atari games that are not ALE/...

    They would train on raw single frames, with rewards as they are. Most have no sticky actions.
    """
    if args.is_atari or not str(env.unwrapped.spec.entry_point).startswith("ale_py"):
        return
    newest = newest_atari_id(args.env_id)
    text = "is not set up as Machado et al. 2018 ask"
    remedy = f"use {newest}"
    if newest.removeprefix("ale_py:") not in gym.registry:  # a registration of the user's
        module, _, task = args.env_id.rpartition(":")
        remedy = f"register it as ALE/{task}, and name it {module or 'module'}:ALE/{task}"
    raise UsageError(f"--env-id {args.env_id}: {text}; {remedy}")


def newest_atari_id(env_id: str) -> str:
    """Return the id of today for an older one of the same game."""
    game = env_id.split(":")[-1].split("-")[0]
    for kind in ("NoFrameskip", "Deterministic"):
        game = game.removesuffix(kind)
    return f"ale_py:ALE/{game}-v5"


def check_spaces(env: gym.Env, args: Args) -> None:
    """Raise `UsageError` for a task that has no spaces, or has those of old gym."""
    for name in ("observation_space", "action_space"):
        found = getattr(env, name, None)
        if not isinstance(found, gym.Space):
            text = f"its {name} is {found!s:.100} of {type(found).__module__}"
            raise UsageError(f"--env-id {args.env_id}: {text}; it must be of gymnasium.spaces")


def advice(error: Exception, args: Args) -> str:
    """Return what may help where a task could not be made, or ""."""
    packages = "pip install ale-py opencv-python-headless"
    if args.is_atari and args.env_id.startswith("ale_py:"):
        installed = find_spec("ale_py") and find_spec("cv2")
        return "" if installed else f" Needed: {packages}"
    if args.is_atari and ":" not in args.env_id:
        return f" Use ale_py:{args.env_id}, after {packages}"

    module, _, task = args.env_id.rpartition(":")
    if module.endswith(".py") or "/" in module or "\\" in module:
        name = module.replace("\\", "/").split("/")[-1].removesuffix(".py")
        return f" Name the module alone, {name}:{task}, and run in its folder, or see PYTHONPATH"

    for name, package in {"popgym": "popgym", "minigrid": "minigrid", "minatar": "MinAtar"}.items():
        if name in args.env_id.lower() and not find_spec(name):
            return f" Needed: pip install {package}"

    root = module.split(".")[0]
    if "No module named 'benchmarks" in str(error):
        return " Needed: a folder benchmarks with our envs.py, beside the script"
    if isinstance(error, ModuleNotFoundError) and root and not find_spec(root):
        return f" {root} is looked for in {os.getcwd()}, beside the script and by PYTHONPATH"
    if "required positional argument" in str(error) or "required keyword-only" in str(error):
        return " Give arguments in gymnasium.register(..., kwargs={...})"

    if isinstance(error, gym.error.NameNotFound) and ":" not in args.env_id:
        if "NoFrameskip" in args.env_id or "Deterministic" in args.env_id:
            return f" Use {newest_atari_id(args.env_id)}, after {packages}"
        if "NoVel" in args.env_id:
            known = ", ".join(VELOCITIES)
            return f" Known without velocities are {known}; hide others by --masked-obs"
        return " A task of your own is named module:id"
    if isinstance(error, gym.error.NameNotFound):
        file = getattr(sys.modules.get(module), "__file__", "Python itself")
        return f" {module} was taken from {file}, which registers no such id"
    return ""


def make_env(args: Args, **options: Any) -> gym.Env:
    """Make one environment that shows images, channels first, or float32 vectors.

    It checks what the task gives, and counts the return and the length of episodes. Of `info` it
    leaves these alone, under STATS where an episode ends. `options` go to `gymnasium.make`. Atari
    games have sticky actions, and a lost life does not end an episode (Machado et al. 2018). They
    have only the actions that the game knows. Raises `UsageError` for ids, packages, spaces and
    masks that do not work.
    """
    hidden = velocities(args.env_id)
    name = args.env_id.replace("NoVel", "", 1) if hidden else args.env_id
    if args.is_atari:  # actions are sticky, and a lost life does not end the episode
        atari = {"frameskip": 1, "repeat_action_probability": 0.25, "max_episode_steps": 108_000}
        options = atari | options

    with contextlib.ExitStack() as after_a_fault:  # some tasks can be open only once
        try:
            env = Checked.ask(args.env_id, gym.make, name, disable_env_checker=True, **options)
            after_a_fault.callback(close_quietly, env)
            refuse_other_atari(env, args)
            if args.is_atari:
                env = gym.wrappers.AtariPreprocessing(env, noop_max=0)
                env = gym.wrappers.FrameStackObservation(env, 4)
        except UsageError:
            raise
        except Exception as error:  # from gymnasium, from a missing package, from the task itself
            from_task = bool(place_in_task(error))  # else gymnasium may have wrapped the task's
            cause = error if from_task else error.__cause__ or error.__context__ or error
            place = place_in_task(cause)
            text = f"{type(cause).__name__}: {cause} ({place})" if place else str(error)
            text = f"{text or repr(error)}{advice(error, args)}"
            raise UsageError(f"--env-id {args.env_id}: {text}") from error

        check_spaces(env, args)
        space = env.observation_space
        if channel_axis(space) is None:
            see, seen = vector_view(space, args, hidden)
        else:
            see, seen = image_view(space, args)

        env = Checked(env, args.env_id, see, seen)
        after_a_fault.pop_all()
    return gym.wrappers.RecordEpisodeStatistics(env, stats_key=STATS)


def make_together(args: Args, number: int) -> gym.vector.SyncVectorEnv:
    """Make environments that take their steps one after the other, in this process.

    One that ends is reset in the same step. A fault closes those that were made ahead of it.
    """
    mode = gym.vector.AutoresetMode.SAME_STEP  # `collect_rollout` relies on it
    with contextlib.ExitStack() as after_a_fault:

        def make() -> gym.Env:
            env = make_env(args)
            after_a_fault.callback(close_quietly, env)
            return env

        envs = gym.vector.SyncVectorEnv([make] * number, copy=False, autoreset_mode=mode)
        after_a_fault.pop_all()
    return envs


def make_envs(args: Args) -> gym.vector.VectorEnv:
    """Make this process's environments, or, with `async_envs`, processes that hold them."""
    own_envs = args.num_envs // WORLD_SIZE
    if not args.async_envs:
        with differing_spaces(args):
            return make_together(args, own_envs)

    if "forkserver" not in multiprocessing.get_all_start_methods():
        text = f"this system has no forkserver; {remedy_without(args, '--no-async-envs')}"
        raise flag_error(args, "async_envs", text)

    env = make_env(args)  # for its spaces; and mistakes are told here, not by a process of many
    close_quietly(env)
    try:
        with differing_spaces(args):
            return EnvsInProcesses(args, own_envs, env.observation_space, env.action_space)
    except (EOFError, ConnectionError) as error:  # a process ended before it could say why
        text = f"a process that makes the task ended ({error!r}), and may have said why above"
        text += f"; {remedy_without(args, '--no-async-envs')}"
        raise of_this_process(flag_error(args, "async_envs", text)) from error
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        text = f"its processes need sockets, for which the path {tempfile.gettempdir()} is too long"
        text += f"; set TMPDIR to a shorter one, or {remedy_without(args, '--no-async-envs')}"
        raise of_this_process(flag_error(args, "async_envs", text)) from error


@contextlib.contextmanager
def differing_spaces(args: Args) -> Iterator[None]:
    """Turn what gymnasium raises for environments whose spaces differ into a `UsageError`."""
    try:
        yield
    except RuntimeError as error:
        if " space" not in str(error):
            raise  # as of a program that starts processes while it is imported
        mistake = flag_error(args, "num_envs", f"{args.env_id} is not the same each time: {error}")
        raise of_this_process(mistake) from error


def of_this_process(mistake: UsageError) -> UsageError:
    """Add the number of this process to a mistake that it may have met alone."""
    if WORLD_SIZE > 1:
        mistake.add_note(f"in process {RANK}")
    return mistake


def remedy_without(args: Args, flag: str) -> str:
    """Say how to do without what a flag asks for. A resume keeps the flags of its run."""
    return f"start anew with --init-from and {flag}" if args.resume else "leave it out"


class EnvsInProcesses(gym.vector.VectorEnv):
    """Environments in processes, of which there are no more than cores.

    AsyncVectorEnv has a process for each of its environments. Here a process has a `Group` of them.
    More processes than cores cost more than they gain, and each has the memory of its own imports.
    All groups have the same size, so 7 environments on 4 cores are one group.
    """

    def __init__(
        self, args: Args, num_envs: int, observation_space: Box, action_space: Any
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space

        most = max(1, usable_cores() // processes_here())
        processes = max(n for n in range(1, most + 1) if num_envs % n == 0)
        self.size = num_envs // processes  # of a group
        firsts = range(RANK * num_envs, (RANK + 1) * num_envs, self.size)
        makers = [partial(Group, args, os.getpid(), 1 + first, self.size) for first in firsts]

        multiprocessing.set_forkserver_preload(["gymnasium", "torch.utils.tensorboard", "tyro"])
        self.groups = gym.vector.AsyncVectorEnv(
            makers,
            copy=False,
            context="forkserver",  # a fork would have torch's locks without those who hold them
            autoreset_mode=gym.vector.AutoresetMode.DISABLED,  # groups reset by themselves
        )
        self.groups.call("outlive_sigterm")
        for process in self.groups.processes:
            # At exit multiprocessing sends SIGTERM, which they outlive, and waits. Let it kill.
            process._popen.terminate = process._popen.kill

    def join(self, x: np.ndarray) -> np.ndarray:
        """Turn (groups, n, ...) into (N, ...)."""
        return x.reshape(self.num_envs, *x.shape[2:])

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Open an episode in each environment. seed is None, or has one for each."""
        seeds = None if seed is None else np.reshape(seed, (-1, self.size)).tolist()
        with telling_of_faults():
            obs, _ = self.groups.reset(seed=seeds, options=options)
        return self.join(obs), {}

    def step(self, actions: np.ndarray) -> tuple:
        """Step all environments. `info` has what SyncVectorEnv gives where episodes ended."""
        grouped = actions.reshape(-1, self.size, *actions.shape[1:])
        with telling_of_faults():
            *facts, found = self.groups.step(grouped)
        info = {}
        if "final_obs_" in found:
            stats = {name: self.join(found[name]) for name in ("r", "l")}
            info = {"final_obs": self.join(found["final_obs_"]), "final_info": {STATS: stats}}
        return *map(self.join, facts), info

    def close_extras(self, **options: Any) -> None:
        """End the processes. Those that have not ended after 20 seconds are killed."""
        last_resort = threading.Timer(20, self.kill)
        last_resort.daemon = True
        try:
            last_resort.start()
            self.groups.close(timeout=10)
        except (EOFError, ConnectionError):  # one had ended before
            self.groups.closed = True  # or gymnasium tries again where this is thrown away
        finally:
            last_resort.cancel()
            self.kill()

    def kill(self) -> None:
        """Kill the processes that have not ended."""
        for process in self.groups.processes:
            process.kill()


@contextlib.contextmanager
def telling_of_faults() -> Iterator[None]:
    """Tell the traceback of a fault in a process of environments, or that the process has ended."""
    try:
        with collecting_warnings() as told:
            yield
    except (EOFError, ConnectionError) as error:
        text = "a process of --async-envs ended; was it killed, for its memory or by a signal?"
        raise RuntimeError(text) from error
    except Exception as error:
        if not str(error).startswith("--env-id"):  # such a refusal has said all, see `Checked`
            tell("\n".join(told), file=sys.stderr)
        raise


@contextlib.contextmanager
def collecting_warnings() -> Iterator[list[str]]:
    """Collect what gymnasium would warn of.

    It takes its own messages for format strings. So a % in a path or in a line of a traceback would
    be a fault that hides what the message is about.
    """
    told: list[str] = []
    log = gym.logger
    before = log.warn, log.error
    log.warn = log.error = lambda text, *_, **__: told.append(text)
    try:
        yield told
    finally:
        log.warn, log.error = before


@contextlib.contextmanager
def faults_that_travel() -> Iterator[None]:
    """Replace an exception that does not reach the main process by a RuntimeError with its text.

    AsyncVectorEnv pickles it and makes another one of the same class from it. Those of broken
    connections are replaced as well, since there they mean that this process has ended.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(repr(error)) from error
    except Exception as error:
        try:
            copy = pickle.loads(pickle.dumps(error))
            type(copy)(copy)
        except Exception:
            raise RuntimeError(repr(error)) from error
        raise


class Group(gym.Env):
    """Environments that share a process, which has generators of its own."""

    def __init__(self, args: Args, main_pid: int, index: int, size: int) -> None:
        if os.getpid() != main_pid:  # AsyncVectorEnv also makes one in the main process
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
            if hasattr(os, "setpgrp"):
                os.setpgrp()  # and so is what a closing terminal sends
            torch.set_num_threads(1)
            Checked.in_other_process = True
            seed_generators(args, WORLD_SIZE + index)  # for tasks that draw while they are made
            torch.manual_seed(derived_seed(args.seed, "tasks", WORLD_SIZE + index))
        self.envs = make_together(args, size)
        self.observation_space = self.envs.observation_space
        self.action_space = self.envs.action_space

    def outlive_sigterm(self) -> None:
        """Go on for a minute after SIGTERM, which batch systems send to all processes of a job.

        The main process still finishes its iteration and saves, and needs this one for that. An
        iteration that takes longer ends without a new checkpoint.
        """
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(60))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Open an episode in each environment.

        Seeds also set the generators of this process. They depend on the step, so that tasks do not
        meet the numbers of the run's beginning again where a resume opens new episodes.
        """
        if seed is not None:
            seed_global_generators(derived_seed(seed[0], "tasks", 0, bits=32))
        with faults_that_travel():
            return self.envs.reset(seed=seed, options=options)

    def step(self, actions: np.ndarray) -> tuple:
        """Step each environment. `info` has arrays alone, which AsyncVectorEnv can join."""
        with faults_that_travel():
            obs, rewards, terminated, truncated, info = self.envs.step(actions)
        found = {}
        if "final_obs" in info:
            final_obs = obs.copy()
            ended = terminated | truncated
            final_obs[ended] = np.stack(info["final_obs"][ended])
            stats = info["final_info"][STATS]
            found = {"final_obs_": final_obs, "r": stats["r"], "l": stats["l"]}
        return obs, rewards, terminated, truncated, found

    def close(self) -> None:
        """Close them."""
        close_quietly(self.envs)


def open_episodes(envs: gym.vector.VectorEnv, agent: Agent, run: Run) -> tuple[Carry, Tensor]:
    """Open an episode in every environment, or go on with those of the run that is resumed.

    Returns what the actor starts from and the critics' state.
    """
    if run.carried is not None:
        *acting, critic_state = run.carried
        return Carry(*acting), critic_state.to(agent.device)
    torch.manual_seed(run.env_seeds[0])  # tasks may draw from it; `Run.iterations` seeds it anew
    obs, _ = envs.reset(seed=run.env_seeds)
    check_finite("the first reset", obs)
    state = agent.initial_state(len(obs))
    return Carry(obs.copy(), np.ones(len(obs), bool), state.cpu().numpy()), state


def finished_episodes(info: dict, ended: np.ndarray, t: int) -> list[tuple[int, float, int]]:
    """Return step t, return and length of each episode that ended at t."""
    stats = info["final_info"][STATS]
    return [(t, float(stats["r"][i]), int(stats["l"][i])) for i in ended.nonzero()[0]]


def check_finite(when: str, *observations: np.ndarray, rewards: np.ndarray | None = None) -> None:
    """Raise RuntimeError that names environment and moment unless all, (N, ...), are finite."""
    finite = np.ones(len(observations[0]), bool) if rewards is None else np.isfinite(rewards)
    for x in observations:
        finite &= np.isfinite(x).reshape(len(x), -1).all(1)
    if finite.all():
        return
    i = int(finite.argmin())
    place = f"environment {i}" + (f" of process {RANK}" if WORLD_SIZE > 1 else "")
    texts = dict.fromkeys(str(x[i]) for x in observations)  # two where a next episode has opened
    found = "observation " + ", then ".join(texts)
    if rewards is not None:
        found += f", reward {rewards[i]}"
    raise RuntimeError(f"not finite: {found}, {place}, {when}; check the task")


class NotFinite(RuntimeError):
    """A loss or a gradient is not finite. All processes of a run find it at once."""


def check_step(loss: float, norm: float, name: str, flag: str) -> None:
    """Raise `NotFinite` unless the loss of a minibatch and its gradient's norm are finite.

    `flag` is that of the learning rate, which the message names as a remedy.
    """
    if not math.isfinite(loss + norm):
        found = f"loss {loss:g}, gradient {norm:g} of {name}"
        raise NotFinite(f"{found}: not finite; try a smaller {flag}")


# -------------------------------------------------------------------- metrics that only describe
def describe_critics(
    dist: ValueDistribution,
    rollout: Rollout,
    outputs: Tensor,
    reduced: Tensor,
    next_reduced: Tensor,
    returns: Tensor,
) -> dict:
    """Compare what the critics predicted for a rollout with what came, ahead of the update.

    outputs are those of all critics for s_t, (C, T, N, ...). reduced and next_reduced (T, N, ...)
    are for s_t and s'_t. returns (T, N) are lambda-returns.
    """
    values = dist.value(reduced)
    twins = dist.value(outputs)  # (C, T, N)
    samples = dist.sample_targets(rollout, next_reduced, gae_lambda=1.0)
    all_values = gather(values)
    all_returns = gather(returns)
    return dist.describe(reduced, samples) | {
        "value/bias": (values - returns).mean(),
        "value/std_target": all_returns.std(correction=0),
        "losses/explained_variance": explained_variance(all_values, all_returns),
        "cvar/weight": dist.args.cvar_weight if dist.args.cvar_alpha < 1 else 0.0,
        "twin/abs_difference": (twins[0] - twins[-1]).abs().mean(),
        "twin/critic1_is_min": (twins[0] <= twins[-1]).float().mean(),
        "data/truncated_fraction": (rollout.truncated & ~rollout.terminated).float().mean(),
    }


def describe_advantages(raw: Tensor, scaled: Tensor) -> dict[str, float]:
    """Describe advantages in the task's units, and as the policy's loss takes them."""
    raw, scaled = (gather(x.reshape(1, -1)) for x in (raw, scaled))
    return {
        "adv/mean_raw": float(raw.mean()),
        "adv/std_raw": float(raw.std(correction=0)),
        "adv/std": float(scaled.std(correction=0)),
        "adv/abs_max": float(scaled.abs().max()),
    }


def describe_update(
    actor_metrics: list[dict],
    critic_metrics: list[dict],
    actor_norms: list[float],
    critic_norms: list[float],
    args: Args,
) -> dict[str, float]:
    """Average metrics over the minibatches that were evaluated, and norms over the steps taken.

    Four are no means: policy/kl_max, policy/ratio_first_minibatch_error, policy/epochs_done and
    policy/stopped_early. There may be a `warning`, a text.
    """
    columns = {}
    for evaluated in (actor_metrics, critic_metrics):
        columns |= {tag: torch.stack([one[tag] for one in evaluated]) for tag in evaluated[0]}
    log_ratio = columns.pop("policy/log_ratio").clamp(-20, 20)  # finite, as in the loss
    ratio = gather(log_ratio.exp())  # (minibatches, B)
    kl = average(columns["policy/kl_exact"])  # (minibatches,)
    columns |= {
        "policy/kl_max": kl.max(),
        "policy/ratio_mean": ratio,
        "policy/ratio_std": ratio.std(1, correction=0),
        "policy/ratio_first_minibatch_error": (ratio[0] - 1).abs().max(),  # rounding alone
        "grad/actor": torch.tensor(actor_norms or [0.0]),
        "grad/critic": torch.tensor(critic_norms),
    }
    described = {tag: float(x.mean()) for tag, x in columns.items()} | {
        "policy/epochs_done": len(actor_norms) / args.num_minibatches,
        "policy/stopped_early": float(len(actor_norms) < len(actor_metrics)),
    }

    error = described["policy/ratio_first_minibatch_error"]
    if error > 0.01:  # no step was taken yet, so the ratio is 1 in an actor without a fault
        text = "the policy that trains is not the one that acted; edit `numpy_policy` as well"
        text += ", or, in a script without edits, scale large observations or take a lower rate"
        described["warning/ratio"] = f"policy/ratio_first_minibatch_error {error:.2g}: {text}"
    return described


def empirical_cvar(returns: Tensor, alpha: float) -> float:
    """Return the mean of the lowest share alpha of a sample (n,). The last one counts in part."""
    size = alpha * len(returns)
    mass = (size - torch.arange(len(returns)).double()).clamp(0, 1)
    return float((mass * returns.sort().values).sum() / size)


# ------------------------------------------------------------------------------ tags of TensorBoard
# The other script has the same dictionary. Tags that only one of them writes are in it, too.
DESCRIPTIONS = {
    "adv/abs_max": "The largest absolute advantage that the policy's loss takes.",
    "adv/mean_raw": "Mean of the advantages, in the task's units.",
    "adv/std": "Standard deviation of the advantages that the policy's loss takes. With a running "
    "std it is below 1 where advantages vary less than they did.",
    "adv/std_raw": "Standard deviation of the advantages, in the task's units.",
    "charts/SPS": "Steps per second, without evaluations, checkpoints and logging.",
    "charts/critic_learning_rate": "Learning rate of the critics' Adam.",
    "charts/episodic_length": "Length of each training episode.",
    "charts/episodic_return": "Return of each training episode, undiscounted.",
    "charts/learning_rate": "Learning rate of the actor's Adam.",
    "charts/recent_returns": "Returns of the last 100 training episodes.",
    "cvar/coverage": "Share of returns, bootstrapped where cut, below the predicted quantile "
    "cvar_alpha. It is near cvar_alpha where the tail is right.",
    "cvar/empirical": "CVaR of the last 100 training returns, undiscounted.",
    "cvar/predicted": "CVaR of the predicted distributions, discounted, the mean over states.",
    "cvar/weight": "Weight of the CVaR advantage.",
    "data/truncated_fraction": "Share of steps at which a time limit cut an episode.",
    "eval/length_mean": "Mean length of the evaluation's episodes.",
    "eval/return_cvar": "Mean return of the worst episodes, the share cvar_alpha of them.",
    "eval/return_mean": "Mean return of the evaluation's episodes.",
    "eval/return_std": "Standard deviation of the returns of the evaluation's episodes.",
    "grad/actor": "Norm of the actor's gradient before it is clipped.",
    "grad/critic": "Norm of the critics' gradient before it is clipped.",
    "losses/approx_kl": "Estimate k3 of the KL divergence from the policy that acted, in nats.",
    "losses/clipfrac": "Share of probability ratios beyond the clipping range.",
    "losses/entropy": "Entropy of the policy, in nats.",
    "losses/explained_variance": "Share of the variance of lambda-returns that V explained before "
    "the update. 1 is right but for a constant (value/bias), 0 is no better than a constant.",
    "losses/policy_loss": "Clipped surrogate of the policy.",
    "losses/value_loss": "Mean loss of the critics.",
    "norm/return_mean": "Mean by which returns are normalised.",
    "norm/return_std": "Scale by which returns are normalised.",
    "norm/value_shift": "How far V jumped when the return statistics moved. Once returns have "
    "varied by more than 1e-5 of their mean it is rounding, unless V holds the mean of atoms, "
    "which cannot be rescaled.",
    "policy/entropy_coef": "Weight of the entropy bonus.",
    "policy/epochs_done": "Epochs of the actor's steps. Less than update_epochs after a KL stop, "
    "1 if the actor is not trained.",
    "policy/kl_exact": "KL divergence from the policy that acted, in nats, the mean.",
    "policy/kl_max": "KL divergence from the policy that acted, the largest of a minibatch.",
    "policy/ratio_first_minibatch_error": "Largest distance of a probability ratio from 1 before "
    "any step. It is rounding, or a bug.",
    "policy/ratio_mean": "Mean of the probability ratios.",
    "policy/ratio_std": "Standard deviation of the probability ratios.",
    "policy/stopped_early": "1 where the KL stop ended the actor's loop.",
    "time/rollout": "Seconds of the rollout.",
    "time/update": "Seconds of the update.",
    "time/values": "Seconds of the critics' pass over the rollout, and of advantages and targets.",
    "twin/abs_difference": "Mean distance between the values of the two critics.",
    "twin/critic1_is_min": "How often the first critic has the smaller value; 1 with one critic.",
    "twin/loss_1": "Loss of the first critic.",
    "twin/loss_2": "Loss of the second critic, or of the only one.",
    "value/bias": "Mean of the value minus the lambda-return.",
    "value/clip_fraction": "Share of predictions that value clipping moves. With atoms it includes "
    "those that jumped when the return statistics moved.",
    "value/crossing_fraction": "Share of neighbouring quantiles that are out of order.",
    "value/distribution_gap": "Mean distance of the distribution's mean from the value.",
    "value/outside_support": "Share of the targets' mass beyond the atoms.",
    "value/p10": "Predicted first decile of the return, the mean over states.",
    "value/p50": "Predicted median of the return, the mean over states.",
    "value/p90": "Predicted ninth decile of the return, the mean over states.",
    "value/predicted_returns": "Predicted first, fifth and ninth deciles of all states.",
    "value/realised_returns": "Discounted returns that followed, bootstrapped where cut.",
    "value/std_predicted": "Standard deviation of the predicted distribution, mean over states.",
    "value/std_target": "Standard deviation of lambda-returns over states.",
}
IN_THE_TABLE = ("eval/return_mean", "eval/return_cvar", "charts/SPS")  # of runs, in TensorBoard


def describe_run(args: Args) -> dict[str, str | float]:
    """Return the flags of a run for TensorBoard's table: those that may change its result.

    A table of runs of both scripts has no column for flags of one script alone. So `flags` lists
    in one text those that are not at their default and have no column of their own: TABLE_COLUMNS.
    """
    values = asdict(args)
    kept = {"exp_name", "seed", "init_from", "eval_episodes", "eval_sampled"}
    for name in RunArgs.__dataclass_fields__.keys() - kept:
        del values[name]
    for name in ("async_envs", "torch_threads"):
        del values[name]
    changed = [
        f"{one.name}={values[one.name]}"
        for one in fields(args)
        if one.name in values and one.name not in TABLE_COLUMNS and values[one.name] != one.default
    ]
    values |= {"flags": " ".join(changed), "preset": " ".join(args.preset)}
    return {name: table_value(value) for name, value in values.items()}


TABLE_COLUMNS = ("env_id", "exp_name", "flags", "preset", "seed")  # columns of that table


def table_value(value: Any) -> str | float:
    """Return a flag as a number or as text: booleans are words, None is none."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return value if isinstance(value, int | float | str) else " ".join(map(str, value))


# ---------------------------------------------------------------------------------- start of a run
STREAMS = (  # of random numbers; a new one goes to the end
    "environments",  # seeds of their first resets
    "weights",
    "iterations",  # noise of actions, samples, permutations
    "evaluations",  # seeds of resets, and noise of actions
    "tasks",  # what tasks draw from the global generators while a run trains
    "evaluated tasks",
)


def derived_seed(seed: int, stream: str, index: int, bits: int = 63) -> int:
    """Make a seed for one purpose. Neighbouring seeds, streams and indices have nothing in common.

    NumPy ignores zeros at the end of a key. So every key has two parts, and streams count from 1.
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(1 + STREAMS.index(stream), index))
    return int(mixed.generate_state(1, np.uint64)[0]) >> (64 - bits)


@contextlib.contextmanager
def tasks_draw_apart() -> Iterator[None]:
    """Give tasks a stream of torch's random numbers of their own, which they may also seed.

    The stream depends on the last seed that torch was given, and on the process. Afterwards torch's
    generator is where it was.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(derived_seed(torch.initial_seed(), "tasks", RANK))
    try:
        yield
    finally:
        generator.set_state(before)


def global_generators() -> tuple:
    """Return where the global generators of Python, NumPy and torch (on the CPU) are."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_global_generators(found: tuple) -> None:
    """Put the global generators where `global_generators` found them."""
    random.setstate(found[0])
    np.random.set_state(found[1])
    torch.set_rng_state(found[2])


def seed_global_generators(seed: int) -> None:
    """Give the global generators of Python, NumPy and torch (on the CPU) this seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def generators_apart(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch, from which tasks may draw.

    Afterwards they are where they were, whatever a task has done to them.
    """
    before = global_generators()
    seed_global_generators(seed)
    try:
        yield
    finally:
        set_global_generators(before)


def start(args: Args) -> tuple[Run, Agent, Optimizers, gym.vector.VectorEnv]:
    """Make what a run consists of: anew, resumed, or with the weights of another run.

    It seeds the global generators. At the end of the run they are where they were ahead of it.
    """
    check_flags(args)  # again: a flag may have changed since
    if args.evaluate:
        text = "is for the command line; in Python use load_agent and evaluate"
        raise flag_error(args, "evaluate", text)
    if args.resume:
        require_stored_flags(args, read_checkpoint(args.resume)[1], args.resume)
    else:
        check_presets(args)

    before = global_generators()
    with contextlib.ExitStack() as after_a_fault:
        after_a_fault.callback(set_global_generators, before)
        set_up_process(args)
        here = Path.cwd()  # a task may change the working directory
        envs, eval_env = open_environments(args)
        for env in filter(None, (envs, eval_env)):
            after_a_fault.callback(close_quietly, env)
        agent = make_agent(envs, args, here)
        optimizers = make_optimizers(agent, args)
        run = Run(args, agent, optimizers, envs, eval_env, here)
        run.generators_before = before
        after_a_fault.pop_all()
    return run, agent, optimizers, envs


def set_up_process(args: Args) -> None:
    """Set options of torch and the seeds of all generators."""
    set_torch((torch.float32, True))  # a program may have set others
    torch.set_default_device(None)
    if WORLD_SIZE > 1 and args.cuda:
        torch.cuda.set_device(LOCAL_RANK)
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False  # acting and training have the same precision
    torch.set_float32_matmul_precision("highest")
    seed_generators(args, RANK)


def seed_generators(args: Args, index: int) -> None:
    """Set the seeds of Python and NumPy, by the index of a process, and that of torch."""
    for set_seed in (random.seed, np.random.seed):  # tasks may draw from these
        set_seed(derived_seed(args.seed, "tasks", index, bits=32))
    seed_torch(args)


def seed_torch(args: Args) -> None:
    """Set the seed of torch's generator, which draws the weights: the same in all processes."""
    torch.manual_seed(derived_seed(args.seed, "weights", 0))


def open_environments(args: Args) -> tuple[gym.vector.VectorEnv, gym.Env | None]:
    """Make the environments to train in, and one for evaluations, which stays open to the end.

    Some libraries shut down for all environments when one is closed. With `async_envs`,
    `make_envs` closes some in this process, so it comes ahead of the one for evaluations. The first
    process alone evaluates.
    """
    envs = make_envs(args) if args.async_envs else None
    eval_env = None
    try:
        if RANK == 0 and args.eval_episodes:
            eval_env = make_eval_env(args)
            seed_generators(args, RANK)  # again: the task may have drawn numbers
        if envs is None:
            envs = make_envs(args)
    except BaseException as error:
        for env in (envs, eval_env):
            if env is not None:
                close_quietly(env)

        one_was_made = envs is not None or eval_env is not None
        if one_was_made and isinstance(error, UsageError) and str(error).startswith("--env-id"):
            text = "if few can be open at once, take --eval-episodes 0 and fewer --num-envs"
            raise UsageError(f"{error}; {text}") from error
        raise
    return envs, eval_env


def make_agent(envs: gym.vector.VectorEnv, args: Args, here: Path = Path()) -> Agent:
    """Make the agent to train, with new weights or those of `init_from`, a path relative to `here`.

    One that is resumed gets its weights in `Run.take_up`. Raises `UsageError` like `take_weights`.
    """
    seed_torch(args)  # again: making a task may draw numbers, not as many in each process
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    if args.init_from and not args.resume:
        take_weights(agent, args, here)
    least, largest = agent.action_dist.entropy_range()
    has_floor = args.min_entropy_penalty > 0 and args.learning_rate > 0 and not args.resume
    if has_floor and args.min_entropy > largest:
        text = f"the entropy of these actions is at most {largest:.3f}; choose a lower floor"
        raise flag_error(args, "min_entropy", text)
    if has_floor and args.min_entropy <= least:
        text = f"the entropy of these actions is above {least:.3f}, so this floor has no effect"
        raise flag_error(args, "min_entropy", f"{text}; choose a higher one")
    return agent


def take_weights(agent: Agent, args: Args, here: Path) -> None:
    """Give an agent the weights and statistics of the run or checkpoint `init_from`.

    Raises `UsageError` where they have other shapes or another meaning, and where they know nothing
    of an entry of the observation that the agent will see.
    """
    saved = read_saved(checkpoint_path(resolved(args.init_from, here)))
    require_one_file(args, "init_from", saved)
    stored = SimpleNamespace(**saved["args"])  # another number of processes may have had them
    actions = agent.action_dist.kind
    theirs = meaning(stored) | {"an action": saved.get("actions", actions)} | shapes(saved["agent"])
    ours = meaning(args) | {"an action": actions} | shapes(agent.state_dict())
    for name in theirs | ours:
        if theirs.get(name) != ours.get(name):
            differ = f"{name} is {theirs.get(name)} there, {ours.get(name)} by these flags"
            text = f"{differ}; take its flags (args.json), its networks and its spaces"
            raise flag_error(args, "init_from", text)

    unknown = sorted(hidden_entries(stored) - hidden_entries(args))
    if unknown and args.norm_obs:
        text = f"has no statistics of entries {unknown}, which it did not see; hide them as well"
        raise flag_error(args, "init_from", f"{text} by --masked-obs")

    if RANK == 0:
        tell(f"starts from the weights of {args.init_from}{other_flags(args, saved['args'])}")
    agent.load_state_dict(saved["agent"])
    agent.adv_moments.count.zero_()  # Adam, too, remembers nothing of the other run's advantages
    for index in hidden_entries(args):  # 0 is what the networks see of them
        agent.obs_moments.mean[index] = 0.0


def other_flags(args: Args, stored: dict[str, Any]) -> str:
    """Tell with which other task, discount and critics a run was trained. "" means with none."""
    names = ["env_id", "gamma", "twin_reduce", "value_target", "dist_coef", "cvar_alpha"]
    names += [one.name for one in fields(ValueDistributionArgs)]
    changed = [name for name in names if stored[name] != getattr(args, name)]
    told = ", ".join(f"--{name.replace('_', '-')} {stored[name]}" for name in changed)
    return f", which were trained with {told}" if told else ""


def meaning(args: Args | SimpleNamespace) -> dict[str, Any]:
    """Return the flags that tell what weights of the same shapes mean, by name."""
    names = ("activation", "norm_obs", "norm_returns", "value_from")
    names += ValueDistribution(args).meaning
    return {name: getattr(args, name) for name in names}


def shapes(held: dict[str, Tensor]) -> dict[str, tuple]:
    """Return the shapes of all that an agent holds, by name."""
    return {name: tuple(x.shape) for name, x in held.items()}


# ---------------------------------------------------------------------- threads and optimizers
def run_both(first: Callable, second: Callable, agent: Agent, between: Callable) -> tuple:
    """Call two functions, at once where that pays. Returns what both return.

    It pays for networks with long operations, where there are cores for both. What the functions
    compute is the same either way. `between` is called when the first one has ended, and in two
    threads also when it has failed: the second one may wait for that. Under torchrun they come one
    after the other, since collective calls must have one order in all processes. torch's number of
    threads has to be set in every thread.
    """
    threads = torch.get_num_threads()
    if WORLD_SIZE > 1 or usable_cores() < 2 * threads or not agent.second_thread_pays:
        found = first()
        between()
        return found, second()
    with ThreadPoolExecutor(1, "second", torch.set_num_threads, (threads,)) as pool:
        try:
            later = pool.submit(second)
            found = first()
        finally:
            between()
        return found, later.result()


def usable_cores() -> int:
    """Return the number of cores that this process, or its container, may use."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    for files in CPU_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            microseconds, of = " ".join(file.read_text() for file in files).split()
            if int(microseconds) > 0:  # -1: no limit
                cores = min(cores, max(1, int(microseconds) // int(of)))
    return cores


CPU_LIMITS = (  # of a container under Linux, by version 2 of cgroups and by version 1
    [Path("/sys/fs/cgroup/cpu.max")],
    [Path("/sys/fs/cgroup/cpu", name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")],
)


class VectorAdam(optim.Adam):
    """Adam for one vector of parameters. It calls torch's function and runs no hooks.

    For small networks the hooks and checks of `optim.Adam.step` take longer than the step. It takes
    no closure, and AMSGrad has no effect.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the vector's `grad`. What is kept has the names of `optim.Adam`."""
        [group] = self.param_groups
        [vector] = group["params"]
        kept = self.state[vector]
        if not kept:
            kept["step"] = torch.zeros((), device=vector.device)
            kept["exp_avg"] = torch.zeros_like(vector)
            kept["exp_avg_sq"] = torch.zeros_like(vector)

        beta1, beta2 = group["betas"]
        adam(
            [vector],
            [vector.grad],
            [kept["exp_avg"]],
            [kept["exp_avg_sq"]],
            [],  # what AMSGrad would keep
            [kept["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    step.hooked = True  # or torch would put its hooks around this one too


# --------------------------------------------------------------------------- what a run keeps
def close_quietly(env: gym.Env | gym.vector.VectorEnv) -> None:
    """Close environments. A fault becomes a warning, so that no result is lost.

    Several in this process are closed one by one, since SyncVectorEnv stops at the first fault.
    """
    several = isinstance(env, gym.vector.VectorEnv) and hasattr(env, "envs")
    for one in env.envs if several else [env]:
        try:
            one.close()
        except (Exception, SystemExit) as error:  # from the task, of any kind
            tell(f"warning: the task's close() failed: {error!r}", file=sys.stderr)
    if several:
        env.closed = True


def tell(line: str, end: str = "\n", file: Any = None) -> None:
    """Print a line. A terminal that is gone and a pipe that nobody reads end no run.

    Letters that the encoding of a file lacks are escaped. Some replacements of stdout only write.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            print(line, end=end, file=file, flush=True)
        except UnicodeEncodeError:
            escaped = line.encode("ascii", "backslashreplace").decode()
            print(escaped, end=end, file=file, flush=True)


def figure(x: float) -> str:
    """Return a number for people: with one decimal place, or in three digits where that is none."""
    return f"{x:.1f}" if x == 0 or 0.1 <= abs(x) < 1e7 else f"{x:.3g}"


def tell_over(line: str, file: Any = None) -> None:
    """Print a line that hides a status line in its place."""
    tell(f"{line:<90}", file=file)


class StatusLine:
    """A line that tells of progress. A terminal shows it in place; a file gets one now and then."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds  # between lines of a file
        self.shown_at = time.monotonic()
        self.notices: set[str] = set()

    @property
    def terminal(self) -> bool:
        """Tell whether a terminal shows what is printed. Some replacements of stdout cannot say."""
        with contextlib.suppress(AttributeError, ValueError):  # none has it, a closed one refuses
            return sys.stdout.isatty()
        return False

    @property
    def due(self) -> bool:
        """Tell whether the last line is old enough."""
        return time.monotonic() - self.shown_at > (0.2 if self.terminal else self.seconds)

    def show(self, line: str, last: bool = False) -> None:
        """Show a line. The last one stays."""
        self.shown_at = time.monotonic()
        tell(line, end="   \r" if self.terminal and not last else "\n")

    def notice(self, line: str) -> None:
        """Print a line, but never the same one twice."""
        if line not in self.notices:
            self.notices.add(line)
            tell_over(line)


class Run:
    """It keeps what a run writes and shows: directory, log, progress, evaluations, checkpoints.

    Inside `with run`, in the main thread, the first Ctrl-C, SIGTERM or hang-up ends the run after
    its iteration, or within an evaluation, with a checkpoint. A fault gets a note that names the
    last checkpoint. At the end all is closed.
    """

    SAVED = (
        "step", "seconds", "recent_returns", "logged", "evaluated_at", "best_return", "best_step",
    )  # fmt: skip

    def __init__(
        self,
        args: Args,
        agent: Agent,
        optimizers: Optimizers,
        envs: gym.vector.VectorEnv,
        eval_env: gym.Env | None,
        here: Path = Path(),
    ) -> None:
        self.args = args
        self.agent = agent
        self.optimizers = optimizers
        self.envs = envs
        self.eval_env = eval_env  # None in all processes but the first, and without evaluations
        self.unused_envs: list[gym.Env] = []  # of a resume: open, never stepped, closed at the end
        self.generators_before: tuple | None = None  # of the program, ahead of the run
        # Episodes and generators of the checkpoint that was resumed. Until the first iteration they
        # are still true, and a save, as by an evaluation, writes them again.
        self.untouched: dict[str, Any] = {}
        self.sources = task_sources(envs, args.env_id)

        self.total_steps = args.num_iterations * args.batch_size
        self.step = 0  # environment steps taken
        self.seconds = 0.0  # spent on them, apart from evaluations and checkpoints
        self.recent_returns: list[float] = []  # of the last 100 training episodes
        self.logged: dict[str, float] = {}  # last value of every metric
        self.described: set[str] = set()  # tags whose description is in the log

        self.evaluating = False
        self.saved_at = time.monotonic()  # of the last checkpoint, or the start
        self.saved_step: int | None = None  # of the last checkpoint, in all processes the same
        self.evaluated_at: int | None = None  # step of the last evaluation
        self.best_return = -math.inf  # of the evaluation that `best.pt` is of
        self.best_step = 0  # step of that evaluation; 0 means that there is none
        self.carried: tuple | None = None  # what the next iteration goes on from
        self.lock: int | None = None  # descriptor of the file that is locked

        self.pid = os.getpid()  # forks have another
        self.signals: list[int] = []  # received, and not yet obeyed
        self.handlers: dict[int, Any] = {}  # of signals, as they were before
        self.times: dict[str, float] = {}  # seconds of the parts of this iteration
        self.lap_start = time.monotonic()
        self.status = StatusLine()
        self.evaluation_status = StatusLine(seconds=30)
        self.warned: set[str] = set()  # names of warnings that were printed

        self.writer: SummaryWriter | None = None  # of the first process
        if args.resume:
            self.directory = resolved(args.resume, here)
        else:
            self.directory = gather_objects(make_run_dir(args, here) if RANK == 0 else None)[0]
        try:
            self.lock_directory()
            self.begin()
        except BaseException:
            for env in self.unused_envs:
                close_quietly(env)
            self.unlock_directory()
            raise

    def begin(self) -> None:
        """Take up the run to resume, say what is run, and open the log."""
        args = self.args
        if args.resume:
            changes_flags = self.take_up()
            if RANK == 0 and self.step < self.total_steps:  # a finished run keeps its origin
                tell_of_edits(self.directory)
                rewrite_origin(self.directory, args, self.step)

        place = "kept in" if self.has_nothing_to_do else "logging to"
        self.say("; ".join([*self.facts(), f"{place} {self.directory}"]))
        if RANK == 0 and not self.has_nothing_to_do:
            self.open_log()
        if args.resume and changes_flags and not self.has_nothing_to_do:
            self.save()  # or a kill ahead of the next checkpoint would bring the old flags back

    def facts(self) -> list[str]:
        """Tell what is run: the task, what networks see, the actions, and flags without effect."""
        args = self.args
        shape = self.agent.obs_shape
        seen = f"vectors of {shape[0]}"
        if self.agent.sees_images:
            seen = f"images of {shape[1]} x {shape[2]} with {shape[0]} channels"
        space = self.agent.action_dist.space
        facts = [f"{args.env_id}: networks see {seen}", f"actions {space!s:.100}"]

        if args.log_std_init != Args.log_std_init and not isinstance(space, Box):
            facts.append("--log-std-init has no effect on them")
        if isinstance(space, Box) and not reachable(space):
            if np.isfinite((space.low, space.high)).all():
                facts.append("clipped and not rescaled, see Other bounds of actions in README")
            else:
                facts.append("without bounds on some side, see Other bounds of actions in README")
        if args.masked_obs and {*args.masked_obs} <= {*velocities(args.env_id)}:
            facts.append("--masked-obs has no effect: this task hides these entries by itself")
        if self.agent.sees_images and not args.norm_obs:
            facts.append("--no-norm-obs has no effect on images")
        if not self.agent.sees_images and math.prod(self.agent.obs_shape) > 10_000:
            facts.append("see Images in README if these are pixels")

        if isinstance(self.envs, EnvsInProcesses):
            facts.append(f"environments in each process: {self.envs.size}")
        if args.resume:
            facts.append(f"resumed after {self.step:,} steps")
        if args.preset:
            facts.append(f"preset {' '.join(args.preset)}")
        return facts

    def __enter__(self) -> Run:
        if threading.current_thread() is threading.main_thread():
            caught = [signal.SIGINT, signal.SIGTERM]
            hang_up = getattr(signal, "SIGHUP", None)  # of a closed terminal, where there are such
            if hang_up and signal.getsignal(hang_up) != signal.SIG_IGN:  # nohup ignores it
                caught.append(hang_up)
            for number in caught:
                self.handlers[number] = signal.signal(number, self.request_stop)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # Under torchrun a second signal is on its way, and must not kill this process meanwhile.
        restored = {} if WORLD_SIZE > 1 and self.signals else self.handlers
        for number, handler in restored.items():
            # None stands for one that a library in C had installed, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if isinstance(error, Exception):
            last = "no checkpoint yet"
            if self.saved_step is not None:
                path = self.directory / "checkpoint.pt"
                last = f"last checkpoint, of {self.saved_step:,} steps: {path}"
            error.add_note(f"after {self.step:,} steps; {last}")

        try:
            for env in (self.envs, self.eval_env, *self.unused_envs):
                if env is not None:
                    close_quietly(env)
            if self.writer is not None:
                self.writer.close()
        except OSError:  # a full disk, which may be the error itself
            if error is None:
                raise
        finally:
            self.unlock_directory()
            if self.generators_before is not None:
                set_global_generators(self.generators_before)

        # A task in another process, or read back from a checkpoint, cannot raise our UsageError.
        foreign = isinstance(error, ValueError) and not isinstance(error, UsageError)
        if foreign and str(error).startswith("--env-id"):
            mistake = UsageError(str(error))
            for note in error.__notes__:
                mistake.add_note(note)
            raise mistake from error
        if error is None and self.signals:  # one came after the last time that `stops` asked
            done = f"after {self.step:,} steps; what was done is in {self.directory}"
            raise KeyboardInterrupt(f"interrupted {done}")

    def request_stop(self, number: int, frame: Any) -> None:
        """End the run after this iteration, or this episode of an evaluation.

        A second Ctrl-C kills. In a notebook, or in a program that has imported the script, it
        raises KeyboardInterrupt at once. All other signals that follow are ignored, since one
        request may come as several: batch systems and `timeout` send SIGTERM to a process and to
        its group, a closed terminal hangs up more than once, and torchrun passes Ctrl-C on.
        """
        # A process that a task has forked inherits this handler (but for SIGTERM: `free_sigterm`).
        # It lives on, since the iteration needs it, until a second Ctrl-C. If it ignored signals,
        # so would all processes that it starts from now on.
        if os.getpid() != self.pid:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
            return
        if self.signals:
            return

        self.signals.append(number)
        time.sleep(0.2)  # `timeout -s INT` sends the same request twice, within this time
        lives_on = __name__ != "__main__" or hasattr(builtins, "get_ipython")
        if WORLD_SIZE == 1:
            again = signal.default_int_handler if lives_on else signal.SIG_DFL
            signal.signal(signal.SIGINT, again)
        if RANK == 0:
            part = "episode" if self.evaluating else "iteration"
            line = f"stopping after this {part}"
            now = "raises KeyboardInterrupt" if lives_on else "kills"
            line += "" if WORLD_SIZE > 1 else f"; Ctrl-C now {now}"
            with contextlib.suppress(RuntimeError):  # the signal came while a line was printed
                tell_over(line, file=sys.stderr)

    def stops(self) -> bool:
        """Tell whether any process has received a signal. All of them ask at once."""
        return bool(average(torch.tensor(float(len(self.signals)))) > 0)

    @property
    def results(self) -> dict[str, Any]:
        """Return the last value of every metric, and the run's directory."""
        return self.logged | {"run_dir": str(self.directory)}

    @property
    def quoted(self) -> str:
        """Return the run's directory as a shell takes it."""
        return as_word(self.directory)

    @property
    def env_seeds(self) -> list[int]:
        """Return a seed for each of this process's environments."""
        first = self.step + RANK * self.envs.num_envs
        indices = range(first, first + self.envs.num_envs)
        return [derived_seed(self.args.seed, "environments", i, bits=31) for i in indices]

    # ---- iterations ----
    def iterations(self) -> Iterator[float]:
        """Yield the fraction of the run that is done. At its end the agent is evaluated."""
        if self.has_nothing_to_do:
            text = "a larger --total-timesteps continues it, and --evaluate plays more episodes"
            self.say(f"the run has taken all of its {self.step:,} steps; {text}")
            return

        # An evaluation is due at once where it was cut short, or where the resume asks for it.
        if 0 < self.step < self.total_steps and self.evaluation_is_due:
            self.evaluate()

        while self.step < self.total_steps:
            self.untouched = {}
            # Noise, samples and permutations depend on the run's seed and on the step alone. All
            # processes draw the same ones, and a resumed run draws what it would have drawn.
            torch.manual_seed(derived_seed(self.args.seed, "iterations", self.step))
            self.lap_start = time.monotonic()
            yield self.step / self.total_steps

        if self.lacks_its_result:
            self.evaluate()  # and save
        self.say_what_next()

    def say_what_next(self) -> None:
        """Print the best evaluation, and the commands that show the run and continue it."""
        if self.best_step:
            best = f"return {figure(self.best_return)} after {self.best_step:,} steps"
            self.say(f"best evaluation: {best}, {self.directory / 'best.pt'}")
        self.say(f"to watch: tensorboard --logdir {as_word(self.directory.parent)}")

        typed = __name__ == "__main__" and "__file__" in globals()  # a notebook has no file
        if not typed and WORLD_SIZE == 1:
            changes = f"resume={str(self.directory)!r}, total_timesteps={2 * self.step}"
            self.say(f"to continue: train(dataclasses.replace(args, {changes}))")
            return
        name = Path(globals().get("__file__", f"{SCRIPT}.py")).name
        script = as_word(sys.argv[0] if typed else name)
        program = "python"
        if WORLD_SIZE > 1:
            here = processes_here()
            program = f"torchrun --nnodes {WORLD_SIZE // here} --nproc-per-node {here}"
        longer = f"--resume {self.quoted} --total-timesteps {2 * self.step}"
        self.say(f"to continue: {program} {script} {longer}")

    @property
    def evaluation_is_due(self) -> bool:
        """Tell whether the agent is to be evaluated after this iteration, and was not yet."""
        due = is_due(self.step // self.args.batch_size, self.args.eval_every)
        return due and self.args.eval_episodes > 0 and self.evaluated_at != self.step

    @property
    def lacks_its_result(self) -> bool:
        """Tell whether an evaluation is wanted at the end of the run, and was not made yet."""
        return self.args.eval_episodes > 0 and self.evaluated_at != self.total_steps

    @property
    def has_nothing_to_do(self) -> bool:
        """Tell whether the run has taken all of its steps, and has its result."""
        return self.step == self.total_steps and not self.lacks_its_result

    def lap(self, part: str) -> None:
        """Take the time of a part of the iteration, which ends here."""
        now = time.monotonic()
        self.times[f"time/{part}"] = now - self.lap_start
        self.lap_start = now

    def end_iteration(self, rollout: Rollout, metrics: dict, carried: tuple) -> None:
        """Log, show, evaluate and save as the flags ask. `carried` goes into the checkpoint.

        Raises KeyboardInterrupt after a signal.
        """
        args = self.args
        self.carried = carried
        self.log_episodes(rollout)
        self.step += args.batch_size
        self.seconds += sum(self.times.values())
        iteration = self.step // args.batch_size
        last = self.step == self.total_steps

        for name in [name for name in metrics if name.startswith("warning/")]:
            self.warn(name, metrics.pop(name))
        metrics = average_metrics(metrics) | self.times
        metrics["charts/SPS"] = self.step / self.seconds
        if self.recent_returns:
            returns = torch.tensor(self.recent_returns, dtype=torch.float64)
            metrics["charts/recent_returns"] = returns
            metrics["cvar/empirical"] = empirical_cvar(returns, args.cvar_alpha)
        self.log(metrics, self.step, histograms=last or iteration % 10 == 1)
        self.show_progress()

        if self.stops():
            self.save_and_stop()
        if not last and self.evaluation_is_due:
            self.evaluate()  # and save, where a checkpoint is due
        elif last or self.checkpoint_is_due():
            self.save()

    def checkpoint_is_due(self) -> bool:
        """Tell whether a checkpoint is due, or the last one ten minutes old. All ask at once."""
        if not self.args.checkpoint_every:
            return False
        if is_due(self.step // self.args.batch_size, self.args.checkpoint_every):
            return True
        age = time.monotonic() - self.saved_at
        return bool(average(torch.tensor(float(RANK == 0 and age > 600))) > 0)

    def save_and_stop(self) -> None:
        """Save, and raise KeyboardInterrupt, which tells how to go on."""
        self.save()
        where = f"stopped after {self.step:,} steps; continue with --resume {self.quoted}"
        raise KeyboardInterrupt(where)

    def evaluate(self) -> None:
        """Evaluate and log. With `eval_every` the best agent so far is kept in `best.pt`.

        The first process plays. After each episode all processes ask whether one of them was told
        to stop. The evaluation then ends, and a resume begins with it. After the last episode it is
        logged, and the run stops then.
        """
        args = self.args
        self.evaluating = True
        # Save first: an evaluation may fail or take long. Ctrl-C also ends the program that writes
        # a film, whose fault ends this run.
        is_saved = self.saved_step == self.step
        saves_ahead = not is_saved and (args.capture_video or self.checkpoint_is_due())
        if saves_ahead:
            self.save()

        episodes = []
        playing = iter(range(args.eval_episodes))  # the others wait as often
        if RANK == 0:
            directory = self.directory / f"videos/step-{self.step}"
            playing = play(self.eval_env, self.agent, args, directory, self.evaluation_status)
        for rewards in playing:
            episodes.append(rewards)
            if len(episodes) < args.eval_episodes and self.stops():
                self.save_and_stop()  # a resume plays all episodes again, with the same numbers

        self.evaluating = False
        metrics = gather_objects(summarise(episodes, args, self.step) if RANK == 0 else None)[0]

        self.log(metrics, self.step)
        self.evaluated_at = self.step
        is_best = args.eval_every and metrics["eval/return_mean"] >= self.best_return
        if is_best:
            self.best_return = metrics["eval/return_mean"]
            self.best_step = self.step
            self.save("best")
        if is_best or saves_ahead or self.step == self.total_steps:
            self.save()  # the checkpoint has to know of the evaluation
        if self.step < self.total_steps and self.stops():
            self.save_and_stop()

    # ---- terminal and log ----
    def say(self, line: str) -> None:
        """Print a line, once for all processes."""
        if RANK == 0:
            tell(line)

    def warn(self, name: str, line: str) -> None:
        """Print the first warning of this name."""
        if name not in self.warned:
            self.warned.add(name)
            self.say(f"warning: {line}")

    def show_progress(self) -> None:
        """Show steps, speed and return on the status line."""
        last = self.step == self.total_steps
        if RANK > 0 or not (last or self.status.due):
            return
        speed = self.step / self.seconds
        share = self.step / self.total_steps
        line = f"{self.step:,} of {self.total_steps:,} steps ({share:.0%})"
        line += f"  {speed:,.0f} steps/s  {(self.total_steps - self.step) / speed:,.0f} s left"
        if self.recent_returns:
            line += f"  return {figure(np.mean(self.recent_returns))}"
        self.status.show(line, last)

    def log(self, metrics: dict, step: int, histograms: bool = True) -> None:
        """Write scalars, in one event, and tensors with axes as histograms, with descriptions."""
        if self.writer is None:
            self.logged |= {tag: float(x) for tag, x in metrics.items() if is_scalar(x)}
            return

        entries = Summary()
        for tag, value in metrics.items():
            if is_scalar(value):
                self.logged[tag] = float(value)
                entry = entries.value.add(tag=tag, simple_value=self.logged[tag])
                kind = ("scalars", DataClass.DATA_CLASS_SCALAR)
            elif histograms:  # torch's bins end at 1e20
                array = value.clamp(-9e19, 9e19).cpu().numpy()
                entry = summary.histogram(tag, array, self.writer.default_bins).value[0]
                entries.value.append(entry)
                entry = entries.value[-1]
                kind = ("histograms", DataClass.DATA_CLASS_TENSOR)
            else:
                continue

            if tag not in self.described:  # TensorBoard reads this from a tag's first event only
                self.described.add(tag)
                entry.metadata.summary_description = DESCRIPTIONS.get(tag, "")
                entry.metadata.plugin_data.plugin_name, entry.metadata.data_class = kind
        self.writer.file_writer.add_summary(entries, step)

    def log_episodes(self, rollout: Rollout) -> None:
        """Write return and length of the episodes of all processes at the steps they ended."""
        episodes = [one for part in gather_objects(rollout.episodes) for one in part]
        for t, episode_return, length in sorted(episodes, key=lambda one: one[0]):
            step = self.step + (t + 1) * self.args.num_envs
            charts = {"charts/episodic_return": episode_return, "charts/episodic_length": length}
            self.log(charts, step)
            self.recent_returns.append(episode_return)
        del self.recent_returns[:-100]

    def open_log(self) -> None:
        """Open TensorBoard's log. What a resumed run wrote beyond its checkpoint is dropped.

        Raises `UsageError` where nothing can be written.
        """
        purge_step = self.step + 1 if self.args.resume else None
        try:
            self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
            self.log_flags()
        except (OSError, UnicodeError) as error:  # a name may hold bytes that are no UTF-8
            raise UsageError(f"{self.directory}: {error}; no log can be written") from error

    def log_flags(self) -> None:
        """Write the flags for TensorBoard's table of runs."""
        described = describe_run(self.args)
        table, started, _ = summary.hparams(described, dict.fromkeys(IN_THE_TABLE, 0))
        plugin = table.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(plugin.content)
        for column in content.experiment.hparam_infos:
            # TensorBoard shows these ahead of the others.
            column.differs = column.name in TABLE_COLUMNS
        plugin.content = content.SerializeToString()
        for entry in (table, started):
            self.writer.file_writer.add_summary(entry)

    # ---- checkpoints ----
    def save(self, name: str = "checkpoint") -> None:
        """Write all events, and then `checkpoint.pt`, or one of another name.

        Flags, weights and statistics load with `weights_only=True`, which runs no code. What an
        exact resume needs beside them is pickled under `run`. Only `checkpoint.pt` has it, and only
        --resume reads it. The file is written beside the old one, synced and renamed: a kill at any
        instant leaves one of the two.
        """
        content = {
            "script": SCRIPT,
            "args": {**asdict(self.args), "resume": ""},
            "agent": self.agent.state_dict(),
            "actions": self.agent.action_dist.kind,
            "global_step": self.step,
        }
        if name == "best":
            content["best_return"] = self.best_return
        to_resume = self.to_resume() if name == "checkpoint" else {}  # from all processes

        if self.writer is not None:
            if to_resume:
                # As a tensor: torch writes bytes as text, in which those above 127 take two.
                pickled = pickle.dumps(to_resume)
                content["run"] = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
            self.writer.flush()
            with replacing(self.directory / f"{name}.pt") as file:
                torch.save(content, file)
            self.saved_at = time.monotonic()
        if to_resume:
            self.saved_step = self.step

    def to_resume(self) -> dict[str, Any]:
        """Return what --resume needs beside flags and weights."""
        kept = {name: getattr(self, name) for name in self.SAVED}
        kept["optimizers"] = [on_cpu(x.state_dict()) for x in self.optimizers]
        if self.untouched:  # nothing was trained since, as where a run that is done is evaluated
            return kept | self.untouched

        part = {
            "carried": self.carried,
            "rngs": (random.getstate(), np.random.get_state()),
            "envs": self.pickled_envs(),
        }
        versions = loaded_versions() | self.sources
        return kept | {"parts": gather_objects(part), "versions": versions}

    def pickled_envs(self) -> bytes | None:
        """Return this process's environments, pickled as `save_envs` says, or None."""
        pickled, unfit = None, ""
        if self.args.save_envs != "never":
            pickled, unfit = pickle_envs(self.envs)

        reasons = gather_objects(unfit)
        if any(reasons) and RANK == 0:
            which = "environments" if all(reasons) else "environments of some processes"
            text = f"{which} are not saved, since {next(filter(None, reasons)):.200}"
            self.status.notice(f"{text}; a resume would open new episodes")
        return pickled

    def lock_directory(self) -> None:
        """Lock the run: two that write it would spoil it.

        After a kill the lock ends with the process, unless a fork of it lives on. Some platforms
        and disks have no locks. Raises `UsageError` where the run is being written.
        """
        if RANK > 0 or fcntl is None:
            return
        try:
            # Over NFS other machines see a lock of a file, but none of a directory.
            path = self.directory / ".lock"
            try:
                self.lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except PermissionError:  # another user's, who shares the directory
                self.lock = os.open(path, os.O_RDONLY)
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "this run is being written already; stop that first"
            raise UsageError(f"--resume {self.args.resume}: {text}") from error
        except OSError:  # its disk has no locks, or may only be read
            pass

    def unlock_directory(self) -> None:
        """Give the lock back, also for copies of its descriptor that a fork has made."""
        if self.lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self.lock, fcntl.LOCK_UN)
            os.close(self.lock)
            self.lock = None

    def take_up(self) -> bool:
        """Go on where the checkpoint of the run to resume stands.

        Returns whether it has other flags. Raises `UsageError` for a checkpoint that these flags or
        this version cannot go on from.
        """
        args = self.args
        content = read_saved(self.directory / "checkpoint.pt")
        require_one_file(args, "resume", content)
        if content["args"]["cuda"] and not args.cuda:
            text = "was run with --cuda, and torch sees no GPU; start anew with --init-from"
            raise flag_error(args, "resume", text)
        load_weights(self.agent, content, args.env_id)
        if "run" not in content:
            text = "its checkpoint.pt has no more than weights, as best.pt; start anew"
            raise flag_error(args, "resume", f"{text} with --init-from")
        self.take_up_training(content["run"])
        flags = self.take_up_best() or content["args"]

        for name in ("eval_episodes", "eval_sampled"):
            before = flags[name]
            if self.best_step and getattr(args, name) != before:
                text = f"must be {before}, as in the run, since best.pt compares evaluations"
                raise flag_error(args, name, text)
        self.take_up_episodes()
        self.saved_step = self.step
        return {**asdict(args), "resume": ""} != content["args"]

    def take_up_best(self) -> dict[str, Any]:
        """Keep a `best.pt` that is better than the checkpoint knows, as after a crash between both.

        Other episodes may follow now, and an agent that is worse must not replace it. Where it is
        missing or damaged, the next one does. Returns the flags of a `best.pt` that is taken up, or
        none. Raises `UsageError` where it cannot be read, as on a disk that is away for a moment.
        """
        found: tuple = (self.best_return, self.best_step, {})
        path = self.directory / "best.pt"
        if RANK == 0:
            try:
                saved = read_saved(path)
            except UsageError as error:
                if path.exists() and isinstance(error.__cause__, OSError):
                    raise
                if path.exists():
                    self.say(f"{error}; the next evaluation replaces it")
                found = (-math.inf, 0, {})
            else:
                best = saved.get("best_return", -math.inf)  # older ones do not tell it
                if best > self.best_return:
                    found = (best, saved["global_step"], saved["args"])
        self.best_return, self.best_step, flags = gather_objects(found)[0]
        return flags

    def take_up_training(self, pickled: Tensor | bytes) -> None:
        """Go on with optimizers, counts and metrics. Raises `UsageError` for another version's."""
        try:
            old = isinstance(pickled, bytes)  # of an older version
            kept = pickle.loads(pickled if old else pickled.numpy())
            self.untouched = {"parts": kept["parts"], "versions": kept["versions"]}
            for optimizer, saved in zip(self.optimizers, kept["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            for name in self.SAVED:
                setattr(self, name, kept[name])
        except Exception as error:  # whatever reading another version's objects raises
            text = "is of another version of this script or of a library; start anew"
            text = f"{text} with --init-from ({error!r})"
            raise UsageError(f"--resume {self.args.resume}: {text}") from error

    def take_up_episodes(self) -> None:
        """Go on in the episodes that were open, and with the generators of Python and NumPy.

        `carried` stays None where the environments are lost and have to open new episodes.
        """
        parts = self.untouched["parts"]
        lost = f"{len(parts)} processes wrote the checkpoint, not {WORLD_SIZE}"
        if len(parts) == WORLD_SIZE:
            part = parts[RANK]
            lost = "no step is left"
            if self.step < self.total_steps:
                lost = self.read_envs(part["envs"], self.untouched["versions"])
            if not lost:
                self.carried = part["carried"]
            python_rng, numpy_rng = part["rngs"]  # now: reading a task back may draw numbers
            random.setstate(python_rng)
            np.random.set_state(numpy_rng)
        else:
            seed_generators(self.args, self.step + RANK)  # not where the run began

        reasons = gather_objects(lost)
        if any(reasons) and self.step < self.total_steps:
            which = "episodes" if all(reasons) else "episodes of some processes"
            self.say(f"{which} start afresh: {next(filter(None, reasons)):.200}")

    def read_envs(self, pickled: bytes | None, versions: dict[str, str]) -> str:
        """Go on with the environments of a checkpoint. Returns why that is impossible, or ""."""
        if pickled is None:
            return "the checkpoint has no environments"
        if self.args.save_envs == "never":
            return "--save-envs is never"
        here = loaded_versions() | self.sources
        for name in sorted(versions.keys() & here.keys()):
            if versions[name] != here[name] and name in self.sources:
                return f"{name} has changed since they were saved"
            if versions[name] != here[name]:
                return f"they were saved under {name} {versions[name]}, and this is {here[name]}"

        found = fault_of_copies(pickled) if self.args.save_envs == "proven" else ""
        if found:
            return found
        try:
            envs = pickle.loads(pickled)
        except Exception as error:  # from the task, of any kind
            return f"reading the environments back failed: {error!r}"

        self.unused_envs = list(self.envs.envs)
        self.envs.envs = envs
        return ""


def free_sigterm() -> None:
    """Let a process that a task has forked end by SIGTERM, as multiprocessing wants it.

    A handler in Python would not do: it may come too late for a process that begins to wait.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, "__self__", None), Run):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=free_sigterm)


# ------------------------------------------------------------------ environments in checkpoints
class EnvPickler(cloudpickle.Pickler):
    """It pickles environments as they stand. `EzPickle` alone would make fresh ones."""

    def reducer_override(self, thing: Any) -> Any:
        """Return how to pickle a thing."""
        ez = gym.utils.EzPickle
        if isinstance(thing, ez) and type(thing).__getstate__ is ez.__getstate__:
            make = (copyreg.__newobj__, (type(thing),))
            return *make, vars(thing), None, None, set_attributes
        return super().reducer_override(thing)


def set_attributes(thing: Any, attributes: dict) -> None:
    """Give a thing that is read back its attributes."""
    vars(thing).update(attributes)


def pickle_envs(envs: gym.vector.VectorEnv) -> tuple[bytes | None, str]:
    """Pickle environments. Returns them, or None and why that is impossible."""
    if not hasattr(envs, "envs"):
        return None, "they are in processes of their own"
    file = io.BytesIO()
    try:
        EnvPickler(file).dump(tuple(envs.envs))
    except Exception as error:  # each library raises its own
        return None, f"pickle says {error!r}"
    return file.getvalue(), ""


def loaded_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that are loaded."""
    found = {"Python": "{}.{}".format(*sys.version_info)}
    for name, module in list(sys.modules.items()):
        version = getattr(module, "__dict__", {}).get("__version__")
        if isinstance(version, str) and "." not in name:
            found[name] = version
    return found


def as_word(path: str | Path) -> str:
    """Return a path as one word of a command line: for sh, or for the shells of Windows."""
    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


def on_cpu(thing: Any) -> Any:
    """Return a state of dictionaries with all tensors on the CPU, where any machine reads them."""
    if isinstance(thing, dict):
        return {key: on_cpu(value) for key, value in thing.items()}
    return thing.cpu() if isinstance(thing, Tensor) else thing


def task_sources(envs: gym.vector.VectorEnv, env_id: str) -> dict[str, str]:
    """Return checksums of the sources that define environments, by name.

    These are the files of the classes of the task and its wrappers, of their bases, and of the
    module of `env_id`, and the registration, ahead of what the task may do to its arguments. Of a
    program or notebook they are the classes alone, the function that makes
    the task and the one by which networks see it, since a program may be edited to resume.
    Environments in other processes have no classes here, and are not saved.
    """
    first = envs.envs[0] if hasattr(envs, "envs") else None
    classes = {kind for layer in layers(first) for kind in type(layer).__mro__}
    modules = {kind.__module__ for kind in classes} | {env_id.split(":")[0]}
    sources = {}
    for module in modules - {"__main__", *sys.stdlib_module_names}:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and os.path.isfile(file):
            sources[f"{module}.py"] = Path(file).read_bytes()

    if first is not None:
        sources[f"the registration of {env_id}"] = registration(first).encode()
    maker = None if first is None else getattr(first.unwrapped.spec, "entry_point", None)
    views = {layer.see for layer in layers(first) if isinstance(layer, Checked)}
    functions = {thing for thing in (maker, *views) if inspect.isfunction(thing)}
    for thing in classes | functions:
        if thing.__module__ == "__main__":
            with contextlib.suppress(OSError, TypeError):  # it was typed in
                name = f"the {'class' if thing in classes else 'function'} {thing.__name__}"
                sources[name] = source_of(thing).encode()

    return {name: f"{zlib.crc32(source):08x}" for name, source in sources.items()}


def layers(env: gym.Env | None) -> Iterator[gym.Env]:
    """Go through an environment's wrappers down to the task."""
    while env is not None:
        yield env
        env = env.env if isinstance(env, gym.Wrapper) else None


def source_of(thing: Any) -> str:
    """Return the source of a class or function. Of a notebook's class it is that of its methods.

    Raises OSError or TypeError where there is none.
    """
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # Python looks for classes in files
        methods = [method for method in vars(thing).values() if inspect.isfunction(method)]
        if not methods:
            raise
        return "".join(map(inspect.getsource, methods))


def registration(env: gym.Env) -> str:
    """Return how an environment was made: entry point, arguments, time limit and wrappers.

    Addresses of objects are left out, since they differ from process to process.
    """
    spec = env.unwrapped.spec
    names = [type(layer).__name__ for layer in layers(env)]
    entry_point = getattr(spec, "entry_point", None)
    kwargs = getattr(spec, "kwargs", None)
    made = f"{entry_point} {kwargs} {time_limit(env)} {names}"
    return re.sub(r" at 0x\w+", "", made)


def time_limit(env: gym.Env) -> int | None:
    """Return the steps after which gymnasium ends an episode, or None. Atari counts frames.

    `env.spec` has them as well, but is None where a registration cannot be copied.
    """
    for layer in layers(env):
        if isinstance(layer, gym.wrappers.TimeLimit):
            return layer._max_episode_steps
    return None


TRIAL_SECONDS = 60
TRIAL_PROGRAM = f"""
import contextlib, pickle, signal, sys
if hasattr(signal, "alarm"):
    signal.alarm({TRIAL_SECONDS})  # should the run be killed meanwhile
sys.path[:] = pickle.load(sys.stdin.buffer)
for env in pickle.load(sys.stdin.buffer):
    env.step(env.action_space.sample())
    with contextlib.suppress(Exception):
        env.close()
"""


def fault_of_copies(pickled: bytes) -> str:
    """Let another process read environments back, step and close them. Returns "" or what failed.

    In this process copies that fail might do harm: a simulator in C may crash it, and others may
    start what nobody stops. What the other process has started is ended here, unless a signal kills
    this process meanwhile.
    """
    try:
        code, reason = run_trial(pickle.dumps(sys.path) + pickled)
    except OSError as error:  # no room for the files, no memory for the process
        return f"they cannot be tried out: {error}"

    if code == 0:
        return ""
    if code in (None, -getattr(signal, "SIGALRM", math.inf)):
        text = "another process did not read them back, step and close them within"
        return f"{text} {TRIAL_SECONDS} seconds"
    return f"another process could not read them back: {reason or f'exit {code}'}"


def run_trial(told: bytes) -> tuple[int | None, str]:
    """Run `TRIAL_PROGRAM` in another process, which reads what it is told.

    Returns its exit code, or None where it took too long, and the last line of its errors.
    """
    # Files, since pipes could fill up, and what the copies start would keep them open.
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as errors:
        file.write(told)
        file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", TRIAL_PROGRAM],
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )

        try:
            code = process.wait(TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)

        errors.seek(0)
        return code, errors.read().decode(errors="replace").strip().split("\n")[-1]


def end_session(process: subprocess.Popen) -> None:
    """End a process that began a session, and all that it has started there."""
    process.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):  # nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -------------------------------------------------------------------------------- files of a run
def make_run_dir(args: Args, here: Path = Path()) -> Path:
    """Create <run_dir>/<task>__<exp_name>__s<seed>__<MMDD-HHMMSS>, and write the run's origin.

    The task is `env_id` without its module. What some system allows in no name becomes "_". A name
    that is taken gets a number. A relative `run_dir` is relative to `here`.
    """
    task, experiment = (
        re.sub(r'[\\/:*?"<>|]', "_", name) for name in (args.env_id.split(":")[-1], args.exp_name)
    )
    name = f"{task}__{experiment}__s{args.seed}__{time.strftime('%m%d-%H%M%S')}"
    top = resolved(args.run_dir, here)

    try:
        top.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            path = top / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                write_origin(path, args)
                return path

    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            text = f"the name {name} is too long for this disk; shorten this flag or the task's id"
            raise flag_error(args, "exp_name", text) from error
        raise UsageError(f"--run-dir {args.run_dir}: {error}; choose another directory") from error


def rewrite_origin(path: Path, args: Args, step: int) -> None:
    """Write the origin of the new start of a run over that of the old one. Raises `UsageError`.

    Where the script has changed since, the old origin is kept: <script>-until-step-<n>.py.
    """
    try:
        source = Path(globals().get("__file__") or "").resolve()  # a notebook has none
        copy = path / source.name
        if copy.is_file() and source.is_file() and copy.read_bytes() != source.read_bytes():
            for old in (copy, path / "args.json"):
                kept = old.with_stem(f"{old.stem}-until-step-{step}")
                # An earlier try from this step has trained nothing, so it is not kept.
                if old.is_file() and not kept.exists():
                    replace_file(kept, old.read_bytes())
        write_origin(path, args)
    except OSError as error:
        raise UsageError(f"--resume {args.resume}: {error}; the run was not resumed") from error


def write_origin(path: Path, args: Args) -> None:
    """Write what makes the numbers of a run: flags, versions, commit, and the script's source."""
    file = globals().get("__file__")  # a notebook has none
    source = Path(file).resolve() if file else None
    versions = {module.__name__: module.__version__ for module in (torch, gym, np, tyro)}
    versions["python"] = sys.version
    folder = source.parent if source else Path.cwd()
    if (folder / "args.json").is_file():  # a run's folder: its copy is of the commit that it names
        commit = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            commit = json.loads((folder / "args.json").read_text())["commit"]
    else:
        commit = commit_of(folder)

    content = {"args": asdict(args), "versions": versions, "commit": commit}
    replace_file(path / "args.json", json.dumps(content, indent=2).encode())
    if source and source.is_file():  # it may lie in an archive, or be gone
        replace_file(path / source.name, source.read_bytes())


def tell_of_edits(folder: Path) -> None:
    """Print a line if another script trained the run of a folder, by the copy that lies there."""
    with contextlib.suppress(OSError, KeyError):  # a notebook has no file
        source = Path(globals()["__file__"]).read_bytes()
        copies = [one for one in sorted(folder.glob("*.py")) if "-until-step-" not in one.stem]
        if copies and all(one.read_bytes() != source for one in copies):
            tell(f"note: {copies[0]}, which trained the run, differs from this script")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in place of the old one, if there is one. A fault leaves the old."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO]:
    """Open a file beside the old one, to write. Then it is synced and renamed over the old one.

    After a fault the old one is there, and the new one is gone: a full disk needs its room.
    """
    fresh = path.with_name(f"{path.name}.tmp")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a loss of power may leave an empty file under the name
        rename_over(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def rename_over(fresh: Path, old: Path) -> None:
    """Rename a file over another one. Windows refuses that for as long as a program reads it."""
    for _ in range(20):
        with contextlib.suppress(PermissionError):
            fresh.replace(old)
            return
        time.sleep(0.1)
    fresh.replace(old)


def commit_of(folder: Path) -> str:
    """Return the commit that a folder stands at, or "" without git or repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return asked.stdout.decode("ascii", "replace").strip()


def is_due(iteration: int, every: int) -> bool:
    """Tell whether this iteration is one of every so many. 0 means never."""
    return every > 0 and iteration % every == 0


def is_scalar(value: Any) -> bool:
    """Tell whether a metric is one number."""
    return not isinstance(value, Tensor) or value.dim() == 0


def load_agent(path: str | Path) -> tuple[Agent, Args]:
    """Load agent and flags of a saved run, from its directory or a checkpoint.

    No code of the file is run, but the module that its `env_id` names is imported, and the task is
    made once and closed. Falls back to the CPU. The global generators are afterwards what they
    were, so let no other thread draw from them meanwhile. Raises `UsageError` for files that this
    script did not write.
    """
    saved, args = read_checkpoint(path)
    with generators_apart(0):
        env = make_env(args)
        close_quietly(env)
        return restore_agent(saved, args, env.observation_space, env.action_space), args


def read_checkpoint(path: str | Path) -> tuple[dict[str, Any], Args]:
    """Read a checkpoint. Returns what it holds, and its flags, which have to fit this machine."""
    path = checkpoint_path(path)
    saved = read_saved(path)
    cuda = saved["args"]["cuda"] and torch.cuda.is_available()
    try:
        return saved, Args(**saved["args"] | {"cuda": cuda})
    except UsageError as error:  # flags that do not fit the machine, or the number of processes
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:  # flags of other kinds
        raise not_of_this_script(path, error) from error


def read_saved(path: Path) -> dict[str, Any]:
    """Read what this script saved. Raises `UsageError` for a file that is anything else."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(saved, dict):
            raise ValueError("not a dictionary")
        script = saved.get("script", SCRIPT)
        if script != SCRIPT:
            raise UsageError(f"{path}: {script}.py wrote it, and it alone can read it")
        if not isinstance(saved.get("agent"), dict) or not isinstance(saved.get("args"), dict):
            raise ValueError("it has no weights, or no flags")
    except UsageError:
        raise
    except FileNotFoundError as error:
        text = f"no run or checkpoint of this script: {what_is_there(path)}"
        raise UsageError(f"{path}: {text}") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # torch raises half a dozen kinds
        raise not_of_this_script(path, error) from error

    check_version(saved["args"], path)
    return saved


def require_one_file(args: Args, name: str, saved: dict[str, Any]) -> None:
    """Require that all processes have read the same weights: machines may have different files.

    Raises `UsageError` with the flag of this name.
    """
    if WORLD_SIZE == 1:
        return
    checksum = 0
    for x in saved["agent"].values():
        checksum = zlib.crc32(x.numpy().tobytes(), checksum)
    if len({*gather_objects(checksum)}) > 1:
        text = "the processes read different files; give all machines a copy that no run changes"
        raise flag_error(args, name, text)


def what_is_there(path: Path) -> str:
    """Say what there is in place of a checkpoint that does not exist."""
    if saved := sorted(one.name for one in path.parent.glob("*.pt")):
        return f"it does not exist; there is {' and '.join(saved)}"
    begun = (path.parent / "args.json").exists()
    return "no checkpoint was saved yet; start anew" if begun else "No such file or directory"


def restore_agent(
    saved: dict[str, Any], args: Args, observation_space: Box, action_space: gym.Space
) -> Agent:
    """Make the agent of a checkpoint. Its networks are float32 whatever the program prefers."""
    settings = torch_settings()
    set_torch((torch.float32, settings[1]))
    try:
        agent = Agent(observation_space, action_space, args)
    finally:
        set_torch(settings)
    load_weights(agent, saved, args.env_id)
    return agent


def load_weights(agent: Agent, saved: dict[str, Any], env_id: str) -> None:
    """Give an agent the weights and statistics of a checkpoint. Raises `UsageError`."""
    here = agent.action_dist.kind
    there = saved.get("actions", here)  # checkpoints of earlier versions do not tell
    if there != here:
        text = f"an action was {there}, and is {here} now"
        raise UsageError(f"the checkpoint of {env_id}: {text}; the task has changed")
    try:
        agent.load_state_dict(saved["agent"])
    except RuntimeError as error:
        text = "its weights do not fit this script and the task's spaces; one of them has changed"
        reason = " ".join(str(error).split())
        raise UsageError(f"the checkpoint of {env_id}: {text}: {reason:.200}") from error
    except (TypeError, AttributeError) as error:
        raise not_of_this_script(f"the checkpoint of {env_id}", error) from error


def not_of_this_script(path: str | Path, error: Exception) -> UsageError:
    """Return the error for a file that this script did not write."""
    reason = str(error).split(". ")[0]
    text = "damaged, or no run or checkpoint of this script"
    return UsageError(f"{path}: {text}: {reason:.200}")


def check_version(flags: dict[str, Any], path: Path) -> None:
    """Raise `UsageError` unless the flags of a checkpoint are those of this version."""
    known = {one.name for one in fields(Args)}
    lacking = ", ".join(sorted(known - flags.keys()))
    unknown = ", ".join(sorted(flags.keys() - known))
    found = [f"it lacks {lacking}"] if lacking else []
    found += [f"unknown here is {unknown}"] if unknown else []
    if found:
        text = "another version of the script wrote it; use the copy in the run's directory"
        raise UsageError(f"{path}: {text} ({'; '.join(found):.200})")


def with_home(path: str | Path) -> Path:
    """Return a path with ~ as the home directory. Raises `UsageError` where nobody has one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path}: {error}") from error


def resolved(path: str | Path, here: Path = Path()) -> Path:
    """Return a path from the root on. Raises `UsageError` for links in a circle."""
    try:
        return (here / with_home(path)).resolve()
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{path}: {error}") from error


def checkpoint_path(path: str | Path) -> Path:
    """Return the path of a checkpoint, which may be that of a run directory."""
    path = resolved(path)
    return path / "checkpoint.pt" if os.path.isdir(path) else path  # never raises


# ------------------------------------------------------------------------------------- evaluation
def evaluate(agent: Agent, args: Args, video_dir: Path | None = None) -> dict[str, float]:
    """Play `eval_episodes` episodes, summarise them and print a line. Statistics stay as they are.

    With `capture_video` films go to `video_dir`. Without a folder nothing is filmed. Raises
    `UsageError` without episodes.
    """
    if args.eval_episodes == 0:
        raise flag_error(args, "eval_episodes", "must be at least 1 to evaluate")
    args = replace(args, resume="", evaluate="")  # their folders may be gone
    if video_dir is None:
        args = replace(args, capture_video=False)
    env = make_eval_env(args)
    try:
        return summarise(list(play(env, agent, args, video_dir)), args)
    finally:
        close_quietly(env)


def play(
    env: gym.Env,
    agent: Agent,
    args: Args,
    video_dir: Path | None = None,
    status: StatusLine | None = None,
) -> Iterator[list[float]]:
    """Play `eval_episodes` episodes from their start, and yield the rewards of each.

    Every evaluation with the same `seed` resets with the same seeds, one for each episode. So the
    evaluation that chose `best.pt` is the best of many on the same episodes, and flatters it. Tasks
    without a time limit are cut at 10,000 steps. With `capture_video` the first 3 episodes are
    filmed into `video_dir`; each is kept in memory to its end. Without `video_dir` nothing is
    filmed.

    A task may draw from the global generators, or seed them: they have a seed of their own in each
    episode, and are where they were between episodes. The policy draws from another generator. The
    environment, one of `make_eval_env`, stays open.
    """
    films = args.capture_video and video_dir is not None
    if films:
        with collecting_warnings() as told:
            env = gym.wrappers.RecordVideo(env, str(video_dir), lambda episode: episode < 3)
        for text in told:
            tell(f"warning: {text}", file=sys.stderr)
    status = status or StatusLine(seconds=30)
    status.shown_at = time.monotonic()
    generator = torch.Generator()  # of the policy
    generator.manual_seed(derived_seed(args.seed, "evaluations", 0))
    for episode in range(args.eval_episodes):
        with generators_apart(derived_seed(args.seed, "evaluated tasks", episode, bits=32)):
            rewards = run_episode(env, agent, args, episode, status, generator)
        yield rewards
    if films and env.recording:
        env.stop_recording()


LONGEST_EPISODE = 10_000  # steps of an evaluation's episode, where the task has no limit


def run_episode(
    env: gym.Env,
    agent: Agent,
    args: Args,
    episode: int,
    status: StatusLine,
    generator: torch.Generator,
) -> list[float]:
    """Play one episode of an evaluation. Returns its rewards."""
    obs, _ = env.reset(seed=derived_seed(args.seed, "evaluations", episode, bits=31))
    check_finite(f"reset of evaluation episode {episode}", obs[None])

    # A time limit ends an episode by itself. But one inside a wrapper may end a part of it alone.
    limit = max(time_limit(env) or 0, LONGEST_EPISODE)
    policy = agent.numpy_policy()
    act = partial(
        agent.act, deterministic=not args.eval_sampled, policy=policy, generator=generator
    )
    state = None
    rewards = []
    ended = False

    while not ended and len(rewards) < limit:
        action, state = act(obs, state)
        obs, reward, terminated, truncated, _ = env.step(action)
        when = f"step {len(rewards)} of evaluation episode {episode}"
        check_finite(when, obs[None], rewards=np.array([reward]))
        rewards.append(reward)
        ended = terminated or truncated
        if status.due:
            share = f"episode {episode + 1} of {args.eval_episodes}"
            status.show(f"evaluation: step {len(rewards):,} of {share}")
    if not ended:
        text = "evaluations cut this task, whose episodes did not end"
        status.notice(f"{text}, at {limit:,} steps")
    return rewards


def summarise(episodes: list[list[float]], args: Args, step: int | None = None) -> dict[str, float]:
    """Print and return mean, std and CVaR of the returns of episodes, given their rewards."""
    returns = torch.tensor([sum(rewards) for rewards in episodes], dtype=torch.float64)
    mean = float(returns.mean())
    std = float(returns.std(correction=0))
    tail = empirical_cvar(returns, args.cvar_alpha)
    line = f"return {figure(mean)} +- {figure(std)}, CVaR_{args.cvar_alpha:g} {figure(tail)}"
    if step is not None:
        line += f", after {step:,} steps"
    tell_over(f"evaluation of {len(episodes)} episodes: {line}")
    return {
        "eval/return_mean": mean,
        "eval/return_std": std,
        "eval/return_cvar": tail,
        "eval/length_mean": float(np.mean([len(rewards) for rewards in episodes])),
    }


def make_eval_env(args: Args) -> gym.Env:
    """Make an environment for evaluations, which can be filmed with `capture_video`.

    Raises `UsageError` where nothing can be filmed.
    """
    if not args.capture_video:
        return make_env(args)

    env = None
    try:
        import_module("moviepy")
        env = make_env(args, render_mode="rgb_array")
        follow_robot(env)
        check_frames(env)
    except Exception as error:  # a renderer may raise anything
        if env is not None:
            close_quietly(env)  # some tasks can be open only once

        unfilmed = make_env(args)
        try:
            unfilmed.reset(seed=0)  # making and resetting raise what is not the film's fault
        finally:
            close_quietly(unfilmed)

        remedy = "needs moviepy (pip install moviepy) and a task that renders rgb_array"
        if hasattr(unfilmed.unwrapped, "mujoco_renderer"):
            remedy += "; without a screen, set MUJOCO_GL=egl in the environment"
        remedy += "; or do without films by --no-capture-video"
        raise UsageError(f"--capture-video: {str(error) or repr(error)}; {remedy}") from error
    return env


def check_frames(env: gym.Env) -> None:
    """Raise ValueError, or what a renderer raises, unless an environment gives frames of bytes."""
    env.reset(seed=0)
    frame = np.asarray(env.render())
    if env.render_mode != "rgb_array":
        raise ValueError("the task forgets its render_mode")
    if frame.dtype != np.uint8:
        raise ValueError(f"the task's frames are of {frame.dtype}, and films take bytes")
    if frame.ndim != 3 or frame.shape[2] not in (3, 4):
        raise ValueError(f"the task's frames have the shape {frame.shape}, not (height, width, 3)")
    if not env.metadata.get("render_fps", 30):
        raise ValueError("the task's metadata has no frames per second (render_fps)")


def follow_robot(env: gym.Env) -> None:
    """Look through the camera that follows a robot of MuJoCo, unless the task chooses one.

    Where the policy sees images they may come from this camera, so it is left as it is.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    chosen = "default_camera_config" in env.unwrapped.spec.kwargs
    chosen = chosen or len(env.observation_space.shape) == 3
    if renderer is None or renderer.camera_id != -1 or chosen:
        return
    cameras = [renderer.model.camera(i).name for i in range(renderer.model.ncam)]
    if "track" in cameras:
        renderer.camera_id = cameras.index("track")


# -------------------------------------------------------------------------------- many processes
def launched(name: str, usual: int) -> int:
    """Return a number that torchrun sets for its processes, or the usual one."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else usual


# The number of processes that share the environments, and that of this one. Some schedulers set
# RANK alone.
WORLD_SIZE = max(1, launched("WORLD_SIZE", 1))
RANK = launched("RANK", 0) if WORLD_SIZE > 1 else 0
LOCAL_RANK = launched("LOCAL_RANK", 0) if WORLD_SIZE > 1 else 0  # in its machine


def processes_here() -> int:
    """Return the number of the run's processes on this machine."""
    return launched("LOCAL_WORLD_SIZE", WORLD_SIZE) if WORLD_SIZE > 1 else 1


class OtherProcessEnded(RuntimeError):
    """The connection to another process of the run is broken, or was never made."""


def average(x: Tensor) -> Tensor:
    """Return the mean of x over all processes. With one process it is x itself."""
    if WORLD_SIZE == 1:
        return x
    x = x.detach() / WORLD_SIZE
    exchange(distributed.all_reduce, x)
    return x


def with_common_mean(x: Tensor) -> Tensor:
    """Shift x so that its mean is the mean over all processes. Its gradient does not change."""
    if WORLD_SIZE == 1:
        return x
    mean = x.detach().mean()
    return x + (average(mean) - mean)


def own(x: Tensor) -> Tensor:
    """Return this process's share of what was drawn for all environments, which axis 1 counts."""
    return x.chunk(WORLD_SIZE, 1)[RANK]


def gather(x: Tensor) -> Tensor:
    """Join tensors (T, n, ...) of all processes along axis 1."""
    if WORLD_SIZE == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(WORLD_SIZE)]
    exchange(distributed.all_gather, parts, x.contiguous())
    return torch.cat(parts, 1)


def gather_objects(thing: Any) -> list:
    """Return this thing of every process, in their order."""
    things = [thing] * WORLD_SIZE
    if WORLD_SIZE > 1:
        exchange(distributed.all_gather_object, things, thing)
    return things


def exchange(call: Callable, *tensors: Any) -> None:
    """Make a call that all processes make at once. The first one lets them find each other.

    Raises `OtherProcessEnded` where they do not, and for a broken connection. Other faults are
    raised as they are.
    """
    try:
        if not distributed.is_initialized():
            gpu = torch.cuda.is_initialized()  # used by this run, and not merely there
            distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
            # The others wait for an episode of the evaluation, which may last above 30 minutes.
            gloo = distributed.group.WORLD._get_backend(torch.device("cpu"))
            gloo._set_default_timeout(timedelta(days=7))
            # torch's threads outlive Python and would abort its exit
            atexit.register(time.sleep, 0.5)
            atexit.register(distributed.destroy_process_group)
        call(*tensors)
    except RuntimeError as error:
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            reason = " ".join(str(error).split())
            raise OtherProcessEnded(
                f"another process of the run ended, or cannot be reached ({reason:.300})"
            ) from error
        raise


def average_metrics(metrics: dict) -> dict:
    """Average scalars over all processes. Histograms stay those of this process."""
    tags = [tag for tag, value in metrics.items() if is_scalar(value)]
    values = torch.tensor([float(metrics[tag]) for tag in tags], dtype=torch.float64)
    return metrics | dict(zip(tags, average(values).tolist()))


# ----------------------------------------------------------------------------------- command line
class UsageError(ValueError):
    """The user made a mistake. It costs one line without a traceback, and exit code 2."""


def flag_error(args: Args, name: str, text: str) -> UsageError:
    """Return an error that names a flag and its value. `text` tells the bound or the remedy."""
    return UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: {text}")


def check_flags(args: Args) -> None:
    """Turn the flags into plain Python values and require that each of them can work.

    An integer serves as a float, a list as a tuple, and a number of NumPy as one of Python. Raises
    `UsageError` with flag, value, bound and remedy.
    """
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        setattr(args, name, plain(getattr(args, name), kind))
        check_kind(args, name, kind)
        check_range(args, name, extras)
    check_sizes(args)
    check_machine(args)

    if args.learning_rate == 0 and args.critic_learning_rate is None:
        raise flag_error(args, "learning_rate", "trains nothing without --critic-learning-rate")
    if args.eval_every > args.num_iterations:
        text = f"counts rollouts of {args.batch_size:,} steps, of which the run has"
        raise flag_error(args, "eval_every", f"{text} {args.num_iterations}; lower it")
    if args.resume and with_home(args.resume).name == "checkpoint.pt":
        args.resume = str(with_home(args.resume).parent)
    if args.resume and not os.path.isdir(with_home(args.resume)):
        raise flag_error(args, "resume", "is not a run directory, which has a checkpoint.pt")
    if args.resume and args.evaluate:
        raise flag_error(args, "evaluate", "excludes --resume; give one of them")


def check_presets(args: Args) -> None:
    """Refuse an unknown preset, and one none of whose flags is set in a new run.

    `Args` records names alone: `preset_args` and the command line set the flags. `critics` also
    needs --init-from and a learning rate of 0.
    """
    preset_flags(args.preset)
    defaults = {one.name: one.default for one in fields(args)}
    for name in args.preset:
        flags = PRESETS[name].flags.keys() - {"env_id"}
        if flags and all(getattr(args, flag) == defaults[flag] for flag in flags):
            text = "none of its flags is set, or others undo all of them; leave it out"
            raise UsageError(f"--preset {name}: {text}, or in Python use preset_args({name!r})")
    if "critics" in args.preset and not args.init_from:
        raise UsageError("--preset critics: needs --init-from, the run whose policy acts")
    if "critics" in args.preset and args.learning_rate > 0:
        text = "must be 0 with --preset critics, since the policy stays as it is; leave it out"
        raise flag_error(args, "learning_rate", text)


def check_kind(args: Args, name: str, kind: Any) -> None:
    """Require that a flag is one of its choices, a tuple of the right entries, or of its type."""
    value = getattr(args, name)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise flag_error(args, name, f"must be one of {', '.join(map(str, choices))}")
    elif get_origin(kind) is tuple:
        entry_kind, _ = get_args(kind)
        if not isinstance(value, tuple) or any(type(entry) is not entry_kind for entry in value):
            entries = "integers" if entry_kind is int else "words"
            raise flag_error(args, name, f"must be a tuple of {entries}")
    else:
        try:
            fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        except TypeError:  # Python cannot check every kind that an added flag may have
            fits = True

        if not fits:
            raise flag_error(args, name, f"must be {getattr(kind, '__name__', kind)}")


def check_range(args: Args, name: str, extras: list) -> None:
    """Require that a flag is within the `Range` of its annotation, if there is one."""
    value = getattr(args, name)
    for allowed in extras:
        if isinstance(allowed, Range) and value is not None and value not in allowed:
            bound = f"in {allowed}" if "," in str(allowed) else str(allowed)
            raise flag_error(
                args, name, f"must be finite and {bound}" if bound else "must be finite"
            )


def check_machine(args: Args) -> None:
    """Require the launcher and the GPUs that the flags need."""
    if WORLD_SIZE > 1 and not {"MASTER_ADDR", "MASTER_PORT", "RANK"} <= os.environ.keys():
        text = "is set without a launcher; start by torchrun, or unset it"
        raise UsageError(f"WORLD_SIZE={WORLD_SIZE}: {text}")
    if args.cuda and not torch.cuda.is_available():
        raise flag_error(args, "cuda", "torch sees no GPU; leave it out")
    if args.cuda and WORLD_SIZE > 1 and "LOCAL_RANK" not in os.environ:
        raise flag_error(args, "cuda", "LOCAL_RANK is not set; start by torchrun")
    if args.cuda and WORLD_SIZE > 1:
        gpus = torch.cuda.device_count()
        needed = launched("LOCAL_WORLD_SIZE", LOCAL_RANK + 1)  # on this machine
        if needed > gpus:
            text = f"{needed} processes need a GPU each, and torch sees {gpus}"
            raise flag_error(args, "cuda", f"{text}; start fewer processes")


def plain(value: Any, kind: Any) -> Any:
    """Turn NumPy's numbers, lists, and integers where a float is meant into plain Python."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple):
        value = tuple(plain(entry, type(entry)) for entry in value)
    if type(value) is int and kind in (float, float | None):
        with contextlib.suppress(OverflowError):  # too large for a float: `check_kind` refuses it
            value = float(value)
    return value


def check_sizes(args: Args) -> None:
    """Require that rollouts, training sequences, minibatches and processes fit together."""
    size = "num_envs * num_steps"
    if args.num_envs % WORLD_SIZE:
        raise flag_error(args, "num_envs", f"must be a multiple of the {WORLD_SIZE} processes")
    if args.batch_size < 2:
        raise flag_error(args, "num_steps", f"a rollout, {size}, needs 2 steps")
    if args.num_iterations < 1:
        rollout = f"{size}, {args.num_envs} * {args.num_steps} = {args.batch_size}"
        raise flag_error(args, "total_timesteps", f"must be at least one rollout, {rollout}")
    if args.num_steps % args.sequence_length:
        raise flag_error(args, "seq_len", "must divide num_steps (0 takes all of them)")
    sequences = args.batch_size // args.sequence_length // WORLD_SIZE
    if sequences % args.num_minibatches:
        whose = "each process" if WORLD_SIZE > 1 else "a rollout"
        text = f"must divide the {sequences} training sequences of {whose}"
        remedy = "lower it, or cut more sequences by --seq-len"
        raise flag_error(args, "num_minibatches", f"{text}; {remedy}")


def preset_flags(names: Iterable[str], init_from: str = "") -> dict[str, Any]:
    """Return the flags of presets, applied from left to right.

    Where `critics` stands alone, the flags of the run `init_from` come first. Raises `UsageError`
    for a name that is unknown or given twice, for a second task, and for a task behind a purpose.
    """
    flags = {"preset": tuple(names)}
    if init_from and flags["preset"] == ("critics",):
        flags = flags_of_run(init_from) | flags

    for name in flags["preset"]:
        if name not in PRESETS:
            raise UsageError(f"--preset {name}: is unknown; known are {', '.join(PRESETS)}")
        if flags["preset"].count(name) > 1:
            raise UsageError(f"--preset {name}: is given twice")
        flags |= PRESETS[name].flags

    for name in flags["preset"][1:]:
        if name not in PURPOSES:
            first = flags["preset"][0]
            text = f"is for a task, and so is {first}; name one of them"
            if first in PURPOSES:
                text = f"is for a task, and stands behind {first}; name it first"
            raise UsageError(f"--preset {name}: {text}")
    return flags


def flags_of_run(path: str) -> dict[str, Any]:
    """Return the flags of a stored run that its learning depends on, and `eval_sampled`.

    The others of the groups `run` and `machine` are left out.
    """
    stored = read_saved(checkpoint_path(path))["args"]
    groups = [group for group in GROUPS.values() if group not in (RunArgs, MachineArgs)]
    names = [one.name for group in groups for one in fields(group)]
    return {name: stored[name] for name in (*names, "eval_sampled")}


def preset_args(*names: str, **flags: Any) -> Args:
    """Return the flags of presets, and then others. `preset_args("calibrated", gamma=0.9)`."""
    return Args(**preset_flags(names, flags.get("init_from", "")) | flags)


def explain_flags() -> None:
    """Give each flag its docstring as help, in one paragraph. tyro would keep its line breaks."""
    groups = {group.__name__: group for group in GROUPS.values()}
    for node in ast.parse(Path(__file__).read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name in groups:
            flags = {one.name: one for one in fields(groups[node.name])}
            for flag, docstring in pairwise(node.body):
                if isinstance(flag, ast.AnnAssign) and isinstance(docstring, ast.Expr):
                    paragraph = " ".join(docstring.value.value.split())
                    flags[flag.target.id].metadata = {"help": paragraph}


def parse_flags(argv: list[str], defaults: dict[str, Any]) -> Args:
    """Parse the flags of a command line. tyro shows each group of them in a box of its own."""
    if not {"-h", "--help"}.isdisjoint(argv):
        explain_flags()
    groups = {}
    for title, group in GROUPS.items():
        known = {one.name: defaults[one.name] for one in fields(group) if one.name in defaults}
        groups[title] = group(**known)

    refuse_values_of_switches(argv)
    flags_class = make_dataclass("Flags", list(GROUPS.items()))
    presets = [f"  {name:<18} {preset.about}" for name, preset in PRESETS.items()]
    parsed = tyro.cli(
        tyro.conf.OmitArgPrefixes[flags_class],
        args=argv,
        default=flags_class(**groups),
        description="\n".join([(__doc__ or SCRIPT).splitlines()[0], "", "presets:", *presets]),
    )

    flat = {}
    for title in GROUPS:
        flat |= vars(getattr(parsed, title))
    args = Args(**flat)
    refuse_idle_flags(args, argv)
    return args


def refuse_values_of_switches(argv: list[str]) -> None:
    """Raise `UsageError` for a word such as False behind a flag that is either on or off."""
    switches = {name for name, kind in get_type_hints(Args).items() if kind is bool}
    words = [part for word in argv for part in word.split("=", 1)]
    for flag, value in pairwise(words):
        name = flag.removeprefix("--").replace("-", "_")
        if name in switches and value.lower() in ("true", "false", "0", "1"):
            on = f"--{name.replace('_', '-')}"
            text = f"takes no value; {on} turns it on, {on.replace('--', '--no-', 1)} off"
            raise UsageError(f"{flag} {value}: {text}")


def refuse_idle_flags(args: Args, argv: list[str]) -> None:
    """Raise `UsageError` for a typed flag that has no effect beside the other flags."""
    words = {word.split("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    for name, hint in get_type_hints(Args, include_extras=True).items():
        flag = f"--{name.replace('_', '-')}"
        typed = flag in words or flag.replace("--", "--no-", 1) in words
        if not typed or get_origin(hint) is not Annotated:
            continue
        for idle in get_args(hint):
            if isinstance(idle, IdleWhile) and idle.holds(args):
                other = f"--{idle.flag.replace('_', '-')}"
                found = getattr(args, idle.flag)
                text = f"has no effect while {other} is {found}; change that, or leave {flag} out"
                raise flag_error(args, name, text)


def parse_args(argv: list[str]) -> Args:
    """Return the flags of the command line.

    With --resume and --evaluate the flags of the stored run are the defaults. Raises `UsageError`
    for a flag that has to be as in the stored run.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", nargs="?")
    finder.add_argument("--evaluate", nargs="?")
    finder.add_argument("--init-from", "--init_from", nargs="?")
    finder.add_argument("--preset", nargs="*", action="append", default=[])
    finder.add_argument("--masked-obs", "--masked_obs", nargs="*", action="append", default=[])
    # tyro reads --preset=a b as two names, and argparse does so if the word is split. Others are
    # split since argparse takes --run-dir="a b", which has a space, for the name of a preset.
    apart = [word.split("=", 1) if word.startswith("--") else [word] for word in argv]
    given, _ = finder.parse_known_args([part for parts in apart for part in parts])

    if len(given.preset) > 1:
        second = " ".join(given.preset[1])
        raise UsageError(f"--preset {second}: is a second --preset; name all presets after one")
    if len(given.masked_obs) > 1:  # it alone would count
        second = " ".join(given.masked_obs[1])
        text = "is a second --masked-obs; name all entries after one"
        raise UsageError(f"--masked-obs {second}: {text}")
    names = given.preset[0] if given.preset else []

    path = given.evaluate if given.resume is None else given.resume
    if path is None:
        return parse_flags(argv, preset_flags(names, given.init_from or ""))
    if not path:
        raise UsageError("--resume or --evaluate: is empty; it takes a run directory")
    if names:
        raise UsageError(f"--preset {' '.join(names)}: a stored run has flags of its own")

    _, stored = read_checkpoint(path)
    args = parse_flags(argv, asdict(stored))
    require_stored_flags(args, stored, path)
    if args.evaluate and args.eval_episodes == 0:
        raise flag_error(args, "eval_episodes", "must be at least 1 with --evaluate")
    return args


def require_stored_flags(args: Args, stored: Args, path: str) -> None:
    """Raise `UsageError` where a flag differs from that of a stored run, and may not."""
    free = "eval_episodes eval_sampled capture_video torch_threads"  # `take_up` has more to say
    if args.evaluate:  # other episodes: those that chose best.pt flatter it
        free += " seed"
    else:
        free = f"total_timesteps {free} eval_every checkpoint_every save_envs"

    before = asdict(stored)
    changed = [
        f"--{name.replace('_', '-')} {value} (the run has {before[name]})"
        for name, value in sorted(asdict(args).items())
        if value != before[name] and name not in (*free.split(), "resume", "evaluate")
    ]
    if changed:
        allowed = " ".join(f"--{name.replace('_', '-')}" for name in free.split())
        text = f"must be as in {path}; only these may differ: {allowed}"
        remedy = "; to train on with others take --init-from"
        if args.evaluate:
            remedy = "; for another task see From Python in README"
        raise UsageError(f"{', '.join(changed)}: {text}{remedy}")

    least = stored.total_timesteps
    if args.total_timesteps < least:
        raise flag_error(args, "total_timesteps", f"must not be below the run's, {least}")


def evaluate_stored(args: Args) -> None:
    """Evaluate the agent of --evaluate, and keep the result in `evaluations/` beside it.

    The file's name has that of the checkpoint, its step, and what differs from the run's
    --eval-episodes, --eval-sampled and --seed: best_step-4096_seed-7.json.
    """
    set_up_process(args)
    path = checkpoint_path(args.evaluate)  # absolute: a task may change the working directory
    saved, stored = read_checkpoint(path)
    step = saved["global_step"]
    names = ("eval_episodes", "eval_sampled", "seed")
    others = [name for name in names if getattr(args, name) != getattr(stored, name)]
    differing = "".join(f"_{name}-{getattr(args, name)}" for name in others)
    name = f"{path.stem}_step-{step}{differing}"
    if args.capture_video and not os.access(path.parent, os.W_OK):
        text = f"films go to {path.parent}, which cannot be written to; copy the run elsewhere"
        raise flag_error(args, "capture_video", text)
    tell(f"{args.env_id}: {path} after {step:,} steps")
    tell_of_edits(path.parent)

    env = make_eval_env(args)
    try:
        agent = restore_agent(saved, args, env.observation_space, env.action_space)
        played = list(play(env, agent, args, path.parent / f"videos/{name}"))
    finally:
        close_quietly(env)

    how = {"episodes": args.eval_episodes, "sampled": args.eval_sampled, "seed": args.seed}
    result = {"step": step} | how | summarise(played, args)
    file = path.parent / f"evaluations/{name}.json"
    try:
        file.parent.mkdir(exist_ok=True)
        replace_file(file, json.dumps(result, indent=2).encode())
    except OSError as error:
        tell(f"warning: the result is not kept: {error}", file=sys.stderr)


@contextlib.contextmanager
def silenced_unless_first() -> Iterator[None]:
    """Let only the first process print: each of them parses the same flags."""
    with contextlib.ExitStack() as stack:
        if RANK > 0:
            nothing = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nothing))
            stack.enter_context(contextlib.redirect_stderr(nothing))
        yield


@contextlib.contextmanager
def until_nobody_reads() -> Iterator[None]:
    """End the process quietly where the reader of its help has gone, as `head` does."""
    try:
        yield
    except BrokenPipeError:
        sys.exit(0)


def flush_output() -> None:
    """Flush what was printed. Where nobody reads it, Python's own flush would end with code 120."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # some programs have none
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # the task has closed it
            pass


def decide_who_tells(error: BaseException) -> bool:
    """Return whether this process prints what has ended the run. It may wait for others first.

    The first process does. A mistake is printed once on each machine, since machines differ. One
    that this process may have met alone has a note with its number, and is printed here. Without
    that note a process that is not the first one of its machine waits five seconds. If the first
    one meets the mistake as well, the launcher ends this process in that time. If not, the mistake
    gets the note and is printed here.

    Where the processes have not found each other, the first one of each machine prints why.
    """
    if isinstance(error, OtherProcessEnded) and not distributed.is_initialized():
        return LOCAL_RANK == 0
    if RANK == 0 or not isinstance(error, UsageError):
        return RANK == 0
    notes = getattr(error, "__notes__", ())
    if LOCAL_RANK > 0 and not any(note.startswith("in process ") for note in notes):
        time.sleep(5)
        of_this_process(error)
    return True


def working_directory() -> str:
    """Return the working directory. Raises `UsageError` if it was deleted."""
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error}); change to another") from error


def last_line(error: BaseException) -> str:
    """Return what has ended a run, with its notes, as one line."""
    parts = [str(error) or "interrupted", *getattr(error, "__notes__", ())]
    line = " ".join("; ".join(parts).split())
    return line if isinstance(error, KeyboardInterrupt) else f"error: {line}"


def main(argv: list[str]) -> None:
    """Run the command line. Modules of tasks are also looked for in the working directory.

    A mistake of the user costs a short message on stderr and exit code 2. A fault is raised. A
    signal while a run trains ends it with a checkpoint and exit code 130.
    """
    try:
        here = working_directory()
        if here not in sys.path:
            sys.path.append(here)
        with silenced_unless_first(), until_nobody_reads():
            args = parse_args(argv)

        if not args.evaluate:
            train(args)
        elif RANK == 0:
            evaluate_stored(args)

    except (UsageError, KeyboardInterrupt, OtherProcessEnded) as error:
        if decide_who_tells(error):
            tell(last_line(error), file=sys.stderr)
        sys.exit({UsageError: 2, OtherProcessEnded: 1}.get(type(error), 130))
    except NotFinite:
        if RANK == 0:
            raise
        sys.exit(1)


if __name__ == "__main__" and "__file__" in globals():  # a notebook has no file and no flags
    try:
        main(sys.argv[1:])
    finally:
        flush_output()
