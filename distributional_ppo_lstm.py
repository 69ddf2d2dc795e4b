"""Recurrent PPO with twin quantile critics.

    python distributional_ppo_lstm.py            # CartPole without velocities; --help for the flags

One iteration of `train`:

    collect_rollout   the actor alone acts for T steps in N environments
    prepare_batch     one pass of the critics: a return distribution for every state and successor,
                      hence advantages and targets; return statistics and value heads move (PopArt)
    update            an Adam step per minibatch of shuffled training sequences, each an unbroken
                      stretch of one environment, until the KL divergence exceeds `target_kl`, on
                      clipped policy loss - ent_coef * entropy + vf_coef * losses of the critics
    obs_moments       the observation statistics take in the rollout

Shapes: T steps, N environments, B rows, D observation, P action parts, A action floats, K
quantiles, J target samples, C critics, H LSTM width; training cuts the rollout into M sequences of
L steps. Where D is written images have three axes, channels first. Rewards, values and returns are
in the task's units, what networks see and predict is normalised, images by their first layer.
Papers are cited at their formulas. The sibling, distributional_ppo_categorical.py, is feed-forward,
with categorical critics."""

import argparse
import atexit
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, distributed, nn, optim
from torch.utils.tensorboard import SummaryWriter, summary

VELOCITIES = {  # entries that are zero in the velocity-free tasks of rl-baselines3-zoo
    "CartPoleNoVel": (1, 3), "MountainCarNoVel": (1,), "MountainCarContinuousNoVel": (1,),
    "PendulumNoVel": (2,), "LunarLanderNoVel": (2, 3, 5), "LunarLanderContinuousNoVel": (2, 3, 5),
}  # fmt: skip
LOG_STD_RANGE = (-5.0, 2.0)  # of Gaussian actions: std from 0.0067 to 7.4
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
STATS = "episode_statistics"  # key of a finished episode's return and length in `info`
RANK = int(os.environ.get("RANK", "0"))  # number of this process, by torchrun
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))  # processes that share the environments
STOP: list[int] = []  # signals received: end after this iteration, with a checkpoint
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}
Tensors = tuple[Tensor, ...]


class UsageError(ValueError):
    """A mistake of the user: one line without a traceback, exit code 2."""


def require(condition: bool, message: str) -> None:
    """Raise `UsageError` unless the condition holds."""
    if not condition:
        raise UsageError(message)


@dataclass
class Args:
    """Recurrent PPO with twin quantile critics."""

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run directory's name
    seed: int = 1  # seed of environments, weights and sampling, integer >= 0
    torch_deterministic: bool = True  # deterministic cuDNN kernels (CPU runs always repeat exactly)
    cuda: bool = False  # run the networks on the GPU; small ones are faster on the CPU
    torch_threads: int = 1  # CPU threads of torch, integer >= 1; 1 is fastest for small networks
    compile: bool = False  # torch.compile what is around the LSTMs: a minute, then a little faster
    run_dir: str = "runs"  # directory under which the run directory is created
    eval_episodes: int = 50  # episodes of an evaluation, integer >= 1
    eval_every: int = 0  # iterations between evaluations, integer >= 0; 0: only at the end
    checkpoint_every: int = 100  # iterations between checkpoints, integer >= 0; 0: at the end
    resume: str = ""  # run directory to continue, with its flags; total_timesteps may grow
    init_from: str = ""  # run directory or checkpoint whose weights and statistics to start with
    eval_sampled: bool = False  # evaluate the policy as it samples, not by its mode
    capture_video: bool = False  # film the first 3 episodes of every evaluation; needs moviepy
    evaluate: str = ""  # run directory or checkpoint to evaluate with its flags; trains nothing
    env_id: str = "CartPoleNoVel-v1"  # gymnasium id, module:id, or a velocity-free id of the zoo
    total_timesteps: int = 100_000  # environment steps of the run, rounded down to whole rollouts
    num_envs: int = 8  # parallel environments, of all processes, integer >= 1
    num_steps: int = 64  # steps of each environment per rollout, integer >= 1
    masked_obs: tuple[int, ...] = ()  # entries of the observation vector multiplied by zero
    hidden_size: int = 64  # width of encoders and value heads, integer >= 1
    lstm_hidden_size: int = 64  # width of the actor's and of the critic's LSTM, integer >= 1
    activation: Literal["tanh", "relu"] = "relu"  # of encoders and value heads
    log_std_init: float = 0.0  # initial log-std of Gaussian actions, in [-5, 2]
    norm_obs: bool = True  # normalise observation vectors by running moments, clipped to +-10
    learning_rate: float = 1e-3  # of Adam, > 0
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount per step, in [0, 1]
    gae_lambda: float = 0.9  # weight of longer returns in GAE, in [0, 1]
    num_minibatches: int = 2  # per epoch; divides the training sequences of a rollout
    seq_len: int = 0  # steps of a training sequence, divides num_steps; 0: the whole rollout
    update_epochs: int = 8  # passes over each rollout, integer >= 1
    norm_adv: bool = True  # normalise advantages over the rollout
    norm_adv_memory: int = 100  # rollouts whose advantage std holds on, integer >= 0; 0: none
    clip_coef: float = 0.2  # clipping range of the probability ratio, > 0
    ent_coef: float = 0.0  # weight of the entropy bonus, per nat, >= 0
    ent_coef_final: float | None = None  # the same at the end of the run, linear; None: constant
    min_entropy: float = 0.0  # floor of the mean entropy, nats; needs min_entropy_penalty > 0
    min_entropy_penalty: float = 0.0  # weight of the shortfall below the floor, per nat, >= 0
    vf_coef: float = 0.5  # weight of the value loss, >= 0
    max_grad_norm: float = 0.5  # clipping norm of the gradient of all parameters, > 0
    target_kl: float | None = None  # stop the update ahead of a step at a larger KL, nats, > 0
    num_critics: Literal[1, 2] = 2  # value heads with parameters of their own
    # V: the mean of the distribution, or a further output of each critic, blind to no rare return
    value_from: Literal["distribution", "mean_head"] = "mean_head"
    twin_reduce: Literal["min", "mean", "min_quantile"] = "min"  # how twins give one distribution
    norm_returns: bool = True  # critics predict normalised returns (PopArt)
    norm_returns_memory: int = 10  # rollouts whose returns the statistics tell of, integer >= 1
    vf_clip_coef: float = 0.2  # range d of value clipping (vf_clip), in normalised returns, > 0
    # lambda_return: one number, understates spread and risk; sr_lambda: samples of the return
    value_target: Literal["lambda_return", "sr_lambda"] = "lambda_return"
    cvar_alpha: float = 0.05  # tail mass averaged by CVaR, in [1e-3, 1]; 1 is the mean
    cvar_weight: float = 0.0  # weight of the CVaR advantage, in [0, 1]; ignored at cvar_alpha 1

    # ---- value distribution: quantiles (flags) ----
    num_quantiles: int = 32  # quantiles of each critic, integer >= 1
    kappa: float = 0.05  # Huber threshold, normalised returns, >= 0; 0: pinball loss
    # value clipping: whether and how a critic's quantiles are kept near its own old ones
    vf_clip: Literal["none", "per_quantile", "mean_only", "mean_and_variance"] = "none"

    def check_distribution(self) -> None:
        self.bound(1, math.inf, "num_quantiles")
        self.bound(0, math.inf, "kappa")

    # ---- end of value distribution ----

    def __post_init__(self) -> None:
        """Derive the sizes; raise `UsageError` with flag, value, bound and remedy."""
        for name, hint in get_type_hints(Args).items():
            self.check_type(name, hint)
        inf = math.inf
        self.bound(1, inf, "torch_threads", "eval_episodes", "num_envs", "num_steps")
        self.bound(1, inf, "num_minibatches", "update_epochs")
        self.bound(1, inf, "norm_returns_memory", "hidden_size", "lstm_hidden_size")
        self.bound(0, inf, "eval_every", "checkpoint_every", "seq_len", "vf_coef")
        self.bound(0, inf, "norm_adv_memory", "ent_coef", "ent_coef_final", "min_entropy_penalty")
        self.bound(1e-12, inf, "learning_rate", "clip_coef", "max_grad_norm", "target_kl")
        self.bound(1e-12, inf, "vf_clip_coef")
        self.bound(0, 1, "gamma", "gae_lambda", "cvar_weight")
        self.bound(1e-3, 1, "cvar_alpha")
        self.bound(0, 4e9, "seed")
        self.bound(-1e9, 1e9, "min_entropy")
        self.bound(*LOG_STD_RANGE, "log_std_init")
        self.check_distribution()

        equal = self.num_envs % WORLD_SIZE == 0
        self.rule("num_envs", equal, f"must be a multiple of the {WORLD_SIZE} processes")
        self.local_envs = self.num_envs // WORLD_SIZE  # of this process
        self.batch_size = self.num_envs * self.num_steps  # samples of a rollout
        self.num_iterations = self.total_timesteps // self.batch_size  # rollouts, and updates
        self.is_atari = self.env_id.split(":")[-1].startswith("ALE/")  # rewards are clipped
        self.sequence_length = self.seq_len or self.num_steps  # L, steps of a training sequence
        local_size = self.local_envs * self.num_steps
        self.num_sequences = local_size // self.sequence_length  # M, of a process's rollout

        size = "num_envs * num_steps"
        self.rule("num_steps", self.batch_size > 1, f"a rollout, {size}, needs 2 steps")
        enough = self.num_iterations > 0
        self.rule("total_timesteps", enough, f"must be at least one rollout, {size}")
        whole = self.num_steps % self.sequence_length == 0
        self.rule("seq_len", whole, "must divide num_steps (0: whole)")
        equal = self.num_sequences % self.num_minibatches == 0
        divide = f"must divide the {self.num_sequences} sequences, {size} / seq_len / processes"
        self.rule("num_minibatches", equal, divide)
        gpu = torch.cuda.is_available() or not self.cuda
        self.rule("cuda", gpu, "torch sees no GPU; leave it out")
        found = not self.resume or Path(self.resume).is_dir()
        self.rule("resume", found, "is not a run directory")
        self.rule("evaluate", not (self.evaluate and self.resume), "excludes --resume")

    def check_type(self, name: str, hint: Any) -> None:
        """Require what the annotation says; an integer serves as a float, a bool as neither."""
        value = getattr(self, name)
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            self.rule(name, value in choices, f"must be one of {', '.join(map(str, choices))}")
        elif get_origin(hint) is tuple:
            holds = isinstance(value, tuple) and all(type(entry) is int for entry in value)
            self.rule(name, holds, "must be a tuple of integers")
        else:
            wider = hint | int if isinstance(0.0, hint) else hint
            holds = isinstance(value, wider) and isinstance(value, bool) == (hint is bool)
            self.rule(name, holds, f"must be {getattr(hint, '__name__', hint)}")

    def bound(self, low: float, high: float, *names: str) -> None:
        """Require finite numbers in [low, high]; None passes."""
        for name in names:
            value = getattr(self, name)
            holds = value is None or (math.isfinite(value) and low <= value <= high)
            self.rule(name, holds, f"must be finite and in [{low:g}, {high:g}]")

    def rule(self, name: str, holds: bool, text: str) -> None:
        require(holds, f"--{name.replace('_', '-')} {getattr(self, name)}: {text}")


# ------------------------------------------------------------------------ what flows, with shapes
class Carry(NamedTuple):
    """What one rollout hands to the next."""

    obs: np.ndarray  # (N, D) to act on next, raw
    episode_start: np.ndarray  # (N,) bool, obs opens an episode
    actor_state: Tensor  # (2, N, H) h and c ahead of obs, zero where an episode opens
    critic_state: Tensor  # (2, N, H) of the critics, which `unroll_lstm` zeroes there


