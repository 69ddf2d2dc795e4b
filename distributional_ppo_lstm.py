"""Recurrent PPO with twin quantile critics.

    python distributional_ppo_lstm.py            # CartPole without velocities; --help for the flags

`collect_rollout` acts with the actor alone; `prepare_batch` runs the critics once over the rollout
(a return distribution for every state s_t and true successor s'_t), computes GAE from their means
and moves the return statistics together with the value heads (PopArt); `update` minimises

    clipped policy loss - ent_coef * entropy + vf_coef * quantile regression loss

over minibatches of environment columns until the KL divergence exceeds `target_kl`. Papers are
named with the functions that follow them.

Shapes: T steps, N environments, B rows of a minibatch, D observation, K quantiles, J target
samples, C critics, H LSTM width, L steps of a training sequence, M sequences of a rollout. Rewards,
values and returns are in the task's units; critics see and predict them normalised."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

# Velocity-free tasks of rl-baselines3-zoo: entries of the base task's observation set to zero.
VELOCITIES = {
    "CartPole-v1": (1, 3), "MountainCar-v0": (1,), "MountainCarContinuous-v0": (1,),
    "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5), "LunarLanderContinuous-v3": (2, 3, 5),
}  # fmt: skip
LOG_STD_RANGE = (-5.0, 2.0)  # of Gaussian actions: std from 0.0067 to 7.4


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
    torch_deterministic: bool = True  # deterministic GPU kernels (CPU runs always repeat exactly)
    cuda: bool = False  # run the networks on the GPU; small ones are faster on the CPU
    torch_threads: int = 1  # CPU threads of torch, integer >= 1; 1 is fastest for small networks
    run_dir: str = "runs"  # directory under which the run directory is created
    capture_video: bool = False  # record the final evaluation (needs: pip install moviepy)
    eval_episodes: int = 50  # episodes of an evaluation, integer >= 1
    eval_every: int = 0  # iterations between evaluations, integer >= 0; 0: only at the end
    env_id: str = "CartPoleNoVel-v1"  # gymnasium id, module:id, or a velocity-free id of the zoo
    total_timesteps: int = 100_000  # environment steps of the run, rounded down to whole rollouts
    num_envs: int = 8  # parallel environments, integer >= 1
    num_steps: int = 64  # steps of each environment per rollout, integer >= 1
    async_envs: bool = False  # one process per environment; pays off when a step takes over 1 ms
    masked_obs: tuple[int, ...] = ()  # entries of the observation vector multiplied by zero
    hidden_size: int = 64  # width of encoders and value heads, integer >= 1
    lstm_hidden_size: int = 64  # width of the actor's and of the critic's LSTM, integer >= 1
    activation: Literal["tanh", "relu"] = "relu"  # of encoders and value heads
    log_std_init: float = 0.0  # initial log-std of Gaussian actions, in [-5, 2]
    norm_obs: bool = True  # normalise observations by running moments, clipped to +-10
    learning_rate: float = 1e-3  # of Adam, > 0
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.98  # discount per step, in [0, 1]
    gae_lambda: float = 0.9  # weight of longer returns in GAE, in [0, 1]
    num_minibatches: int = 2  # per epoch; divides num_envs * num_steps / seq_len
    seq_len: int = 0  # steps of a training sequence, divides num_steps; 0: the whole rollout
    update_epochs: int = 8  # passes over each rollout, integer >= 1
    norm_adv: bool = True  # normalise advantages over the rollout
    clip_coef: float = 0.2  # clipping range of the probability ratio, > 0
    ent_coef: float = 0.01  # weight of the entropy bonus, per nat, >= 0
    ent_coef_final: float | None = 0.0  # the same at the end of the run, linear; None: constant
    min_entropy: float = 0.0  # floor of the mean entropy, nats; needs min_entropy_penalty > 0
    min_entropy_penalty: float = 0.0  # weight of the shortfall below the floor, per nat, >= 0
    vf_coef: float = 0.5  # weight of the value loss, >= 0
    max_grad_norm: float = 0.5  # clipping norm of the gradient of all parameters, > 0
    target_kl: float | None = None  # stop the update ahead of a step at a larger KL, nats, > 0
    num_critics: Literal[1, 2] = 2  # value heads with parameters of their own
    twin_reduce: Literal["min", "mean", "min_quantile"] = "min"  # how two critics give one value
    norm_returns: bool = True  # critics predict normalised returns; heads are rescaled (PopArt)
    vf_clip_coef: float = 0.2  # range d of value clipping, in standard deviations of returns, > 0
    cvar_alpha: float = 0.05  # tail mass averaged by CVaR, in [1e-3, 1]; 1 is the mean
    # ---- value distribution: quantiles (flags) ----
    num_quantiles: int = 32  # quantiles of each critic, integer >= 1
    kappa: float = 0.0  # Huber threshold in normalised returns, >= 0; at 1 it learns expectiles
    # value clipping: whether and how a critic's quantiles are kept near its own old ones
    vf_clip: Literal["none", "per_quantile", "mean_only", "mean_and_variance"] = "none"
    DISTRIBUTION_BOUNDS = (("num_quantiles", (1, math.inf)), ("kappa", (0, math.inf)))
    # ---- end of value distribution ----

    def __post_init__(self) -> None:
        """Derive the sizes; raise `UsageError` with flag, value, bound and remedy."""
        ones = "torch_threads eval_episodes num_envs num_steps hidden_size lstm_hidden_size"
        zeros = "seed eval_every seq_len ent_coef ent_coef_final min_entropy_penalty vf_coef"
        positive = ["learning_rate", "clip_coef", "max_grad_norm", "target_kl", "vf_clip_coef"]
        bounds = dict.fromkeys(f"{ones} num_minibatches update_epochs".split(), (1, math.inf))
        bounds |= dict.fromkeys(zeros.split(), (0, math.inf))
        bounds |= dict.fromkeys(positive, (math.ulp(0), math.inf))
        bounds |= {"gamma": (0, 1), "gae_lambda": (0, 1), "cvar_alpha": (1e-3, 1)}
        bounds |= {"log_std_init": LOG_STD_RANGE, **dict(self.DISTRIBUTION_BOUNDS)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            valid = value is None or (low <= value <= high and math.isfinite(value))
            bound = f"in [{low:g}, {high:g}]" if high < math.inf else f">= {low:g}"
            bound = "> 0" if name in positive else bound
            require(valid, f"--{name.replace('_', '-')} {value}: must be finite and {bound}")
        require(math.isfinite(self.min_entropy), f"--min-entropy {self.min_entropy}: not finite")
        self.batch_size = self.num_envs * self.num_steps  # samples of a rollout
        self.num_iterations = self.total_timesteps // self.batch_size  # rollouts, and updates
        self.chunk_len = self.seq_len or self.num_steps  # steps of a training sequence
        size = f"--num-envs {self.num_envs} times --num-steps {self.num_steps}"
        require(self.batch_size > 1, f"{size}: a rollout needs at least 2 steps")
        message = f"--total-timesteps {self.total_timesteps}: must be at least one rollout, {size}"
        require(self.num_iterations > 0, message)
        message = f"--seq-len {self.seq_len}: must divide --num-steps {self.num_steps} (0: whole)"
        require(self.num_steps % self.chunk_len == 0, message)
        columns = self.batch_size // self.chunk_len
        message = f"--num-minibatches {self.num_minibatches}: must divide the {columns} sequences "
        message += "of a rollout, num_envs * num_steps / seq_len: the LSTM trains on whole ones"
        require(columns % self.num_minibatches == 0, message)
        message = "--capture-video: moviepy is missing; pip install moviepy"
        require(not self.capture_video or find_spec("moviepy") is not None, message)
        message = "--cuda: torch sees no GPU here; leave the flag out to use the CPU"
        require(not self.cuda or torch.cuda.is_available(), message)


# ---------------------------------------------------------------------------- advantages and policy
def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalized advantage estimation with correct time limits: advantages A and returns A + V.
        delta_t = r_t + gamma * (1 - terminated_t) * V(s'_t) - V(s_t)
        A_t     = delta_t + gamma * lambda * (1 - (terminated_t or truncated_t)) * A_{t+1}
    rewards, values, next_values (T, N), or (T, N, R) for R reward terms; terminated, truncated
    (T, N) bool. V(s'_t) is that of the true successor: the final observation where an episode ended
    at t, the next observation otherwise. Termination cuts the bootstrap; either one cuts the
    recursion, or else the next episode's rewards leak across a time limit. Both at once means
    terminated. Raises ValueError for entries that are not finite. Source: Schulman et al. 2016,
    eq. 16; time limits: Pardo et al. 2018."""
    for name, x in (("rewards", rewards), ("values", values), ("next_values", next_values)):
        if bad := int((~torch.isfinite(x)).sum()):
            raise ValueError(f"gae: {bad} of {x.numel()} {name} are not finite")
    masks = (~terminated, ~(terminated | truncated))
    alive, unbroken = (m.to(values.dtype)[(..., *[None] * (values.dim() - m.dim()))] for m in masks)
    delta = rewards + gamma * alive * next_values - values  # (T, N)
    decay = gamma * gae_lambda * unbroken
    advantages, last = torch.zeros_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        last = advantages[t] = delta[t] + decay[t] * last
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor, eps: float = 1e-8) -> Tensor:
    """(A - mean) / (std + eps), population std over all entries.
    eps is added without a branch on std, which would be discontinuous. All zeros for constant input
    and for one element: subtracting the first entry first makes these exact."""
    shifted = advantages - advantages.flatten()[0]
    centered = shifted - shifted.mean()
    return centered / (centered.square().mean().sqrt() + eps)


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - predictions) / Var(targets), a scalar; 0 where the targets do not vary."""
    variance = targets.var(correction=0)
    if variance == 0 or targets.max() == targets.min():
        return targets.new_zeros(())
    return 1 - (targets - predictions).var(correction=0) / variance


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate; loss, approx_kl and clip fraction, scalars, from (B,) inputs.
        r = exp(clamp(log_ratio, -20, 20)),  log_ratio = log pi_new(a|s) - log pi_old(a|s)
        loss = -mean(min(r * A, clip(r, 1 - eps, 1 + eps) * A))
        approx_kl = mean((r - 1) - log r)                 in nats, >= 0 (Schulman's k3 estimator)
        clip fraction = mean(|r - 1| > eps)
    r itself is not clamped ahead of the minimum: that would remove the gradient at r >> 1, A < 0.
    Source: Schulman et al. 2017, eq. 7."""
    log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    with torch.no_grad():
        approx_kl = (log_ratio.expm1() - log_ratio).mean()  # r - 1 would round below log r
        clip_fraction = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
    return loss, approx_kl, clip_fraction


