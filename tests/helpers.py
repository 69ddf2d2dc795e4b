"""Building blocks of the tests that run the real loop, alike for both scripts."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

OF_ONE_SCRIPT = {
    "lstm_hidden_size",
    "seq_len",
    "num_quantiles",
    "num_atoms",
    "target_encoding",
}


def is_recurrent(script: ModuleType) -> bool:
    """What its rollouts carry on is more than observations."""
    return hasattr(script, "Carry")


def small_args(script: ModuleType, env: str, **flags: Any) -> Any:
    """Flags of a tiny run on a probe; `flags` override."""
    small = {
        "env_id": f"probes:{env}-v0",
        "num_envs": 4,
        "num_steps": 12,
        "total_timesteps": 96,
        "hidden_size": 6,
        "lstm_hidden_size": 5,
        "num_quantiles": 7,
        "num_atoms": 11,
        "num_minibatches": 2,
        "update_epochs": 2,
        "eval_episodes": 3,
        "save_envs": "always",  # to try them out in another process takes seconds
        "value_from": "mean_head",
    }
    foreign = OF_ONE_SCRIPT - script.Args.__dataclass_fields__.keys()
    return script.Args(**{k: v for k, v in (small | flags).items() if k not in foreign})


def make_agent(script: ModuleType, args: Any) -> Any:
    """A fresh agent for the spaces of the task that the flags name."""
    env = script.make_env(args)
    script.close_quietly(env)
    return script.Agent(env.observation_space, env.action_space, args)


def make_run(script: ModuleType, env: str, **flags: Any) -> SimpleNamespace:
    """Agent, environments and carry as `train` makes them, with lively heads and statistics."""
    args = small_args(script, env, **flags)
    torch.manual_seed(3)
    agent = make_agent(script, args)
    with torch.no_grad():  # fresh heads are nearly constant: every test would pass
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    agent.obs_moments.update(torch.randn(50, agent.obs_moments.mean.numel()) * 3 + 1)
    agent.value_dist.moments.update(torch.randn(50) * 20 + 30)
    envs = script.make_envs(args)
    fresh = SimpleNamespace(carried=None, env_seeds=[args.seed + i for i in range(args.num_envs)])
    critic_state = None
    if is_recurrent(script):
        carry, critic_state = script.open_episodes(envs, agent, fresh)
    else:
        carry = script.open_episodes(envs, fresh)
    return SimpleNamespace(
        script=script,
        args=args,
        agent=agent,
        envs=envs,
        carry=carry,
        critic_state=critic_state,
        optimizers=script.make_optimizers(agent, args),
    )


def carried_obs(carry: Any) -> np.ndarray:
    """Observations (N, D) that the next rollout acts on first."""
    return carry if isinstance(carry, np.ndarray) else carry.obs


def roll(run: SimpleNamespace) -> tuple:
    """One rollout; what the run's actor carries moves on."""
    run.rollout, run.carry = run.script.collect_rollout(run.envs, run.agent, run.carry, run.args)
    return run.rollout


def prepare_rollout(run: SimpleNamespace, agent: Any = None, args: Any = None) -> tuple:
    """Batch, critics' state (None in the feed-forward script) and metrics of the last rollout.

    `agent` and `args` may be other ones than the run's.
    """
    agent, args = agent or run.agent, args or run.args
    if is_recurrent(run.script):
        return run.script.prepare_batch(agent, run.rollout, run.critic_state, args)
    batch, metrics = run.script.prepare_batch(agent, run.rollout, args)
    return batch, None, metrics


def prepare(run: SimpleNamespace) -> tuple:
    """Rollout and batch; metrics are kept on the run."""
    roll(run)
    run.batch, run.critic_state, run.metrics = prepare_rollout(run)
    return run.batch


def policy_params(agent: Any, mb: tuple) -> Tensor:
    """Params of the agent's policy on a batch: a graph, in the layout of `mb.params`."""
    if hasattr(mb, "episode_start"):
        return agent.policy_params(agent.actor_body(mb.obs, mb.actor_state, mb.episode_start))
    return agent.policy_params(mb.obs)


def value_outputs(agent: Any, mb: tuple) -> Tensor:
    """Outputs of all critics on a batch, (C, ..., K or K + 1): a graph."""
    if hasattr(mb, "episode_start"):
        return agent.value_outputs(agent.critic_body(mb.obs, mb.critic_state, mb.episode_start))
    return agent.value_outputs(mb.obs)


def old_of_critics(mb: tuple) -> Tensor:
    """What to clip around with the critics' axis in front, (C, ..., one's own)."""
    return mb.old_predictions.movedim(-2, 0)


def predicted_std(dist: Any, outputs: Tensor) -> float:
    """Standard deviation of the predicted distribution, the mean over all states."""
    zeros = dist.point_targets(torch.zeros(outputs.shape[:-1], dtype=torch.float64))
    return float(dist.describe(outputs, zeros)["value/std_predicted"])


def forget_returns(run: SimpleNamespace) -> None:
    """Statistics of returns as a fresh agent has them."""
    moments = run.agent.value_dist.moments
    moments.load_state_dict(type(moments)().state_dict())


def episode_outputs(agent: Any, obs: Tensor) -> Tensor:
    """Outputs (C, T, ...) for one episode of normalised observations (T, D), from its start."""
    if not hasattr(agent, "initial_state"):
        return agent.value_outputs(obs)
    start = torch.zeros(len(obs), 1, dtype=torch.bool)
    features = agent.critic_body(obs[:, None], agent.initial_state(1), start)
    return agent.value_outputs(features)[..., 0, :]


def act(agent: Any, obs: np.ndarray, state: Any = None, **options: Any) -> tuple:
    """Action(s) and what the agent remembers: None in the feed-forward script."""
    if hasattr(agent, "initial_state"):
        return agent.act(obs, state, **options)
    return agent.act(obs, **options), None


def minibatches_ahead(script: ModuleType, batch: tuple, args: Any) -> list[tuple]:
    """What the next `update` trains on, in order: the RNG stays where it stands."""
    with torch.random.fork_rng():
        return list(script.minibatches(batch, args))