class Rollout(NamedTuple):
    """T steps of N environments as they happened."""

    obs: Tensor  # (T, N, D) s_t, raw
    next_obs: Tensor  # (T, N, D) true successor s'_t, raw: the final one where an episode ended
    episode_start: Tensor  # (T, N) bool, s_t opens an episode
    actions: Tensor  # (T, N, P) indices or (T, N, A) floats, as sampled
    params: Tensor  # (T, N, 2, A) or (T, N, P, largest part) of the action distribution
    rewards: Tensor  # (T, N) in the task's units, float64
    terminated: Tensor  # (T, N) bool, s'_t is terminal: nothing follows
    truncated: Tensor  # (T, N) bool, a time limit: s'_t has a value
    actor_state: Tensor  # (T / L, 2, N, H) ahead of each training sequence
    episodes: list[tuple[int, float, int]]  # step t, return and length of those that ended


class Batch(NamedTuple):
    """A rollout cut into M training sequences of L steps, or some of them; nothing has a graph."""

    obs: Tensor  # (L, M, D) normalised
    episode_start: Tensor  # (L, M) bool
    actor_state: Tensor  # (2, M, H) ahead of the sequence
    critic_state: Tensor  # (2, M, H) ahead of the sequence
    actions: Tensor  # (L, M, P) or (L, M, A)
    params: Tensor  # (L, M, 2, A) or (L, M, P, largest part) of the policy that acted
    log_probs: Tensor  # (L, M) of the actions under that policy, nats
    advantages: Tensor  # (L, M) as the policy loss takes them
    targets: Tensor  # (L, M, J) of the value distribution, normalised returns
    returns: Tensor  # (L, M) lambda-returns, normalised: of the mean outputs
    old_values: Tensor  # (L, M, C, K or K + 1) outputs of each critic, to clip around


# ----------------------------------------------------------------------------------- many processes
class OtherProcessEnded(RuntimeError):
    """What the processes of a run find when one of them has ended."""


def exchange(call: Callable, *args: Any) -> None:
    """What all processes call at once; the first time they find each other."""
    if not distributed.is_initialized():
        gpu = torch.cuda.is_available()
        patience = timedelta(days=7)  # others wait while process 0 evaluates
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=patience)
        atexit.register(time.sleep, 0.5)  # threads of torch that outlive Python abort its exit
        atexit.register(distributed.destroy_process_group)
    try:
        call(*args)
    except RuntimeError as error:  # of the connection
        raise OtherProcessEnded("another process of the run ended") from error


def average(x: Tensor) -> Tensor:
    """Mean over all processes of tensors of one shape; x itself where there is one process."""
    if WORLD_SIZE > 1:
        x = x.detach() / WORLD_SIZE
        exchange(distributed.all_reduce, x)
    return x


def of_all(thing: Any) -> list:
    """A thing of every process, in their order."""
    things = [thing] * WORLD_SIZE
    if WORLD_SIZE > 1:
        exchange(distributed.all_gather_object, things, thing)
    return things


def joined(x: Tensor) -> Tensor:
    """Tensors (T, n) of all processes along their environments, (T, N)."""
    if WORLD_SIZE == 1:
        return x
    whole = x.new_zeros(len(x), WORLD_SIZE * x.shape[1])
    own(whole).copy_(x)
    return WORLD_SIZE * average(whole)


def own(x: Tensor) -> Tensor:
    """This process's part of what `joined` gives."""
    return x.chunk(WORLD_SIZE, 1)[RANK]


# ---------------------------------------------------------------------------- advantages and policy
def gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor,
        truncated: Tensor, gamma: float, gae_lambda: float) -> Tensors:  # fmt: skip
    """Generalized advantage estimation with correct time limits: advantages A and returns A + V.
        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - (terminated_t or truncated_t)) * A_{t+1}
    All (T, N), or (T, N, R) for R reward terms with masks (T, N). s'_t is the true successor: the
    final observation where an episode ended; both ends at once are a termination. Either end cuts
    the recursion: the next episode's rewards must not leak across a time limit. Raises ValueError
    for entries that are not finite. Source: Schulman et al. 2016, eq. 16; Pardo et al. 2018."""
    for name, x in (("rewards", rewards), ("values", values), ("next_values", next_values)):
        if bad := int((~torch.isfinite(x)).sum()):
            raise ValueError(f"gae: {bad} of {x.numel()} {name} are not finite")
    shape = terminated.shape + (1,) * (values.dim() - terminated.dim())  # masks lack further axes
    alive = (~terminated).to(values.dtype).view(shape)
    unbroken = (~(terminated | truncated)).to(values.dtype).view(shape)
    delta = rewards + gamma * alive * next_values - values  # (T, N)
    decay = gamma * gae_lambda * unbroken
    sums = [torch.zeros_like(delta[0])]  # from the end
    for d, c in zip(delta.flip(0), decay.flip(0)):
        sums.append(torch.addcmul(d, c, sums[-1]))
    advantages = torch.stack(sums[1:]).flip(0)
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor, eps: float = 1e-8) -> Tensor:
    """(A - mean) / (std + eps), population std over all entries.
    No branch on std, which would be discontinuous. Constant input gives zeros, exactly: that is why
    the first entry is subtracted first."""
    shifted = advantages - advantages.flatten()[0]
    centered = shifted - shifted.mean()
    return centered / (centered.square().mean().sqrt() + eps)


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - predictions) / Var(targets), a scalar; 0 where the targets do not vary."""
    variance = targets.var(correction=0)
    residual = (targets - predictions).var(correction=0)
    varies = (variance > 0) & (targets.max() > targets.min())
    return torch.where(varies, 1 - residual / variance, 0)


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensors:
    """PPO's clipped surrogate; loss, approx_kl and clip fraction, scalars, from (B,) inputs.
        r = exp(clamp(log_ratio, -20, 20)),  log_ratio = log pi_new(a|s) - log pi_old(a|s)
        loss = -mean(min(r * A, clip(r, 1 - eps, 1 + eps) * A))
        approx_kl = mean((r - 1) - log r)                 in nats, >= 0 (Schulman's k3 estimator)
        clip fraction = mean(|r - 1| > eps)
    The clamp is this wide because a tight one removes the gradient at r >> 1, A < 0.
    Source: Schulman et al. 2017, eq. 7."""
    log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = (log_ratio.expm1() - log_ratio).mean()  # r - 1 would round below log r
        clip_fraction = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
    return loss, approx_kl, clip_fraction


def entropy_loss(entropy: Tensor, ent_coef: float, min_entropy: float,
                 penalty_coef: float) -> Tensor:  # fmt: skip
    """-ent_coef * mean(H) + penalty_coef * relu(min_entropy - mean(H)), a scalar.
    entropy (B,) in nats; that of Gaussians may be negative, so that a floor of 0 is not neutral.
    Source: Schulman et al. 2017, eq. 9; the floor is ours."""
    mean = entropy.mean()
    if ent_coef == penalty_coef == 0:
        return torch.zeros_like(mean)  # no pass backward that gives 0
    return -ent_coef * mean + penalty_coef * torch.relu(min_entropy - mean)


def linear_schedule(start: float, end: float, progress: float) -> float:
    """start + (end - start) * progress, with progress clamped to [0, 1]."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def empirical_cvar(returns: Tensor, alpha: float) -> float:
    """Mean of the lowest fraction alpha of a sample (n,), one return counting in part."""
    size = alpha * len(returns)
    mass = (size - torch.arange(len(returns)).double()).clamp(0, 1)
    return float((mass * returns.sort().values).sum() / size)


# ---------------------------------------------------------------------------------- running moments
class RunningMoments(nn.Module):
    """Mean and variance of everything seen, in float64, saved with the weights.
    `count` starts at 0: the first update gives exactly the moments of its batch. It is capped at
    `max_count`, so that old data fade. Source: Chan et al. 1983 (never E[x^2] - E[x]^2)."""

    def __init__(self, shape: tuple[int, ...] = (), max_count: float | None = None) -> None:
        super().__init__()
        self.max_count = math.inf if max_count is None else max_count
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """The one scale of `normalize` and `denormalize`, in whatever units: the floor is a ten
        millionth of the mean, which float32 does not resolve."""
        return (self.var + (1e-7 * self.mean).square() + 1e-60).sqrt()

    @torch.no_grad()
    def update(self, x: Tensor, parts: int = 1) -> None:
        """Take in a batch; all axes ahead of `shape` are samples. Of a batch in equal `parts`, one
        in each process, this is one."""
        x = x.double().reshape(-1, *self.mean.shape)
        size = parts * len(x)
        mean = average(x.mean(0))
        var = average((x - mean).square().mean(0))
        past = self.count / (self.count + size)  # its weight in the merged moments
        delta = mean - self.mean
        between = past * delta.square()
        self.var = past * self.var + (1 - past) * (var + between)
        self.mean = self.mean + (1 - past) * delta  # a new tensor: callers may hold the old one
        self.count = (self.count + size).clamp(max=self.max_count)

    def normalize(self, x: Tensor) -> Tensor:  # keeps the dtype
        return ((x - self.mean) / self.std).to(x.dtype)

    def denormalize(self, z: Tensor) -> Tensor:  # the inverse
        return (z * self.std + self.mean).to(z.dtype)


# ---- value distribution: quantiles (functions) ---------------------------------------------------
def quantile_midpoints(num_quantiles: int) -> Tensor:
    """Levels tau_i = (i + 0.5) / K of the quantiles, (K,). Source: Dabney et al. 2018a, lemma 2."""
    return (torch.arange(num_quantiles) + 0.5) / num_quantiles


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, taus: Tensor, kappa: float) -> Tensor:
    """Quantile regression of every prediction on every target sample, (B,).
        u[b, i, j] = targets[b, j] - quantiles[b, i]
        L(u)       = 0.5 u^2 where |u| <= kappa, kappa (|u| - 0.5 kappa) elsewhere
        loss[b]    = mean_i mean_j |tau_i - 1{u < 0}| L(u) / kappa      (kappa = 0: L / kappa = |u|)
    quantiles (B, K), targets (B, J), leading axes broadcast; taus (K,). Divided by kappa as in IQN:
    it meets the pinball loss as kappa -> 0. Mean over i (QR-DQN sums). No gradient through the
    indicator. Source: Dabney et al. 2018a (QR-DQN), eq. 8 to 10; 2018b (IQN), eq. 3."""
    if kappa == 0:
        return pinball_loss(quantiles, targets, taus)
    u = targets[..., None, :] - quantiles[..., None]  # (B, K, J)
    linear = u.abs() - 0.5 * kappa
    size = torch.where(u.abs() < kappa, 0.5 * u.square() / kappa, linear)  # L / kappa
    weight = (taus[:, None] - (u < 0).to(u.dtype)).abs()
    return (weight * size).mean((-2, -1))


def pinball_loss(quantiles: Tensor, targets: Tensor, taus: Tensor) -> Tensor:
    """`quantile_huber_loss` for kappa = 0 without its tensor of all pairs, (B,).
    A quantile q of level tau costs, with n of the J targets x_j below q and S the sum of these,
        mean_j |tau - 1{x_j < q}| |x_j - q| = mean_j (tau (x_j - q) + max(q - x_j, 0))
                                            = tau (mean_j x_j - q) + (n q - S) / J
    A search in the sorted targets gives n, their prefix sums give S."""
    center = targets.mean(-1, keepdim=True)  # subtracted, or large returns would round in the sums
    q = quantiles - center  # (B, K)
    x = (targets - center).sort(-1).values  # (B, J)
    x = x.expand(*q.shape[:-1], -1).contiguous()
    n = torch.searchsorted(x, q.detach().contiguous())  # (B, K)
    prefix_sums = nn.functional.pad(x.cumsum(-1), (1, 0))  # (B, J + 1), of the n lowest at n
    below = (n * q - prefix_sums.gather(-1, n)) / x.shape[-1]
    linear = taus * (x.mean(-1, True) - q)
    return (below + linear).mean(-1)