def entropy_loss(
    entropy: Tensor, ent_coef: float, min_entropy: float, penalty_coef: float
) -> Tensor:
    """-ent_coef * mean(H) + penalty_coef * relu(min_entropy - mean(H)), a scalar.
    The only way of entropy into the total loss. `entropy` (B,) in nats. That of Gaussian actions
    may be negative: a floor of 0 is not neutral, which is why the penalty is off by default."""
    mean = entropy.mean()
    return -ent_coef * mean + penalty_coef * torch.relu(min_entropy - mean)


def linear_schedule(start: float, end: float, progress: float) -> float:
    """start + (end - start) * progress, with progress clamped to [0, 1]."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def empirical_cvar(returns: Tensor, alpha: float) -> float:
    """Mean of the lowest fraction alpha of a sample (n,), one return counting in part."""
    mass = (alpha * len(returns) - torch.arange(len(returns)).double()).clamp(0, 1)
    return float((mass * returns.sort().values).sum() / (alpha * len(returns)))


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
        """sqrt(var + 1e-8), the one scale of `normalize` and `denormalize`."""
        return (self.var + 1e-8).sqrt()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in a batch; all axes ahead of `shape` are samples."""
        x = x.double().reshape(-1, *self.mean.shape)
        past = self.count / (self.count + len(x))  # its weight in the merged moments
        delta = x.mean(0) - self.mean
        self.var = past * self.var + (1 - past) * x.var(0, correction=0)
        self.var += past * (1 - past) * delta.square()
        self.mean = self.mean + (1 - past) * delta
        self.count = (self.count + len(x)).clamp(max=self.max_count)

    def normalize(self, x: Tensor) -> Tensor:
        """(x - mean) / std, in the dtype of x."""
        return ((x - self.mean) / self.std).to(x.dtype)

    def denormalize(self, z: Tensor) -> Tensor:
        """std * z + mean, in the dtype of z; the inverse of `normalize`."""
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
    quantiles (B, K), targets (B, J) in any order, taus (K,), kappa >= 0 in the quantiles' units.
    Divided by kappa as in IQN, so that kappa -> 0 meets the pinball loss; mean over i where QR-DQN
    sums, so that the size of the loss does not depend on K. No gradient through the indicator.
    Source: Dabney et al. 2018a (QR-DQN) eq. 8 to 10, 2018b (IQN) eq. 3."""
    u = targets[..., None, :] - quantiles[..., None]  # (B, K, J)
    size = u.abs()
    if kappa > 0:
        size = torch.where(size <= kappa, 0.5 * u.square() / kappa, size - 0.5 * kappa)
    return ((taus[:, None] - (u < 0).to(u.dtype)).abs() * size).mean((-2, -1))


def clip_quantiles(
    quantiles: Tensor, old_quantiles: Tensor, clip_delta: float, mode: str
) -> Tensor:
    """Predictions that moved no further than d = clip_delta from the old ones, (B, K).
    With m the mean and s = sqrt(variance + 1e-12) over the K quantiles:
        per_quantile:       q_old + clamp(q - q_old, -d, d)
        mean_only:          q + (m_c - m),  m_c = m_old + clamp(m - m_old, -d, d)
        mean_and_variance:  m_c + (q - m) * min(1, 2 s_old / s)
    Each is PPO's scalar value clipping for K = 1. Gradients flow through all of `quantiles`.
    Source: reference code of Schulman et al. 2017 (K = 1); the modes are ours."""
    if mode == "per_quantile":
        return old_quantiles + (quantiles - old_quantiles).clamp(-clip_delta, clip_delta)
    mean, old_mean = quantiles.mean(-1, keepdim=True), old_quantiles.mean(-1, keepdim=True)
    clipped_mean = old_mean + (mean - old_mean).clamp(-clip_delta, clip_delta)
    if mode == "mean_only":
        return quantiles + (clipped_mean - mean)
    if mode != "mean_and_variance":
        raise ValueError(f"clip_quantiles: unknown mode {mode!r}")
    std = ((quantiles - mean).square().mean(-1, keepdim=True) + 1e-12).sqrt()
    old_std = ((old_quantiles - old_mean).square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return clipped_mean + (quantiles - mean) * (2 * old_std / std).clamp(max=1)


def clipped_value_loss(loss: Tensor, loss_clipped: Tensor) -> Tensor:
    """max(loss, loss_clipped) per sample, (B,): for each critic alone, ahead of any averaging."""
    return torch.max(loss, loss_clipped)


def cvar_weights(num_quantiles: int, alpha: float, dtype: torch.dtype | None = None) -> Tensor:
    """Weights (K,) of the sorted quantiles in their CVaR; sum 1.
        CVaR_alpha = (1 / alpha) * integral_0^alpha F^-1(tau) dtau
    exact for the quantile function through the points (tau_i, q_i), linear between them and beyond
    both ends; alpha = 1 is the plain mean. Raises ValueError for alpha outside [1e-3, 1].
    Source: Rockafellar & Uryasev 2000."""
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"cvar: alpha {alpha} is outside [1e-3, 1]")
    if alpha == 1 or num_quantiles == 1:
        return torch.full((num_quantiles,), 1 / num_quantiles, dtype=dtype)
    left = torch.arange(num_quantiles - 1, dtype=torch.float64)  # segment k joins points k, k + 1
    low = ((left + 0.5) / num_quantiles).clamp(max=alpha)
    high = ((left + 1.5) / num_quantiles).clamp(max=alpha)
    low[0], high[-1] = 0, alpha  # the outer segments reach to the ends
    share = (low + high) / 2 * num_quantiles - 0.5 - left  # of point k + 1 in the segment's mean
    weights = torch.zeros(num_quantiles, dtype=torch.float64)
    weights[:-1] += (high - low) * (1 - share)
    weights[1:] += (high - low) * share
    return (weights / alpha).to(dtype or torch.get_default_dtype())


def cvar(quantiles: Tensor, alpha: float) -> Tensor:
    """Mean of the lower tail of mass alpha, (B, K) -> (B,); see `cvar_weights`."""
    weights = cvar_weights(quantiles.shape[-1], alpha, torch.float64).to(quantiles)
    return (quantiles.sort(-1).values * weights).sum(-1)


def value_at_risk(quantiles: Tensor, alpha: float) -> Tensor:
    """F^-1(alpha) of the quantile function of `cvar_weights`, (B, K) -> (B,); the same errors."""
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"value_at_risk: alpha {alpha} is outside [1e-3, 1]")
    ordered, num_quantiles = quantiles.sort(-1).values, quantiles.shape[-1]
    position = alpha * num_quantiles - 0.5  # in steps of the quantile index
    left = max(min(math.floor(position), num_quantiles - 2), 0)
    right = min(left + 1, num_quantiles - 1)
    return ordered[..., left] + (position - left) * (ordered[..., right] - ordered[..., left])


def rescale_head(
    linear: nn.Linear, old_mean: Tensor, old_std: Tensor, new_mean: Tensor, new_std: Tensor
) -> None:
    """PopArt: change a linear layer in place so that std * output + mean stays what it was.
        w' = w s / s',    b' = (s b + mu - mu') / s'
    Source: van Hasselt et al. 2016, eq. 5."""
    with torch.no_grad():
        linear.weight.copy_(linear.weight * (old_std / new_std))
        linear.bias.copy_((old_std * linear.bias + old_mean - new_mean) / new_std)


class ValueDistribution(nn.Module):
    """What the rest of the script asks of a value distribution; here, quantiles.
    `outputs` (..., K) are those of a critic; `support` (K,) says what they refer to."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.register_buffer("support", quantile_midpoints(args.num_quantiles), persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of the distribution, (...)."""
        return outputs.mean(-1)

    def describe(self, outputs: Tensor, alpha: float) -> dict[str, Tensor]:
        """Deciles 1, 5 and 9, standard deviation and CVaR_alpha of the distribution, each (...)."""
        deciles = {f"p{p}": value_at_risk(outputs, p / 100) for p in (10, 50, 90)}
        return deciles | {"std": outputs.std(-1, correction=0), "cvar": cvar(outputs, alpha)}

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What is logged of this kind alone: the share of neighbours in the wrong order."""
        return {"value/crossing_fraction": (outputs.diff(dim=-1) < 0).float().mean()}

    def reduce_twins(self, outputs: Tensor) -> Tensor:
        """One distribution from those of C critics, (C, ..., K) -> (..., K), by `twin_reduce`.
        min: the critic with the smaller mean; mean: the pooled quantiles, sorted, neighbours
        averaged; min_quantile: the elementwise minimum of the sorted quantiles, which is more
        pessimistic: mean(min q) <= min(mean). Source: Fujimoto et al. 2018 (min)."""
        if len(outputs) == 1:
            return outputs[0]
        if self.args.twin_reduce == "min":
            first, second = self.mean(outputs)
            return torch.where((first <= second)[..., None], *outputs)
        if self.args.twin_reduce == "mean":
            return torch.cat((*outputs,), -1).sort(-1).values.unflatten(-1, (-1, 2)).mean(-1)
        return outputs.sort(-1).values.amin(0)

    def encode_targets(self, targets: Tensor) -> Tensor:
        """Normalised target samples (..., J) in the form `loss` wants: as they are."""
        return targets

    def loss(self, outputs: Tensor, targets: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of C critics, (C, ...), and which of them value clipping changed, 0 or 1.
        outputs (C, ..., K); targets (..., J), encoded, never clipped; old (C, ..., K), kept by
        `carry_statistics`: each critic is clipped around its own."""
        loss = quantile_huber_loss(outputs, targets, self.support, self.args.kappa)
        if self.args.vf_clip == "none":
            return loss, torch.zeros_like(loss)
        clipped = clip_quantiles(outputs, old, self.args.vf_clip_coef, self.args.vf_clip)
        loss_clipped = quantile_huber_loss(clipped, targets, self.support, self.args.kappa)
        changed = ((clipped - outputs).abs() > 1e-6).any(-1)
        return clipped_value_loss(loss, loss_clipped), changed.to(loss.dtype)

    def carry_statistics(
        self, critic: Critic, outputs: Tensor, old: RunningMoments, new: RunningMoments
    ) -> tuple[Tensor, Tensor]:
        """Adapt the critics to return statistics that moved from `old` to `new`.
        Returns what they now give where they gave `outputs` (C, ..., K), and the old values that
        `loss` clips around, in the new units: here the same."""
        for head in critic.heads:
            rescale_head(head[-1], old.mean, old.std, new.mean, new.std)
        carried = new.normalize(old.denormalize(outputs.double())).to(outputs.dtype)
        return carried, carried


