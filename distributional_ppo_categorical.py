"""Feed-forward PPO with twin categorical critics.

    python distributional_ppo_categorical.py                    # CartPole; --help for the flags

`collect_rollout` acts with the actor alone; `prepare_batch` runs the critics once over the rollout
(a return distribution for every state s_t and true successor s'_t), computes GAE from their means
and moves the return statistics (PopArt, as far as fixed atoms allow); `update` minimises

    clipped policy loss - ent_coef * entropy + vf_coef * cross-entropy with the encoded returns

over minibatches of shuffled steps until the KL divergence exceeds `target_kl`. Papers are named
with the functions that follow them. The recurrent sibling, distributional_ppo_lstm.py, differs in
`Body` (an LSTM) and in the value distribution (quantiles); its steps come in unbroken sequences,
which is why steps are called sequences of length 1 here and states have width 0.

Shapes: T steps, N environments, B rows of a minibatch, D observation, K atoms, J target samples,
C critics, H width of the state (0), L steps of a training sequence (1), M sequences of a rollout.
Rewards, values and returns are in the task's units; critics see and predict them normalised."""

import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace as Batch
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import Tensor, nn, optim
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter, summary

VELOCITIES = {  # entries that are zero in the velocity-free tasks of rl-baselines3-zoo
    "CartPoleNoVel": (1, 3), "MountainCarNoVel": (1,), "MountainCarContinuousNoVel": (1,),
    "PendulumNoVel": (2,), "LunarLanderNoVel": (2, 3, 5), "LunarLanderContinuousNoVel": (2, 3, 5),
}  # fmt: skip
LOG_STD_RANGE = (-5.0, 2.0)  # of Gaussian actions: std from 0.0067 to 7.4
STOP: list[int] = []  # SIGTERM or Ctrl-C came: end after this iteration, with a checkpoint
Tensors = tuple[Tensor, ...]


class UsageError(ValueError):
    """A mistake of the user: one line without a traceback, exit code 2."""


def require(condition: Any, message: str) -> None:
    """Raise `UsageError` unless the condition holds."""
    if not condition:
        raise UsageError(message)