def clip_quantiles(quantiles: Tensor, old_quantiles: Tensor, clip_delta: float,
                   mode: str) -> Tensor:  # fmt: skip
    """Predictions whose quantiles, or mean alone, moved by at most d = clip_delta, (B, K).
    With m the mean and s = sqrt(variance + 1e-12) over the K quantiles:
        per_quantile:       q_old + clamp(q - q_old, -d, d)
        mean_only:          q + (m_c - m),  m_c = m_old + clamp(m - m_old, -d, d)
        mean_and_variance:  m_c + (q - m) * min(1, 2 s_old / s)
    Each is PPO's value clipping for K = 1 (reference code of Schulman et al. 2017); modes ours."""
    if mode == "per_quantile":
        return old_quantiles + (quantiles - old_quantiles).clamp(-clip_delta, clip_delta)
    mean, old_mean = quantiles.mean(-1, True), old_quantiles.mean(-1, True)
    clipped_mean = old_mean + (mean - old_mean).clamp(-clip_delta, clip_delta)
    if mode == "mean_only":
        return quantiles + (clipped_mean - mean)
    if mode != "mean_and_variance":
        raise ValueError(f"clip_quantiles: unknown mode {mode!r}")
    std = ((quantiles - mean).square().mean(-1, True) + 1e-12).sqrt()
    old_std = ((old_quantiles - old_mean).square().mean(-1, True) + 1e-12).sqrt()
    return clipped_mean + (quantiles - mean) * (2 * old_std / std).clamp(max=1)


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """0.5 (V - R)^2 of values (..., 1) and returns (...); 0 of values (..., 0)."""
    return 0.5 * (values - returns[..., None]).square().sum(-1)


def clip_values(values: Tensor, old_values: Tensor, clip_delta: float) -> Tensor:
    """V_old + clamp(V - V_old, -d, d), PPO's value clipping (reference code of Schulman et al.
    2017)."""
    return old_values + (values - old_values).clamp(-clip_delta, clip_delta)


def clipped_value_loss(loss: Tensor, loss_clipped: Tensor) -> Tensor:
    """max(loss, loss_clipped) per sample, (B,): for each critic alone, ahead of any averaging."""
    return torch.max(loss, loss_clipped)


def cvar_weights(num_quantiles: int, alpha: float, dtype: torch.dtype | None = None) -> Tensor:
    """Weights (K,) of the sorted quantiles in their CVaR; sum 1.
        CVaR_alpha = (1 / alpha) * integral_0^alpha F^-1(tau) dtau
    On the axis x = K tau - 0.5, from -0.5 to K - 0.5, quantile k lies at x = k. F^-1 is linear from
    quantile to quantile; the outer two segments reach on to the ends. Let [a, b] be the part below
    alpha of the segment from k to k + 1, and m = (a + b) / 2 - k. Its mean of F^-1 is the value at
    its middle, (1 - m) q_k + m q_{k+1}, and its share of the integral (b - a) / (alpha K).
    alpha = 1 is the plain mean, not the limit. ValueError for alpha outside [1e-3, 1].
    Source: Rockafellar & Uryasev 2000; the interpolation is ours."""
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"cvar: alpha {alpha} is outside [1e-3, 1]")
    if alpha == 1 or num_quantiles == 1:
        return torch.full((num_quantiles,), 1 / num_quantiles, dtype=dtype)
    edges = torch.arange(num_quantiles).double()  # of the K - 1 segments on the axis x
    edges[0] = -0.5
    edges[-1] = num_quantiles - 0.5
    edges = edges.clamp(max=alpha * num_quantiles - 0.5)
    middle = (edges[1:] + edges[:-1]) / 2
    m = middle - torch.arange(num_quantiles - 1)
    share = edges.diff() / (alpha * num_quantiles)  # (b - a) / (alpha K)
    left = nn.functional.pad(share * (1 - m), (0, 1))  # of q_k
    right = nn.functional.pad(share * m, (1, 0))  # of q_{k+1}
    return (left + right).to(dtype or torch.get_default_dtype())


def cvar(quantiles: Tensor, alpha: float) -> Tensor:
    """Mean of the lower tail of mass alpha, (B, K) -> (B,); see `cvar_weights`."""
    weights = cvar_weights(quantiles.shape[-1], alpha, torch.float64).to(quantiles)
    return (quantiles.sort(-1).values * weights).sum(-1)


def value_at_risk(quantiles: Tensor, alpha: float) -> Tensor:
    """F^-1(alpha) of the quantile function of `cvar_weights`, (B, K) -> (B,); same ValueError."""
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"value_at_risk: alpha {alpha} is outside [1e-3, 1]")
    ordered = quantiles.sort(-1).values
    num_quantiles = quantiles.shape[-1]
    position = alpha * num_quantiles - 0.5  # in steps of the quantile index
    left = max(min(math.floor(position), num_quantiles - 2), 0)
    right = min(left + 1, num_quantiles - 1)
    return ordered[..., left].lerp(ordered[..., right], position - left)