# ---- end of value distribution -------------------------------------------------------------------
# ----------------------------------------------------------------------------------------- networks
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std` and zero biases, for a linear or an LSTM layer."""
    for name, parameter in layer.named_parameters():
        nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, std)
    return layer


class ActionDistribution(nn.Module):
    """Distribution of actions given the actor's outputs, for every supported action space.
    Box: diagonal Gaussian whose log-std does not depend on the state; samples are unbounded, only
    what the environment receives is clipped. Params: mean and log-std (..., 2, A).
    Discrete, MultiDiscrete, MultiBinary: P independent categorical parts (of two for MultiBinary).
    Params: logits (..., P, largest part), where smaller parts are padded with -1e9."""

    def __init__(self, space: gym.Space, log_std_init: float) -> None:
        super().__init__()
        self.space, self.log_std = space, None
        if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
            self.log_std = nn.Parameter(torch.full((math.prod(space.shape),), log_std_init))
            self.num_outputs = len(self.log_std)
            return
        message = f"--env-id: action space {space} is not supported; supported are Discrete, "
        message += "MultiDiscrete, MultiBinary and Box of floats"
        require(isinstance(space, Discrete | MultiDiscrete | MultiBinary), message)
        size = 2 if isinstance(space, MultiBinary) else getattr(space, "n", None)
        sizes = torch.as_tensor(np.full(space.shape, getattr(space, "nvec", size))).reshape(-1, 1)
        padding = -1e9 * (torch.arange(int(sizes.max())) >= sizes)  # (P, largest part)
        self.register_buffer("padding", padding, persistent=False)
        self.num_outputs = padding.numel()

    def forward(self, outputs: Tensor) -> Tensor:
        """Params from the actor's outputs (..., num_outputs)."""
        if self.log_std is None:
            return outputs.unflatten(-1, self.padding.shape) + self.padding
        self.log_std.data.clamp_(*LOG_STD_RANGE)  # a projection: the gradient does not vanish
        return torch.stack((outputs, self.log_std.expand_as(outputs)), -2)

    def distribution(self, params: Tensor) -> Distribution:
        """The joint distribution, with log_prob, entropy and exact KL summed over its parts."""
        if self.log_std is None:
            base = Categorical(logits=params, validate_args=False)
        else:
            base = Normal(params[..., 0, :], params[..., 1, :].exp(), validate_args=False)
        return Independent(base, 1, validate_args=False)

    def sample(self, params: Tensor, deterministic: bool = False) -> Tensor:
        """A random action, (..., P) or (..., A), or the mode; cheaper than torch.distributions."""
        if self.log_std is None:  # the largest logit after adding Gumbel noise
            noise = 0 if deterministic else torch.empty_like(params).exponential_().log()
            return (params - noise).argmax(-1)
        mean, log_std = params.unbind(-2)
        return mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)

    def to_env(self, actions: Tensor) -> np.ndarray:
        """A batch of actions as the environments expect it: counted from `start`, or clipped."""
        array = actions.cpu().numpy().reshape(-1, *self.space.shape)
        if self.log_std is None:
            return (array + getattr(self.space, "start", 0)).astype(self.space.dtype)
        return array.clip(self.space.low, self.space.high).astype(self.space.dtype)


def unroll_lstm(
    lstm: nn.LSTM, inputs: Tensor, state: tuple[Tensor, Tensor], episode_start: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run a one-layer LSTM over a rollout whose episodes begin anywhere, in one fused call.
    inputs (T, N, F); state (h, c), each (1, N, H), before step 0; episode_start (T, N) bool.
    Returns the outputs (T, N, H) and the state after step T - 1. Equal to T single steps, each of
    which first zeroes the state where it opens an episode.
    A row inserted ahead of each such step does that: two extra inputs drive the gates to exactly
    0 or 1, since sigmoid(-1e4) = 0 in floating point. With input and forget gate at 0, c = h = 0
    and no gradient passes. Columns with fewer episodes are filled up at their end with rows that
    keep c: input gate 0, forget gate 1."""
    if not episode_start.any():
        return lstm(inputs, state)
    T, N, F = inputs.shape
    row = torch.arange(T, device=inputs.device)[:, None] + episode_start.cumsum(0)
    num_rows = int(row[-1].max()) + 1
    at = row * N + torch.arange(N, device=inputs.device)  # (T, N) position of each step
    steps = at.flatten()
    reset, keep = inputs.new_tensor([[1, 0], [0, 1]])
    flags = keep.repeat(num_rows * N, 1).index_fill_(0, steps, 0)
    flags[at[episode_start] - N] = reset
    rows = inputs.new_zeros(num_rows * N, F).index_copy(0, steps, inputs.flatten(0, 1))
    rows = torch.cat((rows, flags), 1).view(num_rows, N, F + 2)
    gates = inputs.new_tensor([[-1e4, -1e4], [-1e4, 1e4], [0, 0], [0, 0]])  # i, f, g, o
    weight = torch.cat((lstm.weight_ih_l0, gates.repeat_interleave(lstm.hidden_size, 0)), 1)
    weights = (weight, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0)
    outputs, _, c = torch.lstm(rows, state, weights, True, 1, 0.0, False, False, False)
    outputs = outputs.flatten(0, 1).index_select(0, steps).view(T, N, -1)
    return outputs, (outputs[-1:], c)


class Body(nn.Module):
    """Observations to features: encoder and LSTM."""

    def __init__(self, obs_dim: int, args: Args) -> None:
        super().__init__()
        self.act = {"tanh": nn.Tanh(), "relu": nn.ReLU()}[args.activation]
        self.encoder = nn.Sequential(layer_init(nn.Linear(obs_dim, args.hidden_size)), self.act)
        self.lstm = layer_init(nn.LSTM(args.hidden_size, args.lstm_hidden_size), 1.0)
        self.num_features = self.state_size = args.lstm_hidden_size

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step: obs (N, D), state (2, N, H) -> features (N, H), state."""
        h, c = torch.lstm_cell(self.encoder(obs), (*state,), *self.lstm.all_weights[0])
        return h, torch.stack((h, c))

    def unroll(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> tuple[Tensor, Tensor]:
        """Features (L, N, H) of obs (L, N, D) from state (2, N, H), and the state after them."""
        features, state = unroll_lstm(self.lstm, self.encoder(obs), state.split(1), episode_start)
        return features, torch.cat(state)

    def over_rollout(
        self, rollout: SimpleNamespace, state: Tensor, chunk_len: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features of every s_t and every true successor s'_t of a rollout, without a step loop.
        Returns features, next_features (T, N, H), the states (chunks, 2, N, H) ahead of each
        training sequence, and the state after the last step. The pass is cut after time limits,
        where one more step from a copy of the state sees the final observation; it leaves no trace.
        After a termination the value is 0 by definition; next_features there are not used."""
        cut = (rollout.truncated & ~rollout.terminated).any(1).tolist()
        ends = [t for t in range(1, len(cut) + 1) if t % chunk_len == 0 or cut[t - 1]]
        features, next_features, states = [], [], []
        for first, end in zip([0, *ends], ends):
            if first % chunk_len == 0:
                states.append(state)
            start = rollout.episode_start[first:end]
            part, state = self.unroll(rollout.obs[first:end], state, start)
            successor, _ = self.step(rollout.next_obs[end - 1], state)
            features.append(part)
            next_features += [part[1:], successor[None]]
        return torch.cat(features), torch.cat(next_features), torch.stack(states), state


class Actor(Body):
    """Observations to parameters of the action distribution."""

    def __init__(self, obs_dim: int, actions: ActionDistribution, args: Args) -> None:
        super().__init__(obs_dim, args)
        self.actions = actions
        self.head = layer_init(nn.Linear(self.num_features, actions.num_outputs), 0.01)

    def step(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step while acting: obs (N, D), state (2, N, H) -> params (N, ...), state."""
        features, state = super().step(obs, state)
        return self.actions(self.head(features)), state

    def forward(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:
        """Sequences: obs (L, N, D), state (2, N, H), episode_start (L, N) -> params (L, N, ...)."""
        return self.actions(self.head(self.unroll(obs, state, episode_start)[0]))


class Critic(Body):
    """Observations to normalised return distributions, by C heads of their own."""

    def __init__(self, obs_dim: int, num_outputs: int, args: Args) -> None:
        super().__init__(obs_dim, args)
        self.heads = nn.ModuleList()
        for _ in range(args.num_critics):
            hidden = layer_init(nn.Linear(self.num_features, args.hidden_size))
            output = layer_init(nn.Linear(args.hidden_size, num_outputs), 0.1)
            self.heads.append(nn.Sequential(hidden, self.act, output))

    def values(self, features: Tensor) -> Tensor:
        """Outputs of all heads, (..., H) -> (C, ..., K)."""
        return torch.stack([head(features) for head in self.heads])

    def forward(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:
        """Sequences: obs (L, N, D), state (2, N, H), episode_start (L, N) -> (C, L, N, K)."""
        return self.values(self.unroll(obs, state, episode_start)[0])


class Agent(nn.Module):
    """Actor, critics and the statistics that normalise what they see and predict."""

    def __init__(self, obs_dim: int, action_space: gym.Space, args: Args) -> None:
        super().__init__()
        self.dist = ValueDistribution(args)
        self.actor = Actor(obs_dim, ActionDistribution(action_space, args.log_std_init), args)
        self.critic = Critic(obs_dim, len(self.dist.support), args)
        self.obs_moments = RunningMoments((obs_dim,))
        self.return_moments = RunningMoments((), max_count=20 * args.batch_size)  # 10 rollouts
        self.norm_obs = args.norm_obs

    def initial_state(self, num_envs: int) -> Tensor:
        """Zero state (2, N, H) of the actor or of the critic."""
        return self.dist.support.new_zeros(2, num_envs, self.actor.state_size)

    def normalize_obs(self, obs: Tensor) -> Tensor:
        """Observations as the networks see them."""
        return self.obs_moments.normalize(obs).clamp(-10, 10) if self.norm_obs else obs

    @torch.no_grad()
    def act(
        self, obs: np.ndarray, state: Tensor | None = None, deterministic: bool = True
    ) -> tuple[np.ndarray, Tensor]:
        """Act outside of training: action(s) for `env.step`, and the state for the next call.
        obs (D,) or (N, D) as environments of `make_env` give them; state None opens an episode;
        deterministic: the mode of the policy, otherwise a sample."""
        batch = torch.as_tensor(np.atleast_2d(obs), device=self.dist.support.device)
        state = self.initial_state(len(batch)) if state is None else state
        params, state = self.actor.step(self.normalize_obs(batch.float()), state)
        actions = self.actor.actions.to_env(self.actor.actions.sample(params, deterministic))
        return (actions[0] if np.ndim(obs) == 1 else actions), state


# ------------------------------------------------------------------------- environments and rollout
def make_env(args: Args, video_dir: Path | None = None, step_limit: int | None = None) -> gym.Env:
    """One environment with a flat float32 observation vector, masked, and episode statistics.
    `step_limit` ends the episodes of a task without a time limit of its own. Raises `UsageError`
    for an unknown task, a missing package, a space that cannot be flattened, a wrong mask."""
    base = args.env_id.replace("NoVel-v", "-v") if "NoVel-v" in args.env_id else None
    env_id, hidden = (base, VELOCITIES[base]) if base in VELOCITIES else (args.env_id, ())
    options = {"render_mode": "rgb_array"} if video_dir else {}
    try:
        env = gym.make(env_id, disable_env_checker=True, **options)
        if video_dir:
            env = gym.wrappers.RecordVideo(env, str(video_dir), episode_trigger=lambda _: True)
        if step_limit and env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, step_limit)
        space, env = env.observation_space, gym.wrappers.FlattenObservation(env)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        raise UsageError(f"--env-id {args.env_id}: {error}") from error
    message = f"--env-id {args.env_id}: observation space {space} cannot be flattened"
    require(isinstance(env.observation_space, Box), message)
    keep = np.ones(env.observation_space.shape, np.float32)
    for index in (*hidden, *args.masked_obs):
        require(0 <= index < len(keep), f"--masked-obs {index}: must be in 0..{len(keep) - 1}")
        keep[index] = 0
    vector = Box(-np.inf, np.inf, keep.shape, np.float32)
    env = gym.wrappers.TransformObservation(env, lambda obs: obs.astype(np.float32) * keep, vector)
    return gym.wrappers.RecordEpisodeStatistics(env)


def make_envs(args: Args, num_envs: int, **options: Any) -> gym.vector.VectorEnv:
    """`num_envs` environments stepped together; one that ends is reset within the same step."""
    kind = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
    thunks = [lambda: make_env(args, **options)] * num_envs
    return kind(thunks, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


class Carry(NamedTuple):
    """What one rollout hands to the next."""

    obs: Tensor  # (N, D) raw, to act on next
    episode_start: Tensor  # (N,) bool, it opens an episode
    actor_state: Tensor  # (2, N, H) ahead of it
    critic_state: Tensor  # (2, N, H) ahead of it


@torch.no_grad()
def collect_rollout(
    envs: gym.vector.VectorEnv, agent: Agent, carry: Carry, num_steps: int, chunk_len: int
) -> tuple[SimpleNamespace, Carry]:
    """Act for `num_steps` steps. Only the actor runs; no statistics move.
    Returns the carry and a rollout of obs, next_obs (T, N, D), raw s_t and true successor s'_t;
    episode_start, terminated, truncated (T, N) bool; rewards (T, N); actions as sampled and the
    params of their distribution (T, N, ...); actor_state (chunks, 2, N, H) ahead of each training
    sequence; episodes that ended, as (step t, return, length)."""
    obs, start, state, critic_state = carry
    rows, states, episodes = [], [], []
    for t in range(num_steps):
        if t % chunk_len == 0:
            states.append(state)
        state = state * ~start[:, None]  # zero where an episode opens
        params, state = agent.actor.step(agent.normalize_obs(obs), state)
        actions = agent.actor.actions.sample(params)
        array, rewards, terminated, truncated, info = envs.step(agent.actor.actions.to_env(actions))
        done = terminated | truncated
        next_obs = successor = torch.as_tensor(array.copy(), device=obs.device)
        if done.any():
            array[done] = np.stack(info["final_obs"][done])  # obs is already the next episode's
            successor = torch.as_tensor(array.copy(), device=obs.device)
            ended = info["final_info"]["episode"]
            episodes += [(t, float(ended["r"][i]), int(ended["l"][i])) for i in done.nonzero()[0]]
        scalars = torch.from_numpy(np.stack((rewards, terminated, truncated), dtype=np.float32))
        rows.append((obs, successor, start, actions, params, scalars))
        obs, start = next_obs, torch.as_tensor(done, device=obs.device)
    *columns, scalars = (torch.stack(x) for x in zip(*rows))
    rewards, terminated, truncated = scalars.to(obs.device).unbind(1)
    rollout = SimpleNamespace(episodes=episodes, actor_state=torch.stack(states), rewards=rewards)
    rollout.obs, rollout.next_obs, rollout.episode_start, rollout.actions, rollout.params = columns
    rollout.terminated, rollout.truncated = terminated.bool(), truncated.bool()
    return rollout, Carry(obs, start, state, critic_state)


# ------------------------------------------------------------------------------------------- update
@torch.no_grad()
def prepare_batch(
    agent: Agent, rollout: SimpleNamespace, carry: Carry, args: Args
) -> tuple[SimpleNamespace, Carry, dict[str, Tensor]]:
    """Values, advantages and targets of a rollout; return statistics and value heads move.
    The order matters: decode everything with the old statistics, take in the targets, rescale the
    heads in the same moment, express the old values in the new units (van Hasselt et al. 2016). The
    critics' own values are taken in as well: the scale of targets alone falls to 1e-4 where they do
    not vary, which puts a critic that is not there yet thousands of standard deviations away.
    Returns the batch, whose tensors (L, M, ...) and states (2, M, H) have the training sequence on
    axis 1; the carry with the critics' state after the rollout; metrics."""
    dist, moments = agent.dist, agent.return_moments
    seen = copy.copy(rollout)
    seen.obs, seen.next_obs = map(agent.normalize_obs, (rollout.obs, rollout.next_obs))
    passed = agent.critic.over_rollout(seen, carry.critic_state, args.chunk_len)
    *features, critic_states, critic_state = passed
    outputs, next_outputs = (agent.critic.values(x) for x in features)  # (C, T, N, K)
    reduced, next_reduced = dist.reduce_twins(outputs), dist.reduce_twins(next_outputs)
    values = moments.denormalize(dist.mean(reduced))  # (T, N)
    next_values = moments.denormalize(dist.mean(next_reduced))
    ends = (rollout.terminated, rollout.truncated)
    raw, returns = gae(rollout.rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    advantages = normalize_advantages(raw) if args.norm_adv else raw
    targets = returns[..., None]  # (T, N, J), one sample

    twins = moments.denormalize(dist.mean(outputs))  # (C, T, N), in the task's units
    facts = dist.describe(reduced, args.cvar_alpha)
    p10, p50, p90, tail = (moments.denormalize(facts[key]) for key in ("p10", "p50", "p90", "cvar"))
    metrics = {
        "value/p10": p10.mean(), "value/p50": p50.mean(), "value/p90": p90.mean(),
        "value/predicted_returns": torch.stack([p10, p50, p90]), "cvar/predicted": tail.mean(),
        "value/std_predicted": (facts["std"] * moments.std).mean(),
        "value/bias": (values - returns).mean(), "value/std_target": returns.std(correction=0),
        "losses/explained_variance": explained_variance(values, returns),
        "twin/abs_difference": (twins[0] - twins[-1]).abs().mean(),
        "twin/critic1_is_min": (twins[0] <= twins[-1]).float().mean(),
        "adv/std_raw": raw.std(correction=0), "adv/abs_max": advantages.abs().max(),
        "adv/mean_raw": raw.mean(), "data/truncated_fraction": rollout.truncated.float().mean(),
    }  # fmt: skip

    before = copy.deepcopy(moments)
    if args.norm_returns:
        moments.update(torch.cat((targets.flatten(), values.flatten())))
    outputs, old = dist.carry_statistics(agent.critic, outputs, before, moments)
    shift = moments.denormalize(dist.mean(outputs)) - twins  # (C, T, N)
    metrics |= {"norm/return_mean": moments.mean, "norm/return_std": moments.std}
    metrics |= {"norm/value_shift": shift.abs().mean()}
    metrics |= dist.metrics(outputs, moments.normalize(targets))

    policy = agent.actor.actions.distribution(rollout.params)
    batch = {
        "obs": seen.obs, "episode_start": rollout.episode_start, "actions": rollout.actions,
        "params": rollout.params, "log_probs": policy.log_prob(rollout.actions),
        "targets": dist.encode_targets(moments.normalize(targets)),
        "old": old.movedim(0, 2), "advantages": advantages,
    }  # fmt: skip
    batch = {key: x.unflatten(0, (-1, args.chunk_len)) for key, x in batch.items()}
    batch |= {"actor_state": rollout.actor_state, "critic_state": critic_states}  # (chunks, 2, ...)
    batch = SimpleNamespace(**{key: x.transpose(0, 1).flatten(1, 2) for key, x in batch.items()})
    return batch, carry._replace(critic_state=critic_state), metrics


def minibatches(batch: SimpleNamespace, num_minibatches: int) -> Iterator[SimpleNamespace]:
    """One epoch: all training sequences once, in a fresh random order, split evenly.
    A sequence is one environment's unbroken stretch of steps; the LSTM starts it from its state."""
    order = torch.randperm(batch.advantages.shape[1]).to(batch.advantages.device)
    for columns in order.chunk(num_minibatches):
        yield SimpleNamespace(**{k: x.index_select(1, columns) for k, x in vars(batch).items()})


def update(
    agent: Agent, optimizer: torch.optim.Adam, batch: SimpleNamespace, args: Args, ent_coef: float
) -> dict[str, float]:
    """Train on one rollout for `update_epochs` epochs, fewer where the policy moves too far.
    The exact KL(old || new) of a minibatch is tested ahead of its step; the first one larger than
    `target_kl` ends the update. Returns metrics: means over all minibatches evaluated, the one that
    ended the update included; `grad/*` over the steps taken."""
    actions, nets, rows, norms = agent.actor.actions, (agent.actor, agent.critic), [], []
    epochs = (minibatches(batch, args.num_minibatches) for _ in range(args.update_epochs))
    for mb in itertools.chain.from_iterable(epochs):
        policy = actions.distribution(agent.actor(mb.obs, mb.actor_state, mb.episode_start))
        log_ratio = (policy.log_prob(mb.actions) - mb.log_probs).flatten()
        advantages, entropy = mb.advantages.flatten(), policy.entropy()
        pg_loss, approx_kl, clipfrac = clipped_policy_loss(log_ratio, advantages, args.clip_coef)
        h_loss = entropy_loss(entropy, ent_coef, args.min_entropy, args.min_entropy_penalty)
        outputs = agent.critic(mb.obs, mb.critic_state, mb.episode_start)  # (C, L, M, K)
        losses, clipped = agent.dist.loss(outputs, mb.targets, mb.old.movedim(2, 0))  # (C, L, M)
        v_losses = losses.mean((1, 2))  # (C,)
        loss = pg_loss + h_loss + args.vf_coef * v_losses.mean()
        with torch.no_grad():
            kl = kl_divergence(actions.distribution(mb.params), policy).mean()
            ratio = log_ratio.exp()
            row = {
                "losses/policy_loss": pg_loss, "losses/value_loss": v_losses.mean(),
                "losses/entropy": entropy.mean(), "losses/approx_kl": approx_kl,
                "losses/clipfrac": clipfrac, "value/clip_fraction": clipped.mean(),
                "twin/loss_1": v_losses[0], "twin/loss_2": v_losses[-1],
                "policy/ratio_mean": ratio.mean(), "policy/ratio_std": ratio.std(correction=0),
                "policy/kl_exact": kl,
                "policy/ratio_first_minibatch_error": (ratio - 1).abs().max(),
            }  # fmt: skip
            rows.append(torch.stack(list(row.values())))
        if args.target_kl is not None and kl > args.target_kl:
            break
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([get_total_norm([p.grad for p in net.parameters()]) for net in nets])
        norms.append(torch.stack((norm.norm(), *norm)))
        clip_grads_with_norm_(agent.parameters(), args.max_grad_norm, norms[-1][0])
        optimizer.step()

    table = torch.stack(rows)
    metrics = dict(zip(row, table.mean(0).tolist()))
    metrics["policy/kl_max"] = float(table[:, -2].max())
    metrics["policy/ratio_first_minibatch_error"] = float(table[0, -1])  # 0 but for rounding
    metrics["policy/epochs_done"] = len(norms) / args.num_minibatches
    metrics["policy/stopped_early"] = float(len(norms) < len(rows))
    means = torch.stack(norms).mean(0).tolist() if norms else (0.0, 0.0, 0.0)
    return metrics | dict(zip(("grad/norm", "grad/actor", "grad/critic"), means))


# ------------------------------------------------------------------------ checkpoint and evaluation
def build_agent(args: Args) -> Agent:
    """A fresh agent for the task, whose spaces are read from one environment."""
    env = make_env(args)
    agent = Agent(env.observation_space.shape[0], env.action_space, args)
    env.close()
    return agent.to("cuda" if args.cuda else "cpu")


def load_agent(path: str | Path) -> tuple[Agent, Args]:
    """Agent and flags of a saved run, from its directory or its `checkpoint.pt`, on the CPU."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    args = Args(**{**checkpoint["args"], "cuda": False})
    agent = build_agent(args)
    agent.load_state_dict(checkpoint["agent"])
    return agent, args


def evaluate(agent: Agent, args: Args, video_dir: Path | None = None) -> dict[str, float]:
    """Returns of `eval_episodes` fresh episodes with the mode of the policy, statistics frozen.
    Each environment plays a fixed number of episodes, so that short ones are not preferred. Seeds
    are apart from those of training. Tasks without a time limit are cut at 10,000 steps."""
    num_envs = 1 if video_dir else min(args.num_envs, args.eval_episodes)  # one films them all
    envs = make_envs(args, num_envs, video_dir=video_dir, step_limit=10_000)
    left = np.array([len(range(i, args.eval_episodes, num_envs)) for i in range(num_envs)])
    obs, _ = envs.reset(seed=args.seed + 1_000_000)
    state, episodes = agent.initial_state(num_envs), []
    while left.any():
        action, state = agent.act(obs, state)
        obs, _, terminated, truncated, info = envs.step(action)
        done = terminated | truncated
        for i in (done & (left > 0)).nonzero()[0]:
            episodes.append([info["final_info"]["episode"][key][i] for key in ("r", "l")])
            left[i] -= 1
        state = state * torch.as_tensor(~done, device=state.device)[:, None]
    envs.close()
    returns, lengths = torch.tensor(episodes, dtype=torch.float64).T
    return {
        "eval/return_mean": float(returns.mean()), "eval/length_mean": float(lengths.mean()),
        "eval/return_std": float(returns.std(correction=0)),
        "eval/return_cvar": empirical_cvar(returns, args.cvar_alpha),
    }  # fmt: skip


# ----------------------------------------------------------------------------------------- training
def make_run_dir(args: Args) -> Path:
    """Create <run_dir>/<env_id>__<exp_name>__<seed>__<time> with flags, versions and source."""
    name = re.sub(r"[^\w.-]", "_", f"{args.env_id}__{args.exp_name}__{args.seed}__")
    paths = (Path(args.run_dir, f"{name}{i}") for i in itertools.count(int(time.time())))
    path = next(path for path in paths if not path.exists())
    path.mkdir(parents=True)
    git = [shutil.which("git"), "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if git[0] else ""
    versions = {m.__name__: m.__version__ for m in (torch, gym, np, tyro)}
    content = {"args": asdict(args), "versions": {**versions, "python": sys.version}}
    (path / "args.json").write_text(json.dumps({**content, "commit": commit}, indent=2))
    shutil.copy(__file__, path)
    return path


def train(args: Args) -> dict[str, Any]:
    """Train, save, evaluate. Returns the last value of every logged metric, and `run_dir`."""
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    agent = build_agent(args)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    envs = make_envs(args, args.num_envs)
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0].copy(), device=agent.dist.support.device)
    state = agent.initial_state(args.num_envs)
    carry = Carry(obs, torch.ones_like(obs[:, 0], dtype=torch.bool), state, state)
    run_dir = make_run_dir(args)
    writer = SummaryWriter(str(run_dir))
    logged: dict[str, Any] = {"run_dir": str(run_dir)}

    def log(metrics: dict[str, Any], step: int, histograms: bool = True) -> None:
        for tag, value in metrics.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                logged[tag] = float(value)
                writer.add_scalar(tag, logged[tag], step)
            elif histograms:
                writer.add_histogram(tag, value, step)

    print(f"{args.env_id}: logging to {run_dir}", flush=True)
    terminal, began, shown = sys.stdout.isatty(), time.time(), time.time()
    total, recent = args.num_iterations * args.batch_size, []  # returns of the last 100 episodes
    last_lr = 0.0 if args.anneal_lr else args.learning_rate
    last_ent_coef = args.ent_coef if args.ent_coef_final is None else args.ent_coef_final
    for iteration in range(args.num_iterations):
        progress, step = iteration / args.num_iterations, (iteration + 1) * args.batch_size
        learning_rate = linear_schedule(args.learning_rate, last_lr, progress)
        ent_coef = linear_schedule(args.ent_coef, last_ent_coef, progress)
        optimizer.param_groups[0]["lr"] = learning_rate
        times = [time.time()]
        rollout, carry = collect_rollout(envs, agent, carry, args.num_steps, args.chunk_len)
        times.append(time.time())
        batch, carry, metrics = prepare_batch(agent, rollout, carry, args)
        times.append(time.time())
        metrics |= update(agent, optimizer, batch, args, ent_coef)
        times.append(time.time())
        if args.norm_obs:
            agent.obs_moments.update(rollout.obs)
        for t, episode_return, length in rollout.episodes:
            at = step - (args.num_steps - t - 1) * args.num_envs
            log({"charts/episodic_return": episode_return, "charts/episodic_length": length}, at)
            recent = [*recent[-99:], episode_return]
        if recent:
            metrics["charts/recent_returns"] = torch.tensor(recent, dtype=torch.float64)
            metrics["cvar/empirical"] = empirical_cvar(torch.tensor(recent), args.cvar_alpha)
        metrics["charts/SPS"] = speed = step / (times[-1] - began)
        metrics |= {"charts/learning_rate": learning_rate, "policy/entropy_coef": ent_coef}
        metrics |= zip(("time/rollout", "time/values", "time/update"), np.diff(times))
        log(metrics, step, histograms=step == total or iteration % 10 == 0)
        if args.eval_every and (iteration + 1) % args.eval_every == 0 and step < total:
            log(evaluate(agent, args), step)
        if step == total or times[-1] - shown > (0.2 if terminal else 5):
            shown = times[-1]
            line = f"{step:,} of {total:,} steps ({step / total:.0%})  {speed:,.0f} steps/s  "
            line += f"{(total - step) / speed:,.0f} s left"
            line += f"  return {np.mean(recent):.1f}" if recent else ""
            print(line, end="   \r" if terminal and step < total else "\n", flush=True)

    envs.close()
    state = {"args": asdict(args), "agent": agent.state_dict(), "global_step": total}
    torch.save(state, run_dir / "checkpoint.pt")
    log(evaluate(agent, args, run_dir / "videos" if args.capture_video else None), total)
    mean, std, tail = (logged[f"eval/return_{key}"] for key in ("mean", "std", "cvar"))
    line = f"evaluation of {args.eval_episodes} episodes: return {mean:.1f} +- {std:.1f}, "
    print(f"{line}CVaR_{args.cvar_alpha:g} {tail:.1f}; saved {run_dir / 'checkpoint.pt'}")
    table = {k: v if isinstance(v, int | float) else str(v) for k, v in asdict(args).items()}
    for summary in hparams(table, {"eval/return_mean": mean}):
        writer.file_writer.add_summary(summary)
    writer.close()
    return logged


def main(argv: list[str] | None = None) -> None:
    """Command line: a user's mistake costs one line on stderr and exit code 2."""
    args = tyro.cli(Args, args=argv)
    try:
        train(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