@dataclass
class Args:
    """Feed-forward PPO with twin categorical critics."""

    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run directory's name
    seed: int = 1  # seed of environments, weights and sampling, integer >= 0
    torch_deterministic: bool = True  # deterministic cuDNN kernels (CPU runs always repeat exactly)
    cuda: bool = False  # run the networks on the GPU; small ones are faster on the CPU
    torch_threads: int = 1  # CPU threads of torch, integer >= 1; 1 is fastest for small networks
    run_dir: str = "runs"  # directory under which the run directory is created
    eval_episodes: int = 50  # episodes of an evaluation, integer >= 1
    eval_every: int = 0  # iterations between evaluations, integer >= 0; 0: only at the end
    checkpoint_every: int = 100  # iterations between checkpoints, integer >= 0; 0: at the end
    resume: str = ""  # run directory to continue, with its flags; total_timesteps may grow
    evaluate: str = ""  # run directory or checkpoint to evaluate with its flags; trains nothing
    env_id: str = "CartPole-v1"  # gymnasium id, module:id, or a velocity-free id of the zoo
    total_timesteps: int = 50_000  # environment steps of the run, rounded down to whole rollouts
    num_envs: int = 8  # parallel environments, integer >= 1
    num_steps: int = 64  # steps of each environment per rollout, integer >= 1
    masked_obs: tuple[int, ...] = ()  # entries of the observation vector multiplied by zero
    hidden_size: int = 64  # width of all hidden layers, integer >= 1
    activation: Literal["tanh", "relu"] = "relu"  # of all hidden layers
    log_std_init: float = 0.0  # initial log-std of Gaussian actions, in [-5, 2]
    norm_obs: bool = True  # normalise observations by running moments, clipped to +-10
    learning_rate: float = 1e-3  # of Adam, > 0
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount per step, in [0, 1]
    gae_lambda: float = 0.95  # weight of longer returns in GAE, in [0, 1]
    num_minibatches: int = 2  # per epoch; divides num_envs * num_steps
    update_epochs: int = 8  # passes over each rollout, integer >= 1
    norm_adv: bool = True  # normalise advantages over the rollout
    clip_coef: float = 0.2  # clipping range of the probability ratio, > 0
    ent_coef: float = 0.0  # weight of the entropy bonus, per nat, >= 0
    ent_coef_final: float | None = None  # the same at the end of the run, linear; None: constant
    min_entropy: float = 0.0  # floor of the mean entropy, nats; needs min_entropy_penalty > 0
    min_entropy_penalty: float = 0.0  # weight of the shortfall below the floor, per nat, >= 0
    vf_coef: float = 0.5  # weight of the value loss, >= 0
    max_grad_norm: float = 0.5  # clipping norm of the gradient of all parameters, > 0
    target_kl: float | None = None  # stop the update ahead of a step at a larger KL, nats, > 0
    num_critics: Literal[1, 2] = 2  # value heads with parameters of their own
    twin_reduce: Literal["min", "mean", "min_quantile"] = "min"  # how two critics give one value
    norm_returns: bool = True  # critics predict normalised returns (PopArt)
    vf_clip_coef: float = 0.2  # range d of value clipping, in normalised returns, > 0
    # lambda_return: its spread and CVaR are too small; sr_lambda: samples, CVaR is the return's
    value_target: Literal["lambda_return", "sr_lambda"] = "lambda_return"
    cvar_alpha: float = 0.05  # tail mass averaged by CVaR, in [1e-3, 1]; 1 is the mean
    cvar_weight: float = 0.0  # weight of the CVaR advantage against GAE's, in [0, 1]
    # ---- value distribution: categorical (flags) ----
    num_atoms: int = 51  # atoms of each critic, integer >= 2
    v_min: float = -5.0  # smallest atom, in normalised returns
    v_max: float = 5.0  # largest atom, in normalised returns, > v_min
    target_encoding: Literal["two_hot", "hl_gauss"] = "hl_gauss"  # returns as probabilities
    hl_gauss_sigma: float = 0.75  # std of the Gaussian of hl_gauss, in bin widths, in [0.1, 100]
    vf_clip: Literal["none", "mean_only"] = "none"  # clip value changes around the old mean
    BOUNDS: ClassVar = ((2, math.inf, "num_atoms"), (0.1, 100, "hl_gauss_sigma"))
    # ---- end of value distribution ----

    def __post_init__(self) -> None:
        """Derive the sizes; raise `UsageError` with flag, value, bound and remedy."""
        for low, high, names in (
            (1, math.inf, "torch_threads eval_episodes num_envs num_steps num_minibatches"),
            (1, math.inf, "update_epochs hidden_size"),
            (0, math.inf, "eval_every checkpoint_every ent_coef ent_coef_final vf_coef"),
            (0, math.inf, "min_entropy_penalty"), (0, 4e9, "seed"), (1e-3, 1, "cvar_alpha"),
            (1e-12, math.inf, "learning_rate clip_coef max_grad_norm target_kl vf_clip_coef"),
            (0, 1, "gamma gae_lambda cvar_weight"), (-1e9, 1e9, "min_entropy"),
            (*LOG_STD_RANGE, "log_std_init"), *self.BOUNDS,
        ):  # fmt: skip
            for name in names.split():
                value, flag = getattr(self, name), name.replace("_", "-")
                valid = value is None or (low <= value <= high and math.isfinite(value))
                require(valid, f"--{flag} {value}: must be finite and in [{low:g}, {high:g}]")
        self.batch_size = self.num_envs * self.num_steps  # samples of a rollout
        self.num_iterations = self.total_timesteps // self.batch_size  # rollouts, and updates
        self.chunk_len = 1  # steps of a training sequence
        size = "num_envs * num_steps"
        for name, valid, rule in (
            ("num_steps", self.batch_size > 1, f"a rollout, {size}, needs 2 steps"),
            ("total_timesteps", self.num_iterations > 0, f"must be at least one rollout, {size}"),
            ("num_minibatches", self.batch_size % self.num_minibatches == 0,
             f"must divide the rollout, {size}"),
            ("cuda", not self.cuda or torch.cuda.is_available(), "torch sees no GPU; leave it out"),
            ("resume", not self.resume or Path(self.resume).is_dir(), "is not a run directory"),
            ("evaluate", not (self.evaluate and self.resume), "excludes --resume"),
        ):  # fmt: skip
            require(valid, f"--{name.replace('_', '-')} {getattr(self, name)}: {rule}")


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
    No branch on std, which would be discontinuous. Constant input gives zeros, exactly: that is why
    the first entry is subtracted first."""
    shifted = advantages - advantages.flatten()[0]
    centered = shifted - shifted.mean()
    return centered / (centered.square().mean().sqrt() + eps)


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - predictions) / Var(targets), a scalar; 0 where the targets do not vary."""
    variance, residual = targets.var(correction=0), (targets - predictions).var(correction=0)
    varies = (variance > 0) & (targets.max() > targets.min())
    return torch.where(varies, 1 - residual / variance, 0)


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensors:
    """PPO's clipped surrogate; loss, approx_kl and clip fraction, scalars, from (B,) inputs.
        r = exp(clamp(log_ratio, -20, 20)),  log_ratio = log pi_new(a|s) - log pi_old(a|s)
        loss = -mean(min(r * A, clip(r, 1 - eps, 1 + eps) * A))
        approx_kl = mean((r - 1) - log r)                 in nats, >= 0 (Schulman's k3 estimator)
        clip fraction = mean(|r - 1| > eps)
    r itself is not clamped: that would remove the gradient at r >> 1, A < 0.
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
    entropy (B,) in nats; that of Gaussians may be negative, so that a floor of 0 is not neutral."""
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
        starts = {"mean": torch.zeros(shape), "var": torch.ones(shape), "count": torch.zeros(())}
        for name, start in starts.items():
            self.register_buffer(name, start.double())

    @property
    def std(self) -> Tensor:  # the one scale of `normalize` and `denormalize`
        return (self.var + 1e-8).sqrt()

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Take in a batch; all axes ahead of `shape` are samples."""
        x = x.double().reshape(-1, *self.mean.shape)
        past = self.count / (self.count + len(x))  # its weight in the merged moments
        delta = x.mean(0) - self.mean
        self.var = past * self.var + (1 - past) * (x.var(0, correction=0) + past * delta.square())
        self.mean = self.mean + (1 - past) * delta
        self.count = (self.count + len(x)).clamp(max=self.max_count)

    def normalize(self, x: Tensor) -> Tensor:  # keeps the dtype
        return ((x - self.mean) / self.std).to(x.dtype)

    def denormalize(self, z: Tensor) -> Tensor:  # the inverse
        return (z * self.std + self.mean).to(z.dtype)


# ---- value distribution: categorical (functions) -------------------------------------------------
def project_categorical(probs: Tensor, source_atoms: Tensor, target_atoms: Tensor) -> Tensor:
    """Move a distribution to other atoms, (B, K) -> (B, K').
        out[b, j] = sum_i probs[b, i] * max(0, 1 - |clip(source[b, i]) - target[j]| / dz)
    source_atoms (K,) or (B, K), clipped to the support; target_atoms (K',) ascending, equally
    spaced by dz. Mass is kept, and the mean of sources inside the support. Differentiable in probs
    and in source_atoms. Source: Bellemare et al. 2017, algorithm 1."""
    last = len(target_atoms) - 1
    dz = (target_atoms[-1] - target_atoms[0]) / last
    position = ((source_atoms - target_atoms[0]) / dz).clamp(0, last)  # in steps of the index
    left = position.detach().floor().clamp(max=last - 1).nan_to_num()  # the neighbour below
    share, index = (position - left).expand_as(probs), left.long().expand_as(probs)
    out = probs.new_zeros(*probs.shape[:-1], last + 1)
    return out.scatter_add(-1, index, probs * (1 - share)).scatter_add(-1, index + 1, probs * share)


def two_hot(targets: Tensor, atoms: Tensor) -> Tensor:
    """Projection of a point mass, (B,) -> (B, K): split between the two neighbouring atoms."""
    return project_categorical(torch.ones_like(targets)[..., None], targets[..., None], atoms)


def hl_gauss(targets: Tensor, atoms: Tensor, sigma: float) -> Tensor:
    """Mass of N(target, sigma^2) in each atom's bin over that in all bins, (B,) -> (B, K).
    Atoms are bin centres. Targets are clamped to [atoms[0], atoms[-1]] first: far outside, no bin
    holds any mass in floating point. Source: Imani & White 2018; Farebrother et al. 2024."""
    half = (atoms[-1] - atoms[0]) / (len(atoms) - 1) / 2
    edges = torch.cat((atoms - half, atoms[-1:] + half))
    z = (edges - targets.clamp(atoms[0], atoms[-1])[..., None]) / (sigma * math.sqrt(2))
    cdf = torch.erf(z)  # twice the CDF, minus 1
    return cdf.diff(dim=-1) / (cdf[..., -1:] - cdf[..., :1])


def categorical_cross_entropy(target_probs: Tensor, logits: Tensor) -> Tensor:
    """-sum_k target_probs log_softmax(logits), in nats, (B, K) -> (B,). Source: Bellemare 2017."""
    return -(target_probs * logits.log_softmax(-1)).sum(-1)


def clip_categorical(probs: Tensor, old_values: Tensor, clip_delta: float, atoms: Tensor) -> Tensor:
    """Predictions whose mean moved no further than d = clip_delta from the old one, (B, K).
        m = sum(p z);  atoms shifted by clamp(m - m_old, -d, d) + m_old - m, projected back
    The shape is kept. old_values (B,) are m_old as stored with the rollout. PPO's scalar value
    clipping, from the reference code of Schulman et al. 2017, for a distribution."""
    mean = (probs * atoms).sum(-1)
    shift = (mean - old_values).clamp(-clip_delta, clip_delta) + old_values - mean
    return project_categorical(probs, atoms + shift[..., None], atoms)


def clipped_value_loss(loss: Tensor, loss_clipped: Tensor) -> Tensor:
    """max(loss, loss_clipped) per sample, (B,): for each critic alone, ahead of any averaging."""
    return torch.max(loss, loss_clipped)


def cvar_categorical(probs: Tensor, atoms: Tensor, alpha: float) -> Tensor:
    """Mean of the lower tail of mass alpha, (B, K) -> (B,); the atom at the edge counts in part.
        CVaR_alpha = (1 / alpha) * sum_k z_k min(p_k, max(0, alpha - sum_{i<k} p_i))
    Exact; atoms ascending. Raises ValueError for alpha outside [1e-3, 1].
    Source: Rockafellar & Uryasev 2000."""
    if not 1e-3 <= alpha <= 1:
        raise ValueError(f"cvar: alpha {alpha} is outside [1e-3, 1]")
    below = probs.cumsum(-1) - probs  # mass of the atoms below
    taken = torch.minimum(probs, (alpha - below).clamp(min=0))
    return (taken * atoms).sum(-1) / alpha


def categorical_quantile(probs: Tensor, atoms: Tensor, level: float) -> Tensor:
    """F^-1(level) with each atom's mass spread evenly over its bin, (B, K) -> (B,)."""
    dz = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    cdf = probs.cumsum(-1)
    k = (cdf < level).sum(-1, keepdim=True).clamp(max=len(atoms) - 1)  # the bin of the level
    inside = (level - (cdf - probs).gather(-1, k)) / probs.gather(-1, k).clamp(min=1e-12)
    return (atoms[k] + dz * (inside.clamp(0, 1) - 0.5))[..., 0]


def sr_lambda_probs(rewards: Tensor, next_probs: Tensor, atoms: Tensor, terminated: Tensor,
                    truncated: Tensor, gamma: float, gae_lambda: float,
                    generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
    """Distribution of the return by sample replacement SR(lambda), (T, N, K).
        next_probs(s'_{t+n-1}) on the atoms R^(n) + gamma^n z, projected once
    R^(n) is the sum of n discounted rewards. Every (t, env) draws its n: geometric, 1 - lambda, cut
    where the episode or the rollout ends; all mass is at R^(n) if it terminates there. rewards,
    terminated, truncated (T, N); next_probs (T, N, K) of true successors; atoms (K,) in the units
    of the rewards. After Nam et al. 2021 (GMAC), who replace samples."""
    facts = (rewards, next_probs, atoms, terminated, truncated, gamma, gae_lambda, generator)
    return project_categorical(*sr_lambda_atoms(*facts), atoms)


def sr_lambda_atoms(rewards: Tensor, next_probs: Tensor, atoms: Tensor, terminated: Tensor,
                    truncated: Tensor, gamma: float, gae_lambda: float,
                    generator: torch.Generator | None = None) -> Tensors:  # fmt: skip
    """What `sr_lambda_probs` projects: probabilities and returns, both (T, N, K)."""
    T, ended = len(rewards), terminated | truncated
    ended[-1] = True
    time = torch.arange(T, device=rewards.device)[:, None].expand_as(rewards)
    last = torch.where(ended, time, T).flip(0).cummin(0).values.flip(0)  # step the episode ends at
    draws = torch.rand(rewards.shape, generator=generator, device=rewards.device).clamp(min=1e-30)
    extra = (draws.log() / draws.new_tensor(gae_lambda).log()).abs().clamp(max=T).long()  # n - 1
    at = torch.minimum(time + extra, last)  # t + n - 1
    sums = gae(rewards, 0 * rewards, 0 * rewards, ended, ended, gamma, 1.0)[0]  # to the end
    scale = gamma ** (at - time + 1).to(rewards.dtype)
    beyond = torch.where(at < last, sums.gather(0, (at + 1).clamp(max=T - 1)), 0)
    scaled = (scale * ~terminated.gather(0, at))[..., None] * atoms
    index = at[..., None].expand_as(next_probs)
    return next_probs.gather(0, index), (sums - scale * beyond)[..., None] + scaled


def cvar_advantages_categorical(target_probs: Tensor, probs: Tensor, atoms: Tensor,
                                alpha: float) -> Tensor:  # fmt: skip
    """Advantage of the policy gradient of CVaR_alpha, (T, N); no gradient.
        nu = VaR_alpha(Z(s_t)),  u(z) = nu + min(z - nu, 0) / alpha
        A_t = sum_k target_probs_k u(z_k) - CVaR_alpha(Z(s_t))
    target_probs of the return, probs of Z (T, N, K), on the same atoms (K,). It guards the tail of
    every state's own return distribution, not of the start state's alone. Source: Rockafellar &
    Uryasev 2000."""
    target_probs, probs = target_probs.detach(), probs.detach()
    index = (probs.cumsum(-1) < alpha).sum(-1).clamp(max=len(atoms) - 1)
    nu = (atoms[index] if alpha < 1 else atoms[-1].expand(index.shape))[..., None]
    gain = (target_probs * (nu + (atoms - nu).clamp(max=0) / alpha)).sum(-1)
    return gain - cvar_categorical(probs, atoms, alpha)


class ValueDistribution(nn.Module):
    """What the script asks of a value distribution: probabilities of the atoms `support` (K,).
    Critics' `outputs` (..., K) are logits; atoms are normalised by `moments`; results are in the
    task's units."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.moments = RunningMoments((), max_count=40 * args.batch_size)  # of 10 rollouts
        message = f"--v-min {args.v_min} --v-max {args.v_max}: must be finite, v_min < v_max"
        require(0 < args.v_max - args.v_min < math.inf, message)
        atoms = torch.linspace(args.v_min, args.v_max, args.num_atoms)
        self.register_buffer("support", atoms, persistent=False)

    def mean(self, outputs: Tensor) -> Tensor:  # (..., K) -> (...)
        return self.moments.denormalize(outputs.softmax(-1) @ self.support)

    def describe(self, outputs: Tensor) -> dict[str, Tensor]:
        """Deciles 1, 5 and 9, standard deviation, VaR and CVaR of the distribution, each (...)."""
        probs, z = outputs.softmax(-1), self.moments.denormalize(self.support)
        levels = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "var": self.args.cvar_alpha}
        facts = {key: categorical_quantile(probs, z, level) for key, level in levels.items()}
        std = (probs * (z - (probs @ z)[..., None]).square()).sum(-1).sqrt()
        return facts | {"std": std, "cvar": cvar_categorical(probs, z, self.args.cvar_alpha)}

    def reduce_twins(self, outputs: Tensor) -> Tensor:
        """One distribution from those of C critics, (C, ..., K) -> (..., K), by `twin_reduce`.
        min: of the means (Fujimoto et al. 2018); mean: of the probabilities; min_quantile: the
        elementwise maximum of the CDFs, which is more pessimistic. As logits."""
        if self.args.twin_reduce == "min" or len(outputs) == 1:
            lowest = self.mean(outputs).argmin(0)[None, ..., None]
            return outputs.take_along_dim(lowest, 0)[0]
        probs = outputs.softmax(-1)
        if self.args.twin_reduce == "mean":
            return probs.mean(0).clamp(min=1e-30).log()
        cdf = probs.cumsum(-1).amax(0)
        return cdf.diff(dim=-1, prepend=torch.zeros_like(cdf[..., :1])).clamp(min=1e-30).log()

    def sample_returns(self, rewards: Tensor, next_outputs: Tensor, *facts: Any) -> Tensors:
        """SR(lambda) targets (T, N, J), given what `sr_lambda_probs` takes, and their weights."""
        atoms = self.moments.denormalize(self.support)
        return sr_lambda_atoms(rewards, next_outputs.softmax(-1), atoms, *facts)[::-1]

    def risk_advantages(self, targets: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
        atoms = self.moments.denormalize(self.support)
        facts = (project_categorical(weights, targets, atoms), outputs.softmax(-1), atoms)
        return cvar_advantages_categorical(*facts, self.args.cvar_alpha)

    def encode_targets(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> tuple:
        """Weighted targets (T, N, J) as `loss` wants them, and metrics of this kind alone.
        Here probabilities (T, N, K); the share of mass beyond the outermost atoms."""
        args, z, x = self.args, self.support, self.moments.normalize(targets)
        outside = (weights * ((x < z[0]) | (x > z[-1]))).sum(-1).mean()
        if args.target_encoding == "two_hot":
            return project_categorical(weights, x, z), {"value/outside_support": outside}
        sigma = args.hl_gauss_sigma * (args.v_max - args.v_min) / (args.num_atoms - 1)
        encoded = (weights[..., None] * hl_gauss(x, z, sigma)).sum(-2)
        return encoded, {"value/outside_support": outside}

    def loss(self, outputs: Tensor, targets: Tensor, old: Tensor) -> Tensors:
        """Losses of C critics, (C, ...), and which of them value clipping changed, 0 or 1.
        outputs (C, ..., K) and old means (C, ..., 1): each is clipped around its own; targets
        (..., K) never are."""
        loss = categorical_cross_entropy(targets, outputs)
        if self.args.vf_clip == "none":
            return loss, torch.zeros_like(loss)
        probs = outputs.softmax(-1)
        clipped = clip_categorical(probs, old[..., 0], self.args.vf_clip_coef, self.support)
        loss_clipped = categorical_cross_entropy(targets, clipped.clamp(min=1e-8).log())
        changed = ((clipped - probs).abs() > 1e-5).any(-1)
        return clipped_value_loss(loss, loss_clipped), changed.to(loss.dtype)

    def carry_statistics(self, heads: nn.ModuleList, outputs: Tensor, samples: Tensor) -> Tensors:
        """Take in samples of the returns and adapt the heads in the same moment (PopArt). Returns
        what these now give for `outputs` (C, ..., K), and the old values (C, ..., 1) to clip
        around. Probabilities of fixed atoms cannot be rescaled: the outputs stay, their decoded
        mean jumps, and this update repairs it."""
        mean = self.mean(outputs).double()
        if self.args.norm_returns:
            self.moments.update(samples)
        return outputs, self.moments.normalize(mean)[..., None].to(outputs.dtype)


# ---- end of value distribution -------------------------------------------------------------------
# ----------------------------------------------------------------------------------------- networks
def layer_init(layer: nn.Module, std: float = math.sqrt(2)) -> nn.Module:
    """Orthogonal weights of gain `std` and zero biases, for a linear or an LSTM layer."""
    for name, parameter in layer.named_parameters():
        nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter, std)
    return layer


class ActionDistribution(nn.Module):
    """Distribution of actions given the actor's outputs, for every supported action space.
    Box: diagonal Gaussian, log-std independent of the state; only what the environment receives is
    clipped. Params: mean and log-std (..., 2, A). Discrete, MultiDiscrete, MultiBinary: P
    categorical parts. Params: logits (..., P, largest part), smaller parts padded with -1e9."""

    def __init__(self, space: gym.Space, log_std_init: float) -> None:
        super().__init__()
        self.space, self.log_std = space, None
        if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
            self.num_outputs = math.prod(space.shape)
            self.log_std = nn.Parameter(torch.full((self.num_outputs,), log_std_init))
            return
        known = isinstance(space, Discrete | MultiDiscrete | MultiBinary)
        require(known, f"--env-id: actions of {space} are not supported, only floats and discrete")
        size = 2 if isinstance(space, MultiBinary) else getattr(space, "n", None)
        sizes = torch.as_tensor(np.full(space.shape, getattr(space, "nvec", size))).reshape(-1, 1)
        padding = -1e9 * (torch.arange(int(sizes.max())) >= sizes)  # (P, largest part)
        self.register_buffer("padding", padding, persistent=False)
        self.num_outputs = padding.numel()

    def forward(self, outputs: Tensor) -> Tensor:  # the actor's (..., num_outputs) -> params
        if self.log_std is None:
            return outputs.unflatten(-1, self.padding.shape) + self.padding
        self.log_std.data.clamp_(*LOG_STD_RANGE)  # a projection: the gradient does not vanish
        return torch.stack((outputs, self.log_std.expand_as(outputs)), -2)

    def distribution(self, params: Tensor) -> Distribution:  # joint over the parts
        if self.log_std is None:
            return Independent(Categorical(logits=params, validate_args=False), 1)
        mean, log_std = params.unbind(-2)
        return Independent(Normal(mean, log_std.exp(), validate_args=False), 1)

    def sample(self, params: Tensor, deterministic: bool = False) -> Tensor:
        """A random action, (..., P) or (..., A), or the mode; cheaper than torch.distributions."""
        if self.log_std is None:  # the largest logit after adding Gumbel noise
            noise = 0 if deterministic else torch.empty_like(params).exponential_().log()
            return (params - noise).argmax(-1)
        mean, log_std = params.unbind(-2)
        return mean if deterministic else mean + log_std.exp() * torch.randn_like(mean)

    def to_env(self, actions: Tensor) -> np.ndarray:  # counted from `start`, or clipped
        array = actions.cpu().numpy().reshape(-1, *self.space.shape)
        if self.log_std is None:
            return (array + getattr(self.space, "start", 0)).astype(self.space.dtype)
        return array.clip(self.space.low, self.space.high).astype(self.space.dtype)


class Body(nn.Module):
    """Observations to the outputs of several heads, by two hidden layers. The state has width 0."""

    def __init__(self, obs_dim: int, args: Args) -> None:
        super().__init__()
        self.act = {"tanh": nn.Tanh(), "relu": nn.ReLU()}[args.activation]
        first = layer_init(nn.Linear(obs_dim, args.hidden_size))
        second = layer_init(nn.Linear(args.hidden_size, args.hidden_size))
        self.encoder = nn.Sequential(first, self.act, second, self.act)
        self.num_features, self.state_size = args.hidden_size, 0
        self.heads = nn.ModuleList()

    def forward(self, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:  # (L, N, ...)
        features = self.encoder(obs)
        return torch.stack([head(features) for head in self.heads])  # (heads, L, N, ...)

    def step(self, obs: Tensor, state: Tensor) -> Tensors:  # (N, D), (2, N, 0) -> (N, F), state
        return self.encoder(obs), state

    def over_rollout(self, rollout: Batch, state: Tensor, args: Args) -> Tensors:
        """Features of every s_t and every true successor s'_t of a rollout.
        Returns features, next_features (T, N, F), the states (T, 2, N, 0), and the state. The
        successor is the next row but for the ends of episodes and of the rollout."""
        features = self.encoder(rollout.obs)
        next_features = features.roll(-1, 0)
        end = rollout.terminated | rollout.truncated
        end[-1] = True
        next_features[end] = self.encoder(rollout.next_obs[end])
        return features, next_features, state.expand(len(end), *state.shape), state


class Agent(nn.Module):
    """Actor, critics and the statistics that normalise what they see and predict, for a task."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        env = make_env(args)  # for its spaces
        env.close()
        obs_dim, self.norm_obs = env.observation_space.shape[0], args.norm_obs
        self.actor, self.critic = Body(obs_dim, args), Body(obs_dim, args)
        self.actions = self.actor.actions = ActionDistribution(env.action_space, args.log_std_init)
        width, self.dist = self.actor.num_features, ValueDistribution(args)
        self.actor.heads.append(layer_init(nn.Linear(width, self.actions.num_outputs), 0.01))
        for _ in range(args.num_critics):
            hidden = layer_init(nn.Linear(width, args.hidden_size))
            output = layer_init(nn.Linear(args.hidden_size, len(self.dist.support)), 0.1)
            self.critic.heads.append(nn.Sequential(hidden, self.critic.act, output))
        self.obs_moments = RunningMoments((obs_dim,))
        self.to("cuda" if args.cuda else "cpu")

    def initial_state(self, num_envs: int) -> Tensor:  # (2, N, H), of actor or critic
        return self.dist.support.new_zeros(2, num_envs, self.actor.state_size)

    def normalize_obs(self, obs: Tensor) -> Tensor:  # as the networks see them
        return self.obs_moments.normalize(obs).clamp(-10, 10) if self.norm_obs else obs

    def policy(self, obs: Tensor, state: Tensor) -> Tensors:  # raw (N, D), state -> params, state
        features, state = self.actor.step(self.normalize_obs(obs), state)
        return self.actions(self.actor.heads[0](features)), state

    @torch.no_grad()
    def act(self, obs: np.ndarray, state: Tensor | None = None,
            deterministic: bool = True) -> tuple[np.ndarray, Tensor]:  # fmt: skip
        """Action(s) for `env.step` and the next state; obs (D,) or (N, D) as `make_env` gives them.
        state None opens an episode; deterministic: the mode of the policy, otherwise a sample."""
        batch = torch.as_tensor(np.atleast_2d(obs), device=self.dist.support.device).float()
        state = self.initial_state(len(batch)) if state is None else state
        params, state = self.policy(batch, state)
        actions = self.actions.to_env(self.actions.sample(params, deterministic))
        return (actions[0] if np.ndim(obs) == 1 else actions), state


# ------------------------------------------------------------------------- environments and rollout
def make_env(args: Args) -> gym.Env:
    """One environment: flat float32 observations, masked; episode statistics.
    Raises `UsageError` for an unknown task, a missing package, unflattenable spaces, a bad mask."""
    hidden = VELOCITIES.get(args.env_id.split("-")[0], ())
    try:
        name = args.env_id.replace("NoVel-", "-") if hidden else args.env_id
        env = gym.make(name, disable_env_checker=True)
        space = env.observation_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            env = gym.wrappers.FlattenObservation(env)
        require(isinstance(env.observation_space, Box), f"{space} cannot be flattened")
    except Exception as error:  # of gymnasium, a missing package, the task itself
        raise UsageError(f"--env-id {args.env_id}: {str(error) or repr(error)}") from error
    keep = np.ones(env.observation_space.shape, np.float32)
    for index in (*args.masked_obs, *hidden):
        require(0 <= index < len(keep), f"--masked-obs {index}: must be in 0..{len(keep) - 1}")
        keep[index] = 0
    vector = Box(-np.inf, np.inf, keep.shape, np.float32)
    env = gym.wrappers.TransformObservation(env, lambda obs: obs.astype(np.float32) * keep, vector)
    return gym.wrappers.RecordEpisodeStatistics(env)


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """`num_envs` environments stepped together; one that ends is reset within the same step."""
    makers, mode = [lambda: make_env(args)] * num_envs, gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=mode)


@torch.inference_mode()
def collect_rollout(envs: gym.vector.VectorEnv, agent: Agent, carry: Tensors, args: Args) -> tuple:
    """Act for `num_steps` steps. Only the actor runs; no statistics move.
    carry: raw obs (N, D) to act on next, episode_start (N,), whether it opens an episode; states
    (2, N, H) ahead of it: actor's, zero where one opens, critic's. Returns a rollout and a carry.
    Rollout: obs, next_obs (T, N, D), raw s_t and true successor s'_t; episode_start, terminated,
    truncated (T, N) bool; rewards (T, N); actions and the params of their distribution (T, N, ...);
    actor_state (chunks, 2, N, H) ahead of each training sequence; episodes that ended, (step,
    return, length). Raises RuntimeError for what is not finite. Tensors are of inference mode."""
    names = "obs actions params next_obs rewards terminated truncated".split()
    (obs, start, state, critic_state), acted, stepped, states, episodes = carry, [], [], [], []
    for t in range(args.num_steps):
        states.append(state)
        params, state = agent.policy(obs, state)
        actions = agent.actions.sample(params)
        acted.append((obs, actions, params))
        array, rewards, *ends, info = envs.step(agent.actions.to_env(actions))
        next_obs, done = array.copy(), ends[0] | ends[1]
        if done.any():
            array[done] = np.stack(info["final_obs"][done])  # it held the next episode's first
            ended = info["final_info"]["episode"]
            episodes += [(t, float(ended["r"][i]), int(ended["l"][i])) for i in done.nonzero()[0]]
            state = state * ~torch.as_tensor(done, device=obs.device)[:, None]
        valid = np.isfinite(np.column_stack((array, next_obs, rewards)))
        if not valid.all():
            i = int(valid.all(1).argmin())
            bad = f"not finite: observation {array[i]}, {next_obs[i]}, reward {rewards[i]}"
            raise RuntimeError(f"{bad}, environment {i}, step {t} of the rollout; check the task")
        stepped.append((array.copy(), rewards.astype("f4"), *ends))
        obs = torch.as_tensor(next_obs, device=obs.device)
    tensors = [torch.stack(x) for x in zip(*acted)]
    tensors += [torch.as_tensor(np.stack(x), device=obs.device) for x in zip(*stepped)]
    rollout = Batch(**dict(zip(names, tensors)), episodes=episodes)
    ended = rollout.terminated | rollout.truncated
    rollout.episode_start = torch.cat((start[None], ended[:-1]))
    rollout.actor_state = torch.stack(states[:: args.chunk_len])
    return rollout, (obs, ended[-1], state, critic_state)


# ------------------------------------------------------------------------------------------- update
@torch.no_grad()
def prepare_batch(agent: Agent, rollout: Batch, carry: Tensors, args: Args) -> tuple:
    """Values, advantages and targets of a rollout; return statistics and value heads move.
    The order matters: decode with the old statistics, take in the targets, rescale the heads in the
    same moment, express old values in the new units (van Hasselt et al. 2016). The values are taken
    in, too: where returns do not vary, targets alone let the scale fall to 1e-4, thousands of which
    a critic may be away. Returns the batch, tensors (L, M, ...) and states (2, M, H) with training
    sequences on axis 1; the carry with the critics' state; metrics."""
    dist, seen = agent.dist, Batch(**vars(rollout))
    seen.obs, seen.next_obs = map(agent.normalize_obs, (rollout.obs, rollout.next_obs))
    *features, critic_states, critic_state = agent.critic.over_rollout(seen, carry[-1], args)
    outputs, next_outputs = (torch.stack([h(x) for h in agent.critic.heads]) for x in features)
    reduced, next_reduced = dist.reduce_twins(outputs), dist.reduce_twins(next_outputs)
    twins, values, next_values = map(dist.mean, (outputs, reduced, next_reduced))
    facts = (rollout.terminated, rollout.truncated, args.gamma, args.gae_lambda)
    raw, returns = gae(rollout.rewards, values, next_values, *facts)  # (T, N)
    targets, weights = returns[..., None], torch.ones_like(returns[..., None])  # (T, N, J = 1)
    if args.value_target == "sr_lambda":
        targets, weights = dist.sample_returns(rollout.rewards, next_reduced, *facts)
    if args.cvar_weight > 0 and args.cvar_alpha < 1:
        raw = raw.lerp(dist.risk_advantages(targets, weights, reduced), args.cvar_weight)
    advantages = normalize_advantages(raw) if args.norm_adv else raw

    stats, deciles = dist.describe(reduced), ("p10", "p50", "p90")
    _, realised = gae(rollout.rewards, values, next_values, *facts[:3], 1.0)  # to an end or limit
    mean = (weights * targets).sum(-1)  # two samples have a target's mean and spread
    spread = (weights * (targets - mean[..., None]).square()).sum(-1).sqrt()
    samples = torch.stack((mean - spread, mean + spread, values, values))
    outputs, old = dist.carry_statistics(agent.critic.heads, outputs, samples)
    encoded, extra = dist.encode_targets(outputs, targets, weights)

    metrics = {f"value/{key}": stats[key].mean() for key in deciles} | {
        "value/predicted_returns": torch.stack([stats[key] for key in deciles]),
        "value/realised_returns": realised, "value/std_predicted": stats["std"].mean(),
        "value/bias": (values - returns).mean(), "value/std_target": returns.std(correction=0),
        "cvar/predicted": stats["cvar"].mean(), "cvar/weight": args.cvar_weight,
        "cvar/coverage": (realised < stats["var"]).float().mean(),
        "losses/explained_variance": explained_variance(values, returns),
        "twin/abs_difference": (twins[0] - twins[-1]).abs().mean(),
        "twin/critic1_is_min": (twins[0] <= twins[-1]).float().mean(),
        "adv/std_raw": raw.std(correction=0), "adv/abs_max": advantages.abs().max(),
        "adv/mean_raw": raw.mean(), "data/truncated_fraction": rollout.truncated.float().mean(),
        "norm/return_mean": dist.moments.mean, "norm/return_std": dist.moments.std,
        "norm/value_shift": (dist.mean(outputs) - twins).abs().mean(), **extra,
    }  # fmt: skip
    batch = {
        "obs": seen.obs, "actions": rollout.actions, "targets": encoded, "advantages": advantages,
        "episode_start": rollout.episode_start, "params": rollout.params, "old": old.movedim(0, 2),
        "log_probs": agent.actions.distribution(rollout.params).log_prob(rollout.actions),
    }  # fmt: skip
    batch = {key: x.unflatten(0, (-1, args.chunk_len)) for key, x in batch.items()}
    batch |= {"actor_state": rollout.actor_state, "critic_state": critic_states}  # (chunks, 2, ...)
    batch = Batch(**{key: x.transpose(0, 1).flatten(1, 2).clone() for key, x in batch.items()})
    return batch, (*carry[:-1], critic_state), metrics


def update(agent: Agent, optimizer: optim.Adam, batch: Batch, args: Args, ent_coef: float) -> dict:
    """Train on one rollout for `update_epochs` epochs, fewer where the policy moves too far.
    A minibatch is a random part of the training sequences, each one environment's unbroken stretch
    of steps. Its exact KL(old || new) is tested ahead of its step; the first one larger than
    `target_kl` ends the update. Returns means over the minibatches evaluated, that one included;
    `grad/*` over the steps taken. Raises RuntimeError for what is not finite."""
    nets, rows, norms = [[*net.parameters()] for net in (agent.actor, agent.critic)], [], []
    orders = [torch.randperm(batch.advantages.shape[1]) for _ in range(args.update_epochs)]
    epochs = torch.stack(orders).to(batch.obs.device)
    for columns in (part for epoch in epochs for part in epoch.chunk(args.num_minibatches)):
        mb = Batch(**{key: x.index_select(1, columns) for key, x in vars(batch).items()})
        params = agent.actions(agent.actor(mb.obs, mb.actor_state, mb.episode_start)[0])
        policy = agent.actions.distribution(params)
        log_ratio = (policy.log_prob(mb.actions) - mb.log_probs).flatten()
        advantages, entropy = mb.advantages.flatten(), policy.entropy()
        pg_loss, approx_kl, clipfrac = clipped_policy_loss(log_ratio, advantages, args.clip_coef)
        h_loss = entropy_loss(entropy, ent_coef, args.min_entropy, args.min_entropy_penalty)
        outputs = agent.critic(mb.obs, mb.critic_state, mb.episode_start)  # (C, L, M, K)
        losses, clipped = agent.dist.loss(outputs, mb.targets, mb.old.movedim(2, 0))  # (C, L, M)
        v_losses = losses.mean((1, 2))  # (C,)
        loss = pg_loss + h_loss + args.vf_coef * v_losses.mean()
        with torch.no_grad():
            kl = kl_divergence(agent.actions.distribution(mb.params), policy).mean()
            facts = (pg_loss, v_losses, entropy.mean(), approx_kl, clipfrac, clipped.mean(), kl)
            rows.append([x.detach() for x in (*facts, log_ratio.exp())])
        if args.target_kl is not None and kl > args.target_kl:
            break
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.stack([nn.utils.get_total_norm([p.grad for p in net]) for net in nets]))
        norm = norms[-1].norm()
        if not (loss + norm).isfinite():
            what = f"loss {loss:g}, gradient {norm:g} of minibatch {len(norms) - 1} of the update"
            raise RuntimeError(f"{what}: not finite; try a smaller --learning-rate")
        nn.utils.clip_grads_with_norm_((*nets[0], *nets[1]), args.max_grad_norm, norm)
        optimizer.step()

    pg, v, entropy, approx_kl, clipfrac, clipped, kl, ratio = map(torch.stack, zip(*rows))
    steps = torch.stack(norms or [v.new_zeros(2)])
    metrics = {
        "losses/policy_loss": pg, "losses/value_loss": v, "losses/entropy": entropy,
        "losses/approx_kl": approx_kl, "losses/clipfrac": clipfrac, "twin/loss_1": v[:, 0],
        "twin/loss_2": v[:, -1], "value/clip_fraction": clipped, "policy/kl_exact": kl,
        "policy/kl_max": kl.max(), "policy/ratio_mean": ratio,
        "policy/ratio_std": ratio.std(1, correction=0),
        "policy/ratio_first_minibatch_error": (ratio[0] - 1).abs().max(),  # 0 but for rounding
        "grad/norm": steps.norm(dim=1), "grad/actor": steps[:, 0], "grad/critic": steps[:, 1],
    }  # fmt: skip
    means = {key: float(x.mean()) for key, x in metrics.items()}
    means["policy/epochs_done"] = len(norms) / args.num_minibatches
    return means | {"policy/stopped_early": float(len(norms) < len(rows))}


# ------------------------------------------------------------------------ checkpoint and evaluation
def load_agent(path: str | Path) -> tuple[Agent, Args]:
    """Agent and flags of a saved run, given its directory or `checkpoint.pt`; runs no code from it.
    Does without a missing GPU. Raises `UsageError` for what the script did not write."""
    path = Path(path) / "checkpoint.pt" if Path(path).is_dir() else Path(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        cuda = saved["args"]["cuda"] and torch.cuda.is_available()
        agent = Agent(args := Args(**saved["args"] | {"cuda": cuda}))
        agent.load_state_dict(saved["agent"])
    except Exception as error:  # torch raises half a dozen kinds
        reason = str(error).split(". ")[0]
        raise UsageError(f"{path}: no run or checkpoint of this script: {reason:.200}") from error
    return agent, args


def save_checkpoint(run_dir: Path, args: Args, agent: Agent, run: dict, writer: Any) -> None:
    """Write `checkpoint.pt`: flags, weights and normalisers, and what else an exact resume needs.
    That is `run` and all RNGs, pickled: only --resume opens it. A kill at any instant leaves the
    previous checkpoint or this one: written beside it, synced, renamed, after all events."""
    writer.flush()
    run["rngs"] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    run["rngs"] += [torch.cuda.get_rng_state_all()] if args.cuda else []
    content = {"args": {**asdict(args), "resume": ""}, "agent": agent.state_dict()}
    content |= {"global_step": run["step"], "run": pickle.dumps(run)}
    with (run_dir / "checkpoint.tmp").open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    (run_dir / "checkpoint.tmp").replace(run_dir / "checkpoint.pt")


def evaluate(agent: Agent, args: Args) -> dict[str, float]:
    """Metrics of `eval_episodes` fresh episodes with the mode of the policy, statistics frozen.
    Seeds are apart from training's. Tasks without a time limit are cut at 10,000 steps."""
    env, episodes = make_env(args), []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=None if episode else args.seed + 1_000_000)
        state, ends, rewards = None, [False], []
        while not any(ends) and len(rewards) < (env.spec.max_episode_steps or 10_000):
            action, state = agent.act(obs, state)
            obs, reward, *ends, _ = env.step(action)
            rewards.append(reward)
        episodes.append((sum(rewards), len(rewards)))
    env.close()
    returns, lengths = torch.tensor(episodes, dtype=torch.float64).T
    mean, std = float(returns.mean()), float(returns.std(correction=0))
    tail = empirical_cvar(returns, args.cvar_alpha)
    line = f"return {mean:.1f} +- {std:.1f}, CVaR_{args.cvar_alpha:g} {tail:.1f}"
    print(f"evaluation of {len(returns)} episodes: {line:<50}", flush=True)  # over the progress
    result = {"eval/return_mean": mean, "eval/return_std": std, "eval/return_cvar": tail}
    return result | {"eval/length_mean": float(lengths.mean())}


# ----------------------------------------------------------------------------------------- training
def make_run_dir(args: Args) -> Path:
    """Create <run_dir>/<env_id>__<exp_name>__<seed>__<time> with flags, versions and source."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    path = Path(args.run_dir, name.replace("/", "_").replace(":", "_"))
    source = Path(__file__).resolve()
    commit = subprocess.getoutput(f"git -C '{source.parent}' rev-parse HEAD 2>/dev/null")
    versions = {m.__name__: m.__version__ for m in (torch, gym, np, tyro)} | {"python": sys.version}
    content = {"args": asdict(args), "versions": versions, "commit": commit}
    try:
        path.mkdir(parents=True)
        (path / source.name).write_text(source.read_text())
        (path / "args.json").write_text(json.dumps(content, indent=2))
    except OSError as error:
        raise UsageError(f"--run-dir {args.run_dir}: {error}; choose another directory") from error
    return path


def train(args: Args) -> dict[str, Any]:
    """Train, save, evaluate. Returns the last value of every logged metric, and `run_dir`.
    What goes wrong is raised with a note that names the last checkpoint, and KeyboardInterrupt once
    one is written after `STOP`. Sets RNGs and torch's options, and from now on EzPickle copies."""
    # EzPickle would build a fresh environment where one is pickled: take it as it stands
    gym.utils.EzPickle.__getstate__ = object.__getstate__
    gym.utils.EzPickle.__setstate__ = lambda env, state: vars(env).update(state)
    torch.set_num_threads(args.torch_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False  # acting and training with the same precision
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(args.seed)
    agent = load_agent(args.resume)[0] if args.resume else Agent(args)
    optimizer = optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    run_dir = Path(args.resume) if args.resume else make_run_dir(args)
    envs = make_envs(args, args.num_envs)
    total, checkpoint = args.num_iterations * args.batch_size, run_dir / "checkpoint.pt"
    # what a resumed run continues; `recent` holds the returns of the last 100 episodes
    run: dict[str, Any] = {"step": 0, "seconds": 0.0, "recent": [], "logged": {}, "envs": None}
    if args.resume:
        run = pickle.loads(torch.load(checkpoint, weights_only=True)["run"])
        optimizer.load_state_dict(run["optimizer"])
        setters = (random.setstate, np.random.set_state, torch.set_rng_state)
        for set_state, rng in zip((*setters, torch.cuda.set_rng_state_all), run["rngs"]):
            set_state(rng)
    recent, logged, step = run["recent"], run["logged"], run["step"]
    last_ent_coef = args.ent_coef if args.ent_coef_final is None else args.ent_coef_final

    def log(metrics: dict[str, Any], step: int, histograms: bool = True) -> None:
        for tag, value in metrics.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                logged[tag] = float(value)
                writer.add_scalar(tag, logged[tag], step)
            elif histograms:
                writer.add_histogram(tag, value, step)

    afresh = "" if run["envs"] or step in (0, total) else "; the task's episodes start afresh"
    print(f"{args.env_id}: logging to {run_dir}{afresh}", flush=True)
    try:
        if run["envs"]:
            envs.envs, carry = pickle.loads(run["envs"]).fn, run["carry"]
        else:
            obs = torch.tensor(envs.reset(seed=args.seed + step)[0]).to(agent.dist.support)
            state = agent.initial_state(args.num_envs)
            carry = (obs, torch.ones_like(obs[:, 0], dtype=torch.bool), state, state)
        writer = SummaryWriter(str(run_dir), purge_step=step + 1 if args.resume else None)
        terminal, shown, began = sys.stdout.isatty(), time.time(), time.time() - run["seconds"]
        for iteration in range(step // args.batch_size + 1, args.num_iterations + 1):
            progress, times = step / total, [time.time()]
            lr = linear_schedule(args.learning_rate, 0.0, progress * args.anneal_lr)
            ent_coef = linear_schedule(args.ent_coef, last_ent_coef, progress)
            optimizer.param_groups[0]["lr"] = lr
            rollout, carry = collect_rollout(envs, agent, carry, args)
            times.append(time.time())
            batch, carry, metrics = prepare_batch(agent, rollout, carry, args)
            times.append(time.time())
            metrics |= update(agent, optimizer, batch, args, ent_coef)
            times.append(time.time())
            agent.obs_moments.update(rollout.obs)
            for t, episode_return, length in rollout.episodes:
                ended = {"charts/episodic_return": episode_return, "charts/episodic_length": length}
                log(ended, step + (t + 1) * args.num_envs)
                recent[:] = [*recent[-99:], episode_return]
            step += args.batch_size
            if recent:
                metrics["charts/recent_returns"] = returns = torch.tensor(recent).double()
                metrics["cvar/empirical"] = empirical_cvar(returns, args.cvar_alpha)
            run |= {"step": step, "seconds": times[-1] - began}
            metrics |= {"charts/learning_rate": lr, "policy/entropy_coef": ent_coef}
            metrics["charts/SPS"] = speed = step / run["seconds"]
            metrics |= zip(("time/rollout", "time/values", "time/update"), np.diff(times))
            log(metrics, step, histograms=step == total or iteration % 10 == 1)
            if step == total or times[-1] - shown > (0.2 if terminal else 5):
                shown, now = times[-1], f"  return {np.mean(recent):.1f}" if recent else ""
                line = f"{step:,} of {total:,} steps ({step / total:.0%})  {speed:,.0f} steps/s  "
                line += f"{(total - step) / speed:,.0f} s left{now}"
                print(line, end="   \r" if terminal and step < total else "\n", flush=True)
            if step < total and iteration % (args.eval_every or math.inf) == 0:
                log(evaluate(agent, args), step)
            if step == total or STOP or iteration % (args.checkpoint_every or math.inf) == 0:
                run |= {"optimizer": optimizer.state_dict(), "carry": carry, "envs": None}
                with suppress(Exception):  # each library raises its own, some when it is loaded
                    state = pickle.dumps(gym.vector.utils.CloudpickleWrapper(envs.envs))
                    run["envs"] = pickle.loads(state) and state
                save_checkpoint(run_dir, args, agent, run, writer)
                if STOP:
                    raise KeyboardInterrupt(f"stopped after {step:,} steps; --resume {run_dir}")
        if run.get("evaluated") != total:  # else the run had ended
            log(evaluate(agent, args), total)
            save_checkpoint(run_dir, args, agent, run | {"evaluated": total}, writer)
    except Exception as error:
        last = f"last checkpoint: {checkpoint}" if checkpoint.exists() else "no checkpoint yet"
        error.add_note(f"after {run['step']:,} steps; {last}")
        raise
    finally:
        envs.close()
    logged["run_dir"] = str(run_dir)
    flags = asdict(args) | {"masked_obs": str(args.masked_obs)}
    for entry in summary.hparams(flags, {"eval/return_mean": 0}):
        writer.file_writer.add_summary(entry)
    writer.close()
    return logged


def main(argv: list[str]) -> None:
    """Command line. A user's mistake costs one line on stderr and exit code 2; a fault is raised.
    With --resume and --evaluate the flags are those of the run, few of which may change."""
    free = "total_timesteps eval_episodes eval_every checkpoint_every torch_threads resume evaluate"
    try:
        words = [part for word in argv for part in word.split("=", word[:2] == "--")]
        given = dict(zip(words, [*words[1:], None]))
        path = given.get("--resume", given.get("--evaluate"))
        agent, stored = (None, Args()) if path is None else load_agent(path)
        args = tyro.cli(Args, args=argv, default=stored)  # flags count together with the run's
        if agent:
            new = dict(asdict(args).items() - asdict(stored).items()).keys() - free.split()
            message = f"{', '.join(sorted(new))}: not as in {path}; only these may differ: {free}"
            require(not new, message)
            least, total = stored.total_timesteps, args.total_timesteps
            require(total >= least, f"--total-timesteps {total}: below the run's, {least}")
        if args.evaluate:
            torch.set_num_threads(args.torch_threads)
            evaluate(agent, args)
            return
        for number in (signal.SIGINT, signal.SIGTERM):  # the second one has its default effect
            signal.signal(number, lambda n, _: STOP.append(n) or signal.signal(n, signal.SIG_DFL))
        train(args)
    except (UsageError, KeyboardInterrupt) as error:
        facts = (str(error) or "interrupted", *getattr(error, "__notes__", ()))
        print("error:", "; ".join(facts), file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 130)


if __name__ == "__main__":
    main(sys.argv[1:])