def sr_lambda_targets(rewards: Tensor, next_quantiles: Tensor, terminated: Tensor,
                      truncated: Tensor, gamma: float, gae_lambda: float,
                      generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
    """Samples of the return by sample replacement SR(lambda), (T, N, K).
        X_t,i = r_t + gamma * (1 - terminated_t) * Y_t,i
        Y_t,i = X_{t+1},i with probability lambda, if the episode goes on after t
                theta_i(s'_t) otherwise, and at time limits and at the end of the rollout
    rewards, terminated, truncated (T, N); next_quantiles theta(s'_t) (T, N, K) of true successors.
    The mean over draws is the lambda-return of `gae`. Source: Nam et al. 2021 (GMAC)."""
    T, N, K = next_quantiles.shape
    draws = own(torch.rand((T, WORLD_SIZE * N, K), generator=generator, device=rewards.device))
    replace = (draws >= gae_lambda) | (terminated | truncated)[..., None]
    discount = gamma * (~terminated).to(rewards.dtype)[..., None]
    targets = torch.empty_like(next_quantiles)
    x = next_quantiles[-1]
    for t in reversed(range(T)):
        y = next_quantiles[t].where(replace[t], x)
        x = targets[t] = rewards[t, :, None] + discount[t] * y
    return targets


def cvar_advantages(targets: Tensor, quantiles: Tensor, alpha: float) -> Tensor:
    """Advantage of the policy gradient of CVaR_alpha, (T, N); no gradient.
        nu = VaR_alpha(Z(s_t)),  u(x) = nu + min(x - nu, 0) / alpha
        A_t = mean_j u(X_t,j) - CVaR_alpha(Z(s_t))
    targets X (T, N, J), quantiles of Z (T, N, K). Guards the tail of every state's own returns, not
    that of the start state alone. Source: Rockafellar & Uryasev 2000."""
    targets = targets.detach()
    quantiles = quantiles.detach()
    nu = value_at_risk(quantiles, alpha)[..., None] if alpha < 1 else targets.amax(-1, True)
    gain = nu + (targets - nu).clamp(max=0) / alpha
    return gain.mean(-1) - cvar(quantiles, alpha)


def rescale_head(linear: nn.Linear, old_mean: Tensor, old_std: Tensor, new_mean: Tensor,
                 new_std: Tensor) -> None:  # fmt: skip
    """PopArt: change a linear layer in place so that std * output + mean stays what it was.
        w' = w s / s',    b' = b s / s' + (mu - mu') / s'
    In float64: mu may be a million times s. Source: van Hasselt et al. 2016, eq. 5."""
    ratio = old_std / new_std
    bias = linear.bias.double() * ratio + (old_mean - new_mean) / new_std
    with torch.no_grad():
        linear.weight.copy_(linear.weight.double() * ratio)
        linear.bias.copy_(bias)


class ValueDistribution(nn.Module):
    """What the script asks of a value distribution: quantiles at the levels `support` (K,).
    Critics' `outputs` are K quantiles and, with `value_from` mean_head, V: (..., K or K + 1),
    normalised by `moments`; results are in the task's units. Some arguments serve the sibling."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.moments = RunningMoments((), max_count=2 * args.norm_returns_memory)  # 2 a rollout
        self.register_buffer("support", quantile_midpoints(args.num_quantiles), persistent=False)
        self.num_outputs = args.num_quantiles + (args.value_from == "mean_head")

    def split(self, outputs: Tensor) -> Tensors:  # into (..., K) and (..., 0 or 1)
        return outputs.tensor_split([len(self.support)], -1)

    def decode(self, x: Tensor) -> Tensor:  # float64: returns may be large beside their spread
        return self.moments.denormalize(x.double())

    def quantiles(self, outputs: Tensor) -> Tensor:  # (..., K) in the task's units
        return self.decode(self.split(outputs)[0])

    def mean(self, outputs: Tensor) -> Tensor:  # (...) of the distribution
        return self.quantiles(outputs).mean(-1)

    def value(self, outputs: Tensor) -> Tensor:  # (...) V, by `value_from`
        if self.args.value_from == "distribution":
            return self.mean(outputs)
        return self.decode(outputs[..., -1])

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """Deciles 1, 5 and 9, standard deviation, VaR and CVaR of the distribution, each (...)."""
        quantiles = self.split(outputs)[0].sort(-1).values  # what is sorted is soon sorted again
        levels = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "value_at_risk": self.args.cvar_alpha}
        stats = {name: value_at_risk(quantiles, level) for name, level in levels.items()}
        stats["cvar"] = cvar(quantiles, self.args.cvar_alpha)
        stats = {name: self.decode(x) for name, x in stats.items()}
        std = quantiles.std(-1, correction=0).double()
        return stats | {"std": std * self.moments.std}

    def reduce_twins(self, outputs: Tensor) -> Tensor:
        """Outputs of one critic from those of C, (C, ..., K or K + 1), by `twin_reduce`.
        min: the critic of the smaller V (Fujimoto et al. 2018); mean: pooled quantiles, neighbours
        averaged; min_quantile: elementwise, sorted, which is more pessimistic: mean(min q) <=
        min(mean). A V of its own is the mean or the minimum of the V's."""
        if self.args.twin_reduce == "min" or len(outputs) == 1:
            values = self.value(outputs)
            first = (values[0] <= values[-1])[..., None]
            return torch.where(first, outputs[0], outputs[-1])
        quantiles, values = self.split(outputs)
        if self.args.twin_reduce == "mean":
            pooled = torch.cat((*quantiles,), -1).sort(-1).values  # (..., 2 K)
            averaged = pooled.unflatten(-1, (-1, 2)).mean(-1)
            return torch.cat((averaged, values.mean(0)), -1)
        lowest = quantiles.sort(-1).values.amin(0)
        return torch.cat((lowest, values.amin(0)), -1)

    def sample_returns(self, rewards: Tensor, next_outputs: Tensor, terminated: Tensor,
                       truncated: Tensor, gamma: float, gae_lambda: float) -> Tensors:  # fmt: skip
        """SR(lambda) samples of the return and their weights, both (T, N, J)."""
        theta = self.quantiles(next_outputs)
        x = sr_lambda_targets(rewards, theta, terminated, truncated, gamma, gae_lambda)
        return x, torch.full_like(x, 1 / x.shape[-1])

    def risk_advantages(self, samples: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
        """`cvar_advantages` of equally weighted samples (T, N, J), outputs of s_t."""
        return cvar_advantages(samples, self.quantiles(outputs), self.args.cvar_alpha)

    def encode_targets(self, samples: Tensor, weights: Tensor) -> Tensor:
        """Weighted samples (T, N, J) as `loss` wants them: here as they are, normalised."""
        return self.moments.normalize(samples).float()

    def target_metrics(self, outputs: Tensor, samples: Tensor, weights: Tensor) -> dict:
        """Metrics of this kind alone: the share of neighbouring quantiles in the wrong order."""
        crossing = self.split(outputs)[0].diff(dim=-1) < 0
        return {"value/crossing_fraction": crossing.float().mean().nan_to_num()}  # 0 for K = 1

    def loss(self, outputs: Tensor, targets: Tensor, returns: Tensor, old: Tensor) -> Tensors:
        """Losses of C critics, (C, ...), and 1 where value clipping moves the prediction, else 0.
            quantile regression on targets (..., J)  +  0.5 (V - returns)^2 of a V of its own
        outputs and old (C, ..., K or K + 1): each is clipped around its own, targets never are."""
        args = self.args
        quantiles, values = self.split(outputs)
        loss = quantile_huber_loss(quantiles, targets, self.support, args.kappa)
        v_loss = squared_error(values, returns)
        if args.vf_clip == "none":
            return loss + v_loss, torch.zeros_like(loss)

        old_quantiles, old_values = self.split(old)
        clipped = clip_quantiles(quantiles, old_quantiles, args.vf_clip_coef, args.vf_clip)
        loss_clipped = quantile_huber_loss(clipped, targets, self.support, args.kappa)
        loss = clipped_value_loss(loss, loss_clipped)
        clipped_values = clip_values(values, old_values, args.vf_clip_coef)
        v_loss = clipped_value_loss(v_loss, squared_error(clipped_values, returns))
        moved = torch.cat((clipped - quantiles, clipped_values - values), -1)
        return loss + v_loss, (moved.abs() > 1e-6).any(-1).float()

    def move_statistics(self, heads: nn.ModuleList, outputs: Tensor, returns: Tensor) -> Tensors:
        """Take in returns and rescale the heads in the same moment, so that decoded predictions
        stay (PopArt). Gives `outputs` in the new units, as predictions and as old values."""
        old_mean = self.moments.mean
        old_std = self.moments.std
        decoded = self.decode(outputs)
        if self.args.norm_returns:
            self.moments.update(returns)
        for head in heads:
            rescale_head(head[-1], old_mean, old_std, self.moments.mean, self.moments.std)
        moved = self.moments.normalize(decoded).to(outputs)
        return moved, moved


# ---- end of value distribution -------------------------------------------------------------------


# ----------------------------------------------------------------------------------------- networks
def layer_init(layer: nn.Module, std: float = math.sqrt(2), bias_const: float = 0.0) -> nn.Module:
    """Orthogonal weights of gain `std`, constant biases. Ahead of the values they are above 0: an
    observation that never changes, normalised 0, would leave all units of a ReLU network dead."""
    for name, parameter in layer.named_parameters():  # an LSTM has four
        if "bias" in name:
            nn.init.constant_(parameter, bias_const)
        else:
            nn.init.orthogonal_(parameter, std)
    return layer


class Convolutions(nn.Module):
    """Images (..., C, H, W), divided by their bound, to features (..., F). Sides of 36 and more:
    the layers of Mnih et al. 2015; smaller grids: that of Young & Tian 2019 (MinAtar)."""

    def __init__(self, space: Box, activation: type[nn.Module]) -> None:
        super().__init__()
        channels, *sides = space.shape
        layers = [(16, 3, 1)]  # channels, kernel, stride
        self.memory_format = torch.contiguous_format  # the faster one on CPUs
        if min(sides) >= 36:
            layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
            self.memory_format = torch.channels_last
        self.scale = 1 / float(space.high.max())
        self.layers = nn.Sequential()
        for size, *geometry in layers:
            self.layers.append(layer_init(nn.Conv2d(channels, size, *geometry)))
            self.layers.append(activation())
            channels = size
        nn.init.constant_(self.layers[0].bias, 0.1)
        self.num_features = self.layers(torch.zeros(1, *space.shape)).numel()

    def forward(self, images: Tensor) -> Tensor:
        parts = images.flatten(0, -4).split(256)  # as floats they take four times the memory
        features = [self.see(part) for part in parts]
        joined = torch.cat(features) if len(parts) > 1 else features[0]
        return joined.unflatten(0, images.shape[:-3])

    def see(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, F)
        pixels = images.contiguous(memory_format=self.memory_format) * self.scale  # float32
        return self.layers(pixels).flatten(1)


class ActionDistribution(nn.Module):
    """Distribution of actions given the actor's outputs, for every supported action space.
    Box: diagonal Gaussian, log-std independent of the state; only what the environment receives is
    clipped. Params: mean and log-std (..., 2, A). Discrete, MultiDiscrete, MultiBinary: P
    categorical parts. Params: log-probabilities (..., P, largest part), smaller parts padded with
    -1e9. Parts and dimensions are independent: their log-probabilities, entropies and KLs add."""

    def __init__(self, space: gym.Space, log_std_init: float) -> None:
        super().__init__()
        self.space = space
        self.continuous = isinstance(space, Box) and np.issubdtype(space.dtype, np.floating)
        if self.continuous:
            self.num_outputs = math.prod(space.shape)
            self.log_std = nn.Parameter(torch.full((self.num_outputs,), log_std_init))
            return
        known = isinstance(space, Discrete | MultiDiscrete | MultiBinary)
        require(known, f"--env-id: actions of {space} are not supported, only floats and discrete")
        size = 2 if isinstance(space, MultiBinary) else getattr(space, "n", None)
        sizes = np.full(space.shape, getattr(space, "nvec", size))  # of the parts
        sizes = torch.as_tensor(sizes).reshape(-1, 1)
        padding = -1e9 * (torch.arange(int(sizes.max())) >= sizes)  # (P, largest part)
        self.register_buffer("padding", padding, persistent=False)
        self.num_outputs = padding.numel()

    def forward(self, outputs: Tensor) -> Tensor:  # the actor's (..., num_outputs) -> params
        if self.continuous:
            return torch.stack((outputs, self.log_std.expand_as(outputs)), -2)
        shape = (*outputs.shape[:-1], *self.padding.shape)
        logits = outputs.reshape(shape) + self.padding
        return logits.log_softmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:  # (...), of a density for Box
        if self.continuous:
            mean, log_std = params.unbind(-2)
            noise = (actions - mean) * (-log_std).exp()
            densities = -0.5 * noise.square() - log_std - HALF_LOG_2PI
            return densities.sum(-1)
        chosen = params.gather(-1, actions[..., None])
        return chosen.sum((-2, -1))

    def entropy(self, params: Tensor) -> Tensor:  # (...), nats
        if self.continuous:
            log_std = params[..., 1, :]
            return (log_std + HALF_LOG_2PI + 0.5).sum(-1)
        return -(params.exp() * params).sum((-2, -1))

    def kl(self, old: Tensor, params: Tensor) -> Tensor:  # (...), KL(old || new), nats
        if self.continuous:
            old_mean, old_log_std = old.unbind(-2)
            mean, log_std = params.unbind(-2)
            difference = ((old_mean - mean) * (-log_std).exp()).square()
            log_ratio = 2 * (old_log_std - log_std)
            return 0.5 * (log_ratio.exp() - 1 - log_ratio + difference).sum(-1)
        return (old.exp() * (old - params)).sum((-2, -1))

    def noise(self, *size: int) -> Tensor:
        """What makes samples of so many modes: standard Gaussian, or of Gumbel's distribution."""
        if self.continuous:
            return torch.randn(*size, self.num_outputs, device=self.log_std.device)
        exponential = torch.empty(*size, *self.padding.shape, device=self.padding.device)
        return -exponential.exponential_().log()

    def sample(self, params: Tensor, noise: Tensor | float) -> Tensor:
        """A random action, (..., P) or (..., A), by `noise`; the mode where that is 0."""
        if self.continuous:
            mean, log_std = params.unbind(-2)
            return mean + log_std.exp() * noise
        return (params + noise).argmax(-1)

    def to_env(self, actions: Tensor) -> np.ndarray:  # clipped, or counted from `start`
        array = actions.cpu().numpy().reshape(-1, *self.space.shape)
        if self.continuous:
            return array.clip(self.space.low, self.space.high).astype(self.space.dtype)
        return (array + getattr(self.space, "start", 0)).astype(self.space.dtype)

    def project(self) -> None:  # after a step; a clamp in `forward` would lose the gradient
        if self.continuous:
            self.log_std.data.clamp_(*LOG_STD_RANGE)


def unroll_lstm(lstm: nn.LSTM, inputs: Tensor, state: Tensors, episode_start: Tensor) -> tuple:
    """Run a one-layer LSTM over a rollout whose episodes begin anywhere, in one fused call.
    inputs (T, N, F); state (h, c), each (1, N, H), before step 0; episode_start (T, N) bool: the
    state is zero when a step opens an episode. Returns outputs (T, N, H) and the state at the end.
    An environment gets a column of rows: its T steps, and a reset row ahead of each step that opens
    an episode. Two further inputs, 0 at steps, mark the other rows and drive the gates to exactly 0
    or 1, since sigmoid(-1e4) = 0 and sigmoid(1e4) = 1 in floating point:
        reset row (1, 0): input gate 0, forget gate 0: c = 0, h = 0, and no gradient passes
        rest row  (0, 1): input gate 0, forget gate 1: c stays; fills columns with fewer episodes"""
    if not episode_start.any():
        return lstm(inputs, state)
    T, N, F = inputs.shape
    # where each step goes: row t plus the reset rows so far; rows and columns flattened to one axis
    row = torch.arange(T, device=inputs.device)[:, None] + episode_start.cumsum(0)
    position = row * N + torch.arange(N, device=inputs.device)  # (T, N)
    steps = position.flatten()
    num_rows = int(row[-1].max()) + 1
    # the marks: rest everywhere, nothing at steps, reset one row ahead of an opening step
    marks = inputs.new_tensor([0, 1]).repeat(num_rows * N, 1)
    marks[steps] = 0
    marks[position[episode_start] - N] = inputs.new_tensor([1, 0])
    rows = inputs.new_zeros(num_rows * N, F).index_copy(0, steps, inputs.flatten(0, 1))
    rows = torch.cat((rows, marks), 1).view(num_rows, N, F + 2)
    # input weights of the marks, for the gates i, f, g, o in torch's order
    gates = inputs.new_tensor([[-1e4, -1e4], [-1e4, 1e4], [0, 0], [0, 0]])
    gates = gates.repeat_interleave(lstm.hidden_size, 0)
    input_weight = torch.cat((lstm.weight_ih_l0, gates), 1)
    weights = (input_weight, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0)
    # biases, one layer, no dropout, training, one direction, time first; rest rows keep c, not h
    outputs, _, c = torch.lstm(rows, state, weights, True, 1, 0.0, True, False, False)
    outputs = outputs.flatten(0, 1).index_select(0, steps).view(T, N, -1)
    return outputs, (outputs[-1:], c)


def make_encoder(space: Box, args: Args) -> nn.Sequential:
    """Observations to inputs of the LSTM (..., H), by a hidden layer, behind convolutions."""
    activation = ACTIVATIONS[args.activation]
    if len(space.shape) == 3:
        convolutions = Convolutions(space, activation)
        last = layer_init(nn.Linear(convolutions.num_features, args.hidden_size))
        return nn.Sequential(convolutions, last, activation())
    first = layer_init(nn.Linear(space.shape[0], args.hidden_size))
    return nn.Sequential(first, activation())


class Body(nn.Module):
    """Observations to features, by an encoder and an LSTM. A state is h and c, (2, N, H)."""

    def __init__(self, space: Box, args: Args) -> None:
        super().__init__()
        self.encoder = make_encoder(space, args)
        self.lstm = layer_init(nn.LSTM(args.hidden_size, args.lstm_hidden_size), 1.0)

    def forward(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:
        """Features (L, M, H) of sequences (L, M, D), from the states ahead of them."""
        inputs = self.encoder(obs)
        return unroll_lstm(self.lstm, inputs, state.split(1), episode_start)[0]

    def step(self, obs: Tensor, state: Tensor) -> Tensors:
        """Features (N, H) of one step (N, D), and the next state."""
        weights = self.lstm.all_weights[0]
        h, c = torch.lstm_cell(self.encoder(obs), (*state,), *weights)
        return h, torch.stack((h, c))


class Agent(nn.Module):
    """Actor, critics and the statistics that normalise what they see and predict.
    Observations are normalised, but those of `act` and `normalize_obs` are raw."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        env = make_env(args)  # for its spaces
        env.close()
        space = env.observation_space
        self.args = args
        self.obs_shape = space.shape  # (D,), or (C, H, W) of images
        self.sees_images = len(space.shape) == 3
        self.action_dist = ActionDistribution(env.action_space, args.log_std_init)
        self.value_dist = ValueDistribution(args)
        self.obs_moments = RunningMoments(() if self.sees_images else space.shape)
        self.adv_moments = RunningMoments((), max_count=2 * args.norm_adv_memory)  # 2 a rollout

        self.actor_body = Body(space, args)
        self.critic_body = Body(space, args)
        actor_head = nn.Linear(args.lstm_hidden_size, self.action_dist.num_outputs)
        self.actor_head = layer_init(actor_head, 0.01)
        self.critic_heads = nn.ModuleList()
        for _ in range(args.num_critics):
            hidden = nn.Linear(args.lstm_hidden_size, args.hidden_size)
            hidden = layer_init(hidden, bias_const=0.1)
            output = layer_init(nn.Linear(args.hidden_size, self.value_dist.num_outputs), 0.1)
            self.critic_heads.append(nn.Sequential(hidden, ACTIVATIONS[args.activation](), output))
        self.to("cuda" if args.cuda else "cpu")

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters of the actor and of the critics."""
        actor = nn.ModuleList((self.action_dist, self.actor_body, self.actor_head))
        critics = nn.ModuleList((self.critic_body, self.critic_heads))
        return [*actor.parameters()], [*critics.parameters()]

    def scale_advantages(self, advantages: Tensor) -> Tensor:
        """Centred advantages over the larger of their std and its running value. Where all returns
        are alike the std is rounding noise, which its own std would blow up to 1."""
        std = advantages.std(correction=0)
        eps = torch.zeros_like(std)
        if self.args.norm_adv_memory:
            self.adv_moments.update(torch.stack((-std, std)))
            eps = (self.adv_moments.std - std).clamp(min=0)
        return normalize_advantages(advantages, eps + 1e-30)  # whatever the task's units

    @property
    def device(self) -> torch.device:
        return self.obs_moments.mean.device

    def obs_normalizer(self) -> Callable[[Tensor], Tensor]:
        """Raw observations -> what the networks see, by the present statistics, rounded once.
        Images stay what they are: the networks scale their pixels."""
        if self.sees_images or not self.args.norm_obs:
            return lambda obs: obs
        mean = self.obs_moments.mean.float()
        scale = (1 / self.obs_moments.std).float()
        return lambda obs: ((obs - mean) * scale).clamp(-10, 10)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        return self.obs_normalizer()(obs)

    def update_obs_moments(self, obs: Tensor) -> None:  # raw
        if not self.sees_images:
            self.obs_moments.update(obs, parts=WORLD_SIZE)

    def initial_state(self, num_envs: int) -> Tensor:  # (2, N, H), of actor or critic
        return torch.zeros(2, num_envs, self.args.lstm_hidden_size, device=self.device)

    def policy_params(self, features: Tensor) -> Tensor:  # (..., H) -> action distributions
        return self.action_dist(self.actor_head(features))

    def policy_params_step(self, obs: Tensor, state: Tensor) -> Tensors:
        """The same for observations (N, D) of one step, and the next state."""
        features, state = self.actor_body.step(obs, state)
        return self.policy_params(features), state

    def value_outputs(self, features: Tensor) -> Tensor:  # (..., H) -> (C, ..., K), of all critics
        return torch.stack([head(features) for head in self.critic_heads])

    @torch.no_grad()
    def act(self, obs: np.ndarray, state: Tensor | None = None,
            deterministic: bool = True) -> tuple[np.ndarray, Tensor]:  # fmt: skip
        """Action(s) for `env.step` and the next state; obs (D,) or (N, D) as `make_env` gives them.
        state None opens an episode; deterministic: the mode of the policy, otherwise a sample."""
        alone = np.ndim(obs) == len(self.obs_shape)
        rows = np.reshape(obs, (-1, *self.obs_shape))
        batch = torch.as_tensor(rows, device=self.device).float()
        state = self.initial_state(len(batch)) if state is None else state
        params, state = self.policy_params_step(self.normalize_obs(batch), state)
        noise = 0.0 if deterministic else self.action_dist.noise(len(batch))
        actions = self.action_dist.to_env(self.action_dist.sample(params, noise))
        return (actions[0] if alone else actions), state


# ------------------------------------------------------------------------- environments and rollout
def channel_axis(space: gym.Space) -> int | None:
    """Where an image has its channels, 0 or 2, or would have them; None for what is no image.
    An image is a Box of two or three dimensions whose numbers are bounded alike, by 65,535 at most.
    Two equal sides are its height and width; otherwise channels are fewer than pixels in a row."""
    if not isinstance(space, Box) or len(space.shape) not in (2, 3):
        return None
    a, b, c = (*space.shape, 1)[:3]
    first = (b == c != a) or (a != b and a < c)
    alike = space.low.min() == space.low.max() and space.high.min() == space.high.max()
    bounded = space.is_bounded() and 0 < space.high.max() <= 65_535
    large = min((b, c) if first else (a, b)) >= 3  # as the kernels of `Convolutions`
    if not (alike and bounded and large):
        return None
    return 0 if first else 2


def see_images(env: gym.Env, args: Args) -> gym.Env:
    """Images (C, H, W): bytes, or float32 where they have fractions or larger numbers."""
    require(not args.masked_obs, f"--masked-obs {args.masked_obs}: {args.env_id} shows images")
    space = env.observation_space
    axis = channel_axis(space)
    shape = (*space.shape, 1)[:3]
    dtype = np.uint8 if space.dtype in (np.uint8, np.bool_) else np.float32

    def channels_first(image: np.ndarray) -> np.ndarray:
        image = np.asarray(image, dtype).reshape(shape)
        return np.moveaxis(image, axis, 0)

    seen = Box(channels_first(space.low), channels_first(space.high), dtype=dtype)
    return gym.wrappers.TransformObservation(env, channels_first, seen)


def unfit_part(space: gym.Space, name: str = "observation") -> str:
    """Name and space of the first part that has no place in a vector, "" where all have."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.items() if isinstance(space, gym.spaces.Dict) else enumerate(space)
        found = [unfit_part(part, f"{name}[{key!r}]") for key, part in parts]
        return next(filter(None, found), "")
    fit = isinstance(space, Discrete | MultiDiscrete | MultiBinary)
    if isinstance(space, Box):
        pixels = space.dtype == np.uint8 and len(space.shape) > 1
        fit = not pixels and (channel_axis(space) is None or len(space.shape) == 2)
    return "" if fit else f"{name} is {space}"


def see_vectors(env: gym.Env, args: Args, hidden: tuple[int, ...]) -> gym.Env:
    """Flat float32 observations, masked and without the hidden entries."""
    space = env.observation_space
    part = unfit_part(space)
    remedy = "which has no place in a vector; wrap the task in a module of yours, module:id"
    require(not part, f"--env-id {args.env_id}: {part}, {remedy}")
    if not isinstance(space, Box) or len(space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    keep = np.ones(env.observation_space.shape, np.float32)
    for index in (*args.masked_obs, *hidden):
        require(0 <= index < len(keep), f"--masked-obs {index}: must be in 0..{len(keep) - 1}")
        keep[index] = 0
    seen = Box(-np.inf, np.inf, keep.shape, np.float32)
    transform = gym.wrappers.TransformObservation
    return transform(env, lambda obs: np.asarray(obs, np.float32) * keep, seen)


def make_env(args: Args, **options: Any) -> gym.Env:
    """One environment: images, channels first, or float32 vectors, masked; episode statistics.
    `options` are gymnasium's. Atari games come as Machado et al. 2018 ask, but with the actions
    that each game knows. Raises `UsageError` for bad ids, packages, spaces and masks."""
    hidden = VELOCITIES.get(args.env_id.split("-")[0], ())
    name = args.env_id.replace("NoVel-", "-") if hidden else args.env_id
    if args.is_atari:  # sticky actions; a lost life does not end the episode
        options |= {"frameskip": 1, "repeat_action_probability": 0.25, "max_episode_steps": 108_000}
    try:
        env = gym.make(name, disable_env_checker=True, **options)
        if args.is_atari:
            env = gym.wrappers.AtariPreprocessing(env, noop_max=0)
            env = gym.wrappers.FrameStackObservation(env, 4)
        if channel_axis(env.observation_space) is None:
            env = see_vectors(env, args, hidden)
        else:
            env = see_images(env, args)
    except UsageError:
        raise
    except Exception as error:  # of gymnasium, a missing package, the task itself
        raise UsageError(f"--env-id {args.env_id}: {str(error) or repr(error)}") from error
    return gym.wrappers.RecordEpisodeStatistics(env, stats_key=STATS)  # a task may say "episode"


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """`num_envs` environments stepped together; one that ends is reset within the same step."""
    mode = gym.vector.AutoresetMode.SAME_STEP
    makers = [lambda: make_env(args)] * num_envs
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=mode)


def open_episodes(envs: gym.vector.VectorEnv, agent: Agent, seed: int) -> Carry:
    """Reset all environments, the first one with `seed`, the next with `seed` + 1 and so on."""
    obs, _ = envs.reset(seed=seed)
    check_finite(obs, obs, np.zeros(len(obs)), "the first reset")
    state = agent.initial_state(len(obs))
    return Carry(obs.copy(), np.ones(len(obs), bool), state, state)


def check_finite(next_obs: np.ndarray, current: np.ndarray, rewards: np.ndarray,
                 when: str) -> None:  # fmt: skip
    """Raise RuntimeError that names environment and moment unless all, (N, ...), are finite."""
    valid = np.isfinite(rewards)
    for x in (current, next_obs):
        valid &= np.isfinite(x).reshape(len(x), -1).all(1)
    if not valid.all():
        i = int(valid.argmin())
        bad = f"not finite: observation {next_obs[i]}, then {current[i]}, reward {rewards[i]}"
        raise RuntimeError(f"{bad}, environment {i}, {when}; check the task")


def collect_rollout(envs: gym.vector.VectorEnv, agent: Agent, carry: Carry,
                    args: Args) -> tuple[Rollout, Carry]:  # fmt: skip
    """Act for `num_steps` steps. Only the actor runs; no statistics move.
    Raises RuntimeError for observations and rewards that are not finite."""
    size = (args.num_steps, args.local_envs)
    obs, next_obs = np.empty((2, *size, *carry.obs.shape[1:]), carry.obs.dtype)
    rewards = np.empty(size)
    terminated, truncated, episode_start = np.empty((3, *size), bool)
    actions, params, states, episodes = [], [], [], []

    current, starts, state, critic_state = carry  # `current` is acted on next
    normalize = agent.obs_normalizer()
    device = agent.device
    with torch.inference_mode():
        noise = own(agent.action_dist.noise(args.num_steps, args.num_envs))
        for t in range(args.num_steps):
            if t % args.sequence_length == 0:
                states.append(state)
            obs[t] = current
            episode_start[t] = starts
            seen = normalize(torch.as_tensor(obs[t], device=device))
            param, state = agent.policy_params_step(seen, state)
            action = agent.action_dist.sample(param, noise[t])
            params.append(param)
            actions.append(action)

            step = envs.step(agent.action_dist.to_env(action))
            current, rewards[t], terminated[t], truncated[t], info = step
            next_obs[t] = current
            ended = terminated[t] | truncated[t]
            if ended.any():  # `current` already belongs to the next episode there
                next_obs[t, ended] = np.stack(info["final_obs"][ended])
                state = state * ~torch.as_tensor(ended, device=device)[:, None]
                stats = info["final_info"][STATS]
                for i in ended.nonzero()[0]:
                    episodes.append((t, float(stats["r"][i]), int(stats["l"][i])))
            starts = ended
            check_finite(next_obs[t], current, rewards[t], f"step {t} of the rollout")

    if args.is_atari:
        rewards = rewards.clip(-1, 1)  # episodes' returns are of what was paid
    episodes = [one for part in of_all(episodes) for one in part]
    episodes.sort(key=lambda one: one[0])  # by the step of their end
    to_device = partial(torch.as_tensor, device=device)  # one transfer for all steps
    rollout = Rollout(
        obs=to_device(obs), next_obs=to_device(next_obs), episode_start=to_device(episode_start),
        actions=torch.stack(actions), params=torch.stack(params), rewards=to_device(rewards),
        terminated=to_device(terminated), truncated=to_device(truncated),
        actor_state=torch.stack(states), episodes=episodes,
    )  # fmt: skip
    return rollout, Carry(current.copy(), starts, state, critic_state)  # critics: still at step 0


# ------------------------------------------------------------------------------------------- batch
def run_critics(agent: Agent, rollout: Rollout, obs: Tensor, next_obs: Tensor, state: Tensor,
                args: Args) -> Tensors:  # fmt: skip
    """Outputs of all critics for every s_t and every true successor s'_t.
    obs, next_obs (T, N, D) normalised; state (2, N, H) of the critics' LSTM ahead of step 0.
    Returns both outputs (C, T, N, K), the states (T / L, 2, N, H) ahead of each training sequence,
    and the state at the end. The pass is cut after time limits and training sequences; there a copy
    of the state takes one more step, to the final observation (Pardo et al. 2018). Successors of
    terminated steps are not to be used."""
    body = agent.critic_body
    limits = (rollout.truncated & ~rollout.terminated).any(1).tolist()
    steps = range(1, args.num_steps + 1)
    cuts = [t for t in steps if limits[t - 1] or t % args.sequence_length == 0]
    features, next_features, states = [], [], []
    inputs = body.encoder(obs)

    for first, end in pairwise([0, *cuts]):
        if first % args.sequence_length == 0:
            states.append(state)
        start = rollout.episode_start[first:end]
        part, after = unroll_lstm(body.lstm, inputs[first:end], state.split(1), start)
        state = torch.cat(after)
        successor, _ = body.step(next_obs[end - 1], state)
        features.append(part)
        next_features += [part[1:], successor[None]]
    outputs = agent.value_outputs(torch.cat(features))
    return outputs, agent.value_outputs(torch.cat(next_features)), torch.stack(states), state


def opening_samples(rollout: Rollout, args: Args) -> Tensor:
    """What the return statistics take in ahead of everything, (2,): mean -+ std of the discounted
    rewards of the first rollout. Untrained values know nothing of the task's units."""
    ends = (rollout.terminated, rollout.truncated)
    zero = torch.zeros_like(rollout.rewards)
    _, sums = gae(rollout.rewards, zero, zero, *ends, args.gamma, 1.0)
    sums = joined(sums)
    mean = sums.mean()
    std = sums.std(correction=0)
    return torch.stack((mean - std, mean + std))


def statistics_samples(samples: Tensor, weights: Tensor, twins: Tensor) -> Tensor:
    """What the return statistics take in of a rollout, (2,): mean -+ scale of its targets.
        scale = max(std of the targets, root mean square of V - mean)
    from targets (T, N, J) and values of each critic (C, T, N). With targets alone, constant returns
    would shrink the scale to its floor, thousands of which a critic may be off."""
    mean = average((weights * samples).sum(-1).mean())
    variance = average((weights * (samples - mean).square()).sum(-1).mean())
    errors = average((twins - mean).square().mean())
    scale = torch.maximum(variance, errors).sqrt()
    return torch.stack((mean - scale, mean + scale))


def critic_metrics(dist: ValueDistribution, rollout: Rollout, twins: Tensor, reduced: Tensor,
                   next_reduced: Tensor, values: Tensor, returns: Tensor) -> dict:  # fmt: skip
    """What the critics predicted for a rollout against what came, before the update.
    twins (C, T, N) values of each critic; reduced outputs of s_t and s'_t (T, N, ...); values and
    lambda-returns (T, N)."""
    stats = dist.describe(reduced)
    deciles = torch.stack((stats["p10"], stats["p50"], stats["p90"]))
    ends = (rollout.terminated, rollout.truncated)
    samples, weights = dist.sample_returns(
        rollout.rewards, next_reduced, *ends, dist.args.gamma, gae_lambda=1.0
    )
    below = samples < stats["value_at_risk"][..., None]
    all_values, all_returns = joined(values), joined(returns)

    return {
        "value/p10": deciles[0].mean(), "value/p50": deciles[1].mean(),
        "value/p90": deciles[2].mean(), "value/predicted_returns": deciles,
        "value/realised_returns": (weights * samples).sum(-1),  # predicted where they are cut
        "value/bias": (values - returns).mean(), "value/std_target": all_returns.std(correction=0),
        "value/std_predicted": stats["std"].mean(),
        "value/distribution_gap": (dist.mean(reduced) - values).abs().mean(),
        "losses/explained_variance": explained_variance(all_values, all_returns),
        "cvar/predicted": stats["cvar"].mean(), "cvar/weight": dist.args.cvar_weight,
        "cvar/coverage": (weights * below).sum(-1).mean(),
        "twin/abs_difference": (twins[0] - twins[-1]).abs().mean(),
        "twin/critic1_is_min": (twins[0] <= twins[-1]).float().mean(),
        "data/truncated_fraction": rollout.truncated.float().mean(),
    }  # fmt: skip


@torch.no_grad()
def prepare_batch(agent: Agent, rollout: Rollout, carry: Carry,
                  args: Args) -> tuple[Batch, Carry, dict]:  # fmt: skip
    """Values, advantages and targets of a rollout; return statistics and value heads move.
    The order matters: decode with the old statistics, take in the targets, rescale the heads in the
    same moment, express old values in the new units (van Hasselt et al. 2016).
    Returns the batch, the carry with the critics' state at the end, and metrics."""
    dist = agent.value_dist
    if args.norm_returns and dist.moments.count == 0:
        dist.moments.update(opening_samples(rollout, args))

    # 1. distributions of the return from every s_t and every true successor s'_t
    obs, next_obs = agent.normalize_obs(rollout.obs), agent.normalize_obs(rollout.next_obs)
    outputs, next_outputs, critic_states, critic_state = run_critics(
        agent, rollout, obs, next_obs, carry.critic_state, args
    )
    reduced, next_reduced = dist.reduce_twins(outputs), dist.reduce_twins(next_outputs)
    values, next_values = dist.value(reduced), dist.value(next_reduced)  # (T, N)
    twins = dist.value(outputs)  # (C, T, N)

    # 2. advantages and targets, in the task's units
    ends = (rollout.terminated, rollout.truncated)
    raw, returns = gae(rollout.rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    samples, weights = returns[..., None], torch.ones_like(returns[..., None])  # (T, N, J = 1)
    if args.value_target == "sr_lambda":
        samples, weights = dist.sample_returns(
            rollout.rewards, next_reduced, *ends, args.gamma, args.gae_lambda
        )
    if args.cvar_weight > 0 and args.cvar_alpha < 1:
        raw = raw.lerp(dist.risk_advantages(samples, weights, reduced), args.cvar_weight)
    raw = joined(raw)
    advantages = agent.scale_advantages(raw) if args.norm_adv else raw
    metrics = critic_metrics(dist, rollout, twins, reduced, next_reduced, values, returns)

    # 3. the return statistics move, and the value heads with them
    taken_in = statistics_samples(samples, weights, twins)
    outputs, old_values = dist.move_statistics(agent.critic_heads, outputs, taken_in)
    metrics |= dist.target_metrics(outputs, samples, weights) | {
        "adv/mean_raw": raw.mean(), "adv/std_raw": raw.std(correction=0),
        "adv/abs_max": advantages.abs().max(),
        "norm/return_mean": dist.moments.mean, "norm/return_std": dist.moments.std,
        "norm/value_shift": (dist.value(outputs) - twins).abs().mean(),  # rounding, with PopArt
    }  # fmt: skip

    # 4. the batch: time is cut into training sequences
    def cut(x: Tensor) -> Tensor:  # (T, N, ...) -> (L, M, ...)
        parts = x.unflatten(0, (-1, args.sequence_length))  # (T / L, L, N, ...)
        return parts.transpose(0, 1).flatten(1, 2)

    advantages = own(advantages).float()
    batch = Batch(
        obs=cut(obs), episode_start=cut(rollout.episode_start), advantages=cut(advantages),
        actor_state=rollout.actor_state.transpose(0, 1).flatten(1, 2),  # (2, M, H)
        critic_state=critic_states.transpose(0, 1).flatten(1, 2),
        actions=cut(rollout.actions), params=cut(rollout.params),
        log_probs=cut(agent.action_dist.log_prob(rollout.params, rollout.actions)),
        targets=cut(dist.encode_targets(samples, weights)),
        returns=cut(dist.moments.normalize(returns).float()),
        old_values=cut(old_values.movedim(0, 2).float()),
    )  # fmt: skip
    return batch, carry._replace(critic_state=critic_state), metrics


# ------------------------------------------------------------------------------------------- update
def minibatches(batch: Batch, args: Args) -> Iterator[Batch]:
    """In every epoch, random parts of the training sequences (axis 1), each sequence once."""
    orders = [torch.randperm(batch.obs.shape[1]) for _ in range(args.update_epochs)]
    for order in torch.stack(orders).to(batch.obs.device):
        for chosen in order.chunk(args.num_minibatches):
            yield Batch(*(x.index_select(1, chosen) for x in batch))


def losses(agent: Agent, mb: Batch, args: Args, ent_coef: float) -> tuple[Tensor, dict]:
    """The loss of a minibatch, a scalar with its graph, and its metrics, without.
        clipped policy loss + entropy loss + vf_coef * mean over critics of their value losses
    Metrics are scalars or one number a row: `update` takes their means, of all minibatches at once.
    A pure function of parameters and minibatch. Source: Schulman et al. 2017, eq. 9."""
    actor_features = agent.actor_body(mb.obs, mb.actor_state, mb.episode_start)
    critic_features = agent.critic_body(mb.obs, mb.critic_state, mb.episode_start)

    params = agent.policy_params(actor_features)
    log_probs = agent.action_dist.log_prob(params, mb.actions)
    log_ratio = (log_probs - mb.log_probs).flatten()  # (B,), B = L * M
    advantages = mb.advantages.flatten()
    entropy = agent.action_dist.entropy(params)
    pg_loss, approx_kl, clipfrac = clipped_policy_loss(log_ratio, advantages, args.clip_coef)
    h_loss = entropy_loss(entropy, ent_coef, args.min_entropy, args.min_entropy_penalty)

    outputs = agent.value_outputs(critic_features)  # (C, L, M, K)
    old_values = mb.old_values.movedim(2, 0)
    value_losses, clipped = agent.value_dist.loss(outputs, mb.targets, mb.returns, old_values)
    loss = pg_loss + h_loss + args.vf_coef * value_losses.mean()

    metrics = {
        "losses/policy_loss": pg_loss, "losses/value_loss": value_losses,
        "losses/entropy": entropy, "losses/approx_kl": approx_kl, "losses/clipfrac": clipfrac,
        "twin/loss_1": value_losses[0], "twin/loss_2": value_losses[-1],
        "value/clip_fraction": clipped, "policy/log_ratio": log_ratio,
        "policy/kl_exact": agent.action_dist.kl(mb.params, params.detach()),
    }  # fmt: skip
    return loss, {tag: x.detach() for tag, x in metrics.items()}


def one_vector(agent: Agent) -> nn.Parameter:
    """All parameters, the actor's ahead of the critics', as a vector whose parts they are from now
    on: an optimizer's step costs time for each of its parameters, however small."""
    actor, critics = agent.parts()
    parameters = [*actor, *critics]
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    nn.utils.vector_to_parameters(vector, parameters)
    return vector


@cache
def compiled_losses() -> Callable:
    """`losses` by torch.compile, once in a process; LSTMs are as fast without it."""
    Body.forward = torch.compiler.disable(Body.forward)
    return torch.compile(losses)


def update(agent: Agent, optimizer: optim.Adam, batch: Batch, args: Args, ent_coef: float) -> dict:
    """Train on one rollout for `update_epochs` epochs, fewer where the policy moves too far.
    The exact KL(old || new) of a minibatch is tested ahead of its step; the first one larger than
    `target_kl` ends the update. Gives means over the minibatches evaluated, that one included, and
    of `grad/*` over the steps taken. The optimizer's one parameter is `one_vector` of the agent.
    Raises RuntimeError for what is not finite."""
    actor, critics = agent.parts()
    actor_size = sum(p.numel() for p in actor)
    [vector] = optimizer.param_groups[0]["params"]
    evaluated = []  # metrics of each minibatch
    norms = []  # of the gradients of actor and critics, at each step taken
    loss_of = compiled_losses() if args.compile else losses
    for mb in minibatches(batch, args):
        loss, metrics = loss_of(agent, mb, args, ent_coef)
        evaluated.append(metrics)
        gradients = torch.autograd.grad(loss, [*actor, *critics])
        told = (loss.detach(), metrics["policy/kl_exact"].mean())
        flat = average(torch.cat([x.flatten() for x in (*gradients, *told)]))
        vector.grad, told = flat.split([len(flat) - 2, 2])
        parts = vector.grad.tensor_split([actor_size])
        numbers = [*told, *(part.norm() for part in parts)]
        loss, kl, *norms_of_parts = torch.stack(numbers).tolist()  # one transfer
        if args.target_kl is not None and kl > args.target_kl:
            break

        norms.append(norms_of_parts)
        norm = math.hypot(*norms_of_parts)
        if RANK == 0 and not math.isfinite(loss + norm):
            what = f"loss {loss:g}, gradient {norm:g} of minibatch {len(norms) - 1} of the update"
            raise RuntimeError(f"{what}: not finite; try a smaller --learning-rate")

        vector.grad *= min(1, args.max_grad_norm / (norm + 1e-6))
        optimizer.step()
        agent.action_dist.project()

    columns = {tag: torch.stack([row[tag] for row in evaluated]) for tag in evaluated[0]}
    ratio = joined(columns.pop("policy/log_ratio").exp())
    grad_norms = torch.tensor(norms or [[0.0, 0.0]])
    columns |= {
        "policy/kl_max": average(columns["policy/kl_exact"].flatten(1).mean(1)).max(),
        "policy/ratio_mean": ratio, "policy/ratio_std": ratio.std(1, correction=0),
        "policy/ratio_first_minibatch_error": (ratio[0] - 1).abs().max(),  # 0 but for rounding
        "grad/norm": grad_norms.norm(dim=1),
        "grad/actor": grad_norms[:, 0], "grad/critic": grad_norms[:, 1],
    }  # fmt: skip
    means = {tag: float(x.mean()) for tag, x in columns.items()}
    means["policy/epochs_done"] = len(norms) / args.num_minibatches
    return means | {"policy/stopped_early": float(len(norms) < len(evaluated))}


# ------------------------------------------------------------------------------------- run keeping
@dataclass
class Run:
    """How far a run is; saved with its checkpoint, where a resumed run takes it up."""

    step: int = 0  # environment steps taken
    seconds: float = 0.0  # spent on them, evaluations and checkpoints apart
    recent: list[float] = field(default_factory=list)  # returns of the last 100 training episodes
    logged: dict[str, float] = field(default_factory=dict)  # last value of every metric
    evaluated: int | None = None  # step of the last evaluation
    best_return: float = -math.inf  # of the evaluation that `best.pt` is of
    best_step: int = 0  # when it was; 0: there is none
    shown: float = field(default_factory=time.time)  # time of the last line on the terminal


def set_up_process(args: Args) -> None:
    """RNGs, torch's options, and gymnasium's pickling of environments. Raises `UsageError` where
    nothing can be compiled, or filmed."""
    if args.capture_video:
        check_video(args)  # ahead of the seeds: a task may draw from any RNG
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if WORLD_SIZE > 1 and args.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False  # acting and training with the same precision
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(args.seed)
    if args.compile:
        try:
            torch.compile(torch.neg)(torch.ones(1, device="cuda" if args.cuda else "cpu"))
        except Exception as error:  # of torch, in many layers
            text = "torch.compile finds no working compiler; install g++ or leave it out"
            raise UsageError(f"--compile: {text}") from error
    # EzPickle builds a fresh environment when unpickled; checkpoints keep it as it stands
    gym.utils.EzPickle.__getstate__ = object.__getstate__
    gym.utils.EzPickle.__setstate__ = lambda env, state: vars(env).update(state)


def make_run_dir(args: Args) -> Path:
    """Create <run_dir>/<env_id>__<exp_name>__<seed>__<time> with flags, versions and source."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    path = Path(args.run_dir, name.replace("/", "_").replace(":", "_"))
    source = Path(__file__).resolve()
    commit = subprocess.getoutput(f"git -C '{source.parent}' rev-parse HEAD 2>/dev/null")
    versions = {module.__name__: module.__version__ for module in (torch, gym, np, tyro)}
    versions["python"] = sys.version
    content = {"args": asdict(args), "versions": versions, "commit": commit}
    try:
        path.mkdir(parents=True)
        (path / source.name).write_text(source.read_text())
        (path / "args.json").write_text(json.dumps(content, indent=2))
    except OSError as error:
        raise UsageError(f"--run-dir {args.run_dir}: {error}; choose another directory") from error
    return path


def open_writer(args: Args, run_dir: Path, step: int) -> SummaryWriter | None:
    """Of the first process; what a resumed run wrote beyond its checkpoint is dropped."""
    print(f"{args.env_id}: logging to {run_dir}", flush=True)
    purge_step = step + 1 if args.resume else None
    return SummaryWriter(str(run_dir), purge_step=purge_step) if RANK == 0 else None


def log(writer: SummaryWriter, run: Run, metrics: dict, step: int, histograms: bool = True) -> None:
    """Write scalars, in one event, and tensors with axes as histograms; remember the scalars."""
    if RANK > 0:
        return
    scalars = Summary()
    for tag, value in metrics.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            run.logged[tag] = float(value)
            scalars.value.add(tag=tag, simple_value=run.logged[tag])
        elif histograms:
            writer.add_histogram(tag, value.clamp(-9e19, 9e19), step)  # its bins end at 1e20
    writer.file_writer.add_summary(scalars, step)


def log_flags(writer: SummaryWriter, args: Args) -> None:
    """Write the flags, for TensorBoard's table of runs."""
    if RANK > 0:
        return
    flags = asdict(args) | {"masked_obs": str(args.masked_obs)}
    for entry in summary.hparams(flags, {"eval/return_mean": 0}):
        writer.file_writer.add_summary(entry)


def log_episodes(writer: SummaryWriter, run: Run, rollout: Rollout) -> None:
    """Write return and length of every episode at the step it ended."""
    num_envs = rollout.rewards.shape[1] * WORLD_SIZE
    for t, episode_return, length in rollout.episodes:
        ended = {"charts/episodic_return": episode_return, "charts/episodic_length": length}
        log(writer, run, ended, run.step + (t + 1) * num_envs)
        run.recent.append(episode_return)
    del run.recent[:-100]


def evaluate_run(writer: SummaryWriter, run: Run, agent: Agent, args: Args,
                 save: Callable) -> None:  # fmt: skip
    """Evaluate and log. With `eval_every` the best agent so far is kept in `best.pt`, by `save`."""
    result = RANK == 0 and evaluate(agent, args, Path(writer.log_dir, "videos", f"step-{run.step}"))
    metrics = of_all(result)[0]
    log(writer, run, metrics, run.step)
    run.evaluated = run.step
    if args.eval_every and metrics["eval/return_mean"] >= run.best_return:
        run.best_return = metrics["eval/return_mean"]
        run.best_step = run.step
        save(name="best")
        save()  # which knows of it


def average_metrics(metrics: dict) -> dict:
    """The scalars' means over all processes; histograms stay those of this one."""
    tags = [tag for tag, x in metrics.items() if not isinstance(x, Tensor) or x.dim() == 0]
    means = average(torch.tensor([float(metrics[tag]) for tag in tags], dtype=torch.float64))
    return metrics | dict(zip(tags, means.tolist()))


def show_progress(run: Run, total: int) -> None:
    """A line that a terminal rewrites in place; in a file, a line every five seconds."""
    terminal = sys.stdout.isatty()
    if run.step < total and time.time() - run.shown <= (0.2 if terminal else 5):
        return
    run.shown = time.time()
    speed = run.step / run.seconds
    line = f"{run.step:,} of {total:,} steps ({run.step / total:.0%})  {speed:,.0f} steps/s"
    line += f"  {(total - run.step) / speed:,.0f} s left"
    line += f"  return {np.mean(run.recent):.1f}" if run.recent else ""
    print(line, end="   \r" if terminal and run.step < total else "\n", flush=True)


def show_best(run: Run, run_dir: Path) -> None:
    """Say which evaluation `best.pt` is of, if there is one."""
    if run.best_step:
        line = f"return {run.best_return:.1f} after {run.best_step:,} steps"
        print(f"best evaluation: {line}, {run_dir / 'best.pt'}", flush=True)


def load_agent(path: str | Path) -> tuple[Agent, Args]:
    """Agent and flags of a saved run, given its directory or a checkpoint; runs no code from it.
    Falls back to the CPU. Raises `UsageError` for what the script did not write."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        require(isinstance(saved, dict), "not a dictionary")
        cuda = saved["args"]["cuda"] and torch.cuda.is_available()
        args = Args(**saved["args"] | {"cuda": cuda})
        agent = Agent(args)
        agent.load_state_dict(saved["agent"])
    except Exception as error:  # torch raises half a dozen kinds
        reason = str(error).split(". ")[0]
        raise UsageError(f"{path}: no run or checkpoint of this script: {reason:.200}") from error
    return agent, args


def shapes(agent: Agent) -> dict[str, tuple]:
    """Of all that a checkpoint holds, by name, and the ends of the distribution's support."""
    ends = agent.value_dist.support[[0, -1]]
    held = {name: tuple(x.shape) for name, x in agent.state_dict().items()}
    return held | {"value_dist.support": tuple(ends.tolist())}


def make_agent(args: Args) -> Agent:
    """The agent to train: that of the run to resume, or a new one, with weights and normalisers of
    `init_from`. Raises `UsageError` where shapes or supports differ."""
    if args.resume:
        return load_agent(args.resume)[0]
    agent = Agent(args)
    if args.init_from:
        earlier, _ = load_agent(args.init_from)
        there, here = shapes(earlier), shapes(agent)
        for name in there | here:
            differ = f"{name} is {there.get(name)} there, {here.get(name)} by these flags"
            args.rule("init_from", there.get(name) == here.get(name), differ)
        agent.load_state_dict(earlier.state_dict())
    return agent


def save_checkpoint(writer: SummaryWriter, args: Args, agent: Agent, optimizer: optim.Adam,
                    envs: gym.vector.VectorEnv, run: Run, carry: Carry,
                    name: str = "checkpoint") -> None:  # fmt: skip
    """Write `checkpoint.pt`, or of another name: flags, weights and normalisers, readable without
    pickle, and, pickled for --resume alone, what else an exact resume needs. Written beside the old
    one, synced and renamed, after all events: a kill at any instant leaves the one or the other."""
    part = {"carry": tuple(carry), "rngs": (random.getstate(), np.random.get_state()), "envs": None}
    with suppress(Exception):  # each library raises its own, some when it is loaded
        pickled = pickle.dumps(gym.vector.utils.CloudpickleWrapper(envs.envs))
        pickle.loads(pickled)
        part["envs"] = pickled
    parts = of_all(part)
    if RANK > 0:
        return

    writer.flush()
    kept = {**vars(run), "optimizer": optimizer.state_dict(), "parts": parts}
    content = {"args": {**asdict(args), "resume": ""}, "agent": agent.state_dict()}
    content |= {"global_step": run.step, "run": pickle.dumps(kept)}
    path = Path(writer.log_dir, f"{name}.tmp")
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    path.replace(path.with_suffix(".pt"))


def resume_run(args: Args, optimizer: optim.Adam,
               envs: gym.vector.VectorEnv) -> tuple[Run, Carry | None]:  # fmt: skip
    """Take up the run of `args.resume` where its checkpoint stands.
    The carry is None where the environments are lost and have to open new episodes."""
    path = Path(args.resume, "checkpoint.pt")
    content = torch.load(path, map_location="cpu", weights_only=True)
    args.rule("resume", args.cuda or not content["args"]["cuda"], "needs the GPU it was run on")
    kept = pickle.loads(content["run"])
    try:
        optimizer.load_state_dict(kept["optimizer"])
        run = Run(**{name: kept[name] for name in vars(Run()) if name in kept})
    except ValueError as error:  # another number of parameters
        text = "is of another version of this script; start anew with --init-from"
        raise UsageError(f"--resume {args.resume}: {text}") from error
    part = {"envs": None}  # of another number of processes, or an older version
    if len(kept.get("parts", ())) == WORLD_SIZE:
        part = kept["parts"][RANK]
        for set_state, rng in zip((random.setstate, np.random.set_state), part["rngs"]):
            set_state(rng)
    if part["envs"] is None:
        if run.step < args.num_iterations * args.batch_size:
            print("environments not saved, or by other processes: episodes start afresh")
        return run, None
    envs.envs = pickle.loads(part["envs"]).fn
    return run, Carry(*part["carry"])


def check_video(args: Args) -> None:
    """Raise `UsageError` where nothing can be filmed."""
    make_env(args).close()  # whose errors are not the film's
    try:
        import_module("moviepy")
        env = make_env(args, render_mode="rgb_array")
        env.reset(seed=0)
        frame = np.asarray(env.render())
        env.close()
        require(env.render_mode == "rgb_array", "the task forgets its render_mode")
        require(frame.dtype == np.uint8, f"frames are of {frame.dtype}, not bytes")
    except Exception as error:  # of the renderer, in many kinds
        text = f"{str(error) or repr(error)}; needs moviepy and a task that renders rgb_array"
        raise UsageError(f"--capture-video: {text}") from error


def run_episode(env: gym.Env, agent: Agent, args: Args, episode: int) -> list[float]:
    """Rewards of an evaluation episode; the next ones go on from the seed of the first."""
    obs, _ = env.reset(seed=None if episode else args.seed + 1_000_000)
    check_finite(obs[None], obs[None], np.zeros(1), f"reset of evaluation episode {episode}")
    state, rewards, ended = None, [], False
    while not ended and len(rewards) < (env.spec.max_episode_steps or 10_000):
        action, state = agent.act(obs, state, deterministic=not args.eval_sampled)
        obs, reward, terminated, truncated, _ = env.step(action)
        when = f"step {len(rewards)} of evaluation episode {episode}"
        check_finite(obs[None], obs[None], np.array([reward]), when)
        rewards.append(reward)
        ended = terminated or truncated
    return rewards


def evaluate(agent: Agent, args: Args, video_dir: Path | None = None) -> dict[str, float]:
    """Metrics of `eval_episodes` fresh episodes; statistics and torch's RNG stay as they are.
    The first reset has seed + 1,000,000. Tasks without a time limit are cut at 10,000 steps. With
    `capture_video` the first 3 are filmed into `video_dir`, each kept in memory to its end."""
    if args.capture_video and video_dir:
        env = make_env(args, render_mode="rgb_array")
        env = gym.wrappers.RecordVideo(env, str(video_dir), lambda episode: episode < 3)
    else:
        env = make_env(args)
    with torch.random.fork_rng([agent.device] if args.cuda else []):
        torch.manual_seed(args.seed + 1_000_000)
        episodes = [run_episode(env, agent, args, i) for i in range(args.eval_episodes)]
    env.close()

    sample = torch.tensor([sum(rewards) for rewards in episodes], dtype=torch.float64)
    mean, std = float(sample.mean()), float(sample.std(correction=0))
    tail = empirical_cvar(sample, args.cvar_alpha)
    line = f"return {mean:.1f} +- {std:.1f}, CVaR_{args.cvar_alpha:g} {tail:.1f}"
    print(f"evaluation of {len(episodes)} episodes: {line:<50}", flush=True)  # hides the progress
    result = {"eval/return_mean": mean, "eval/return_std": std, "eval/return_cvar": tail}
    return result | {"eval/length_mean": float(np.mean([len(rewards) for rewards in episodes]))}


# ----------------------------------------------------------------------------------------- training
def schedules(args: Args, progress: float) -> tuple[float, float]:
    """Learning rate and entropy coefficient after this fraction of the run."""
    final_lr = 0.0 if args.anneal_lr else args.learning_rate
    final_ent_coef = args.ent_coef if args.ent_coef_final is None else args.ent_coef_final
    lr = linear_schedule(args.learning_rate, final_lr, progress)
    return lr, linear_schedule(args.ent_coef, final_ent_coef, progress)


def is_due(iteration: int, every: int) -> bool:  # every so many iterations; 0: never
    return every > 0 and iteration % every == 0


def iteration_metrics(run: Run, times: list[float], args: Args) -> dict:
    """Speed, seconds of each part given the times at their ends, recent returns."""
    metrics: dict[str, Any] = {
        "charts/SPS": run.step / run.seconds,
        "time/rollout": times[1] - times[0],
        "time/values": times[2] - times[1],
        "time/update": times[3] - times[2],
    }
    if run.recent:
        returns = torch.tensor(run.recent).double()
        metrics["charts/recent_returns"] = returns
        metrics["cvar/empirical"] = empirical_cvar(returns, args.cvar_alpha)
    return metrics


def last_checkpoint(run_dir: Path) -> str:
    """What a fault leaves, in words."""
    path = run_dir / "checkpoint.pt"
    return f"last checkpoint: {path}" if path.exists() else "no checkpoint yet"


def train(args: Args) -> dict[str, Any]:
    """Train, save, evaluate. Returns the last value of every logged metric, and `run_dir`.
    A fault is raised with a note that names the last checkpoint; a signal in `STOP` ends in a
    checkpoint and KeyboardInterrupt. Sets RNGs, torch's options and how EzPickle copies."""
    set_up_process(args)
    agent = make_agent(args)
    optimizer = optim.Adam([one_vector(agent)], args.learning_rate, eps=1e-5, fused=True)
    run_dir = Path(args.resume or of_all(RANK == 0 and make_run_dir(args))[0])
    envs = make_envs(args, args.local_envs)
    run, carry = resume_run(args, optimizer, envs) if args.resume else (Run(), None)
    total = args.num_iterations * args.batch_size
    writer = open_writer(args, run_dir, run.step)
    save = partial(save_checkpoint, writer, args, agent, optimizer, envs, run)

    try:
        first_seed = args.seed + run.step + RANK * args.local_envs
        carry = carry or open_episodes(envs, agent, first_seed)
        for iteration in range(run.step // args.batch_size + 1, args.num_iterations + 1):
            lr, ent_coef = schedules(args, run.step / total)
            optimizer.param_groups[0]["lr"] = lr

            times = [time.time()]
            torch.manual_seed(hash((args.seed, run.step)))  # the same noise in all processes
            rollout, carry = collect_rollout(envs, agent, carry, args)
            times.append(time.time())
            batch, carry, metrics = prepare_batch(agent, rollout, carry, args)
            times.append(time.time())
            metrics |= update(agent, optimizer, batch, args, ent_coef)
            times.append(time.time())
            agent.update_obs_moments(rollout.obs)  # last: acting and training saw the same inputs

            log_episodes(writer, run, rollout)
            run.step += args.batch_size
            run.seconds += times[-1] - times[0]
            metrics |= {"charts/learning_rate": lr, "policy/entropy_coef": ent_coef}
            metrics = average_metrics(metrics) | iteration_metrics(run, times, args)
            log(writer, run, metrics, run.step, run.step == total or iteration % 10 == 1)
            show_progress(run, total)

            if run.step < total and is_due(iteration, args.eval_every):
                evaluate_run(writer, run, agent, args, partial(save, carry))
            stop = average(torch.tensor(float(len(STOP)))) > 0
            if run.step == total or stop or is_due(iteration, args.checkpoint_every):
                save(carry)
            if stop:
                raise KeyboardInterrupt(f"stopped after {run.step:,} steps; --resume {run_dir}")

        if run.evaluated != total:  # else the run had ended
            evaluate_run(writer, run, agent, args, partial(save, carry))
            save(carry)
        show_best(run, run_dir)
        log_flags(writer, args)
    except Exception as error:
        error.add_note(f"after {run.step:,} steps; {last_checkpoint(run_dir)}")
        raise
    finally:
        envs.close()
        if writer is not None:
            writer.close()
    return run.logged | {"run_dir": str(run_dir)}


def request_stop(number: int, frame: Any) -> None:
    """End after this iteration; the second signal has its default effect."""
    STOP.append(number)
    signal.signal(number, signal.SIG_DFL)


def parse_args(argv: list[str]) -> tuple[Args, Agent | None]:
    """Flags of the command line; with --resume and --evaluate, the run's flags are the defaults,
    and its agent comes with them. Raises `UsageError` where others than the free ones change."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--resume", nargs="?")
    finder.add_argument("--evaluate", nargs="?")
    given, _ = finder.parse_known_args(argv)
    path = given.evaluate if given.resume is None else given.resume
    if path is None:
        return tyro.cli(Args, args=argv), None

    agent, stored = load_agent(path)
    args = tyro.cli(Args, args=argv, default=stored)
    free = (
        "total_timesteps eval_episodes eval_every eval_sampled capture_video checkpoint_every "
        "torch_threads resume evaluate"
    )
    before = asdict(stored)
    changed = {name for name, value in asdict(args).items() if value != before[name]}
    names = ", ".join(sorted(changed - set(free.split())))
    require(not names, f"{names}: not as in {path}; only these may differ: {free}")
    least = stored.total_timesteps
    args.rule("total_timesteps", args.total_timesteps >= least, f"below the run's, {least}")
    return args, agent


def main(argv: list[str]) -> None:
    """Command line. A user's mistake costs one line on stderr and exit code 2; a fault is raised;
    a signal ends the run with a checkpoint and exit code 130."""
    try:
        args, agent = of_all(RANK == 0 and parse_args(argv))[0]  # one process tells what is wrong
        if args.evaluate:
            torch.set_num_threads(args.torch_threads)
            if args.capture_video:
                check_video(args)
            path = Path(args.evaluate)
            path = path / "checkpoint.pt" if path.is_dir() else path
            evaluate(agent, args, path.parent / "videos" / path.stem)
            return
        signal.signal(signal.SIGINT, request_stop)
        signal.signal(signal.SIGTERM, request_stop)
        train(args)
    except (UsageError, KeyboardInterrupt, OtherProcessEnded) as error:
        lines = [str(error) or "interrupted", *getattr(error, "__notes__", ())]
        if RANK == 0:
            print("error:", " ".join("; ".join(lines).split()), file=sys.stderr)  # one line
        sys.exit({UsageError: 2, OtherProcessEnded: 1}.get(type(error), 130))


if __name__ == "__main__":
    main(sys.argv[1:])
