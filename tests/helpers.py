"""Building blocks of the tests that run the real loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

OF_ONE_SCRIPT = {
    "lstm_hidden_size",
    "seq_len",
    "num_quantiles",
    "num_atoms",
    "target_encoding",
}


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
    }
    foreign = OF_ONE_SCRIPT - script.Args.__dataclass_fields__.keys()
    return script.Args(**{k: v for k, v in (small | flags).items() if k not in foreign})


def make_run(script: ModuleType, env: str, **flags: Any) -> SimpleNamespace:
    """Agent, environments and carry as `train` makes them, with lively heads and statistics."""
    args = small_args(script, env, **flags)
    torch.manual_seed(3)
    agent = script.Agent(args)
    with torch.no_grad():  # fresh heads are nearly constant: every test would pass
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    agent.obs_moments.update(torch.randn(50, agent.obs_moments.mean.numel()) * 3 + 1)
    agent.dist.moments.update(torch.randn(50) * 20 + 30)
    envs = script.make_envs(args, args.num_envs)
    obs = torch.as_tensor(envs.reset(seed=args.seed)[0].copy())
    state = agent.initial_state(args.num_envs)
    start = torch.ones(args.num_envs, dtype=torch.bool)
    carry = (obs, start, state, state)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate)
    return SimpleNamespace(
        script=script, args=args, agent=agent, envs=envs, carry=carry, optimizer=optimizer
    )


def roll(run: SimpleNamespace) -> SimpleNamespace:
    """One rollout; the run's carry moves on, except for the critics' state."""
    run.rollout, run.carry = run.script.collect_rollout(run.envs, run.agent, run.carry, run.args)
    return run.rollout


def prepare(run: SimpleNamespace) -> SimpleNamespace:
    """Rollout and batch; metrics are kept on the run."""
    roll(run)
    run.before = run.carry
    run.batch, run.carry, run.metrics = run.script.prepare_batch(
        run.agent, run.rollout, run.carry, run.args
    )
    return run.batch


@contextmanager
def seen_minibatches(run: SimpleNamespace) -> Iterator[list[SimpleNamespace]]:
    """What `update` trains on inside the block, minibatch by minibatch."""
    original, seen = run.script.Batch, []

    def look(**tensors: torch.Tensor) -> SimpleNamespace:
        seen.append(original(**tensors))
        return seen[-1]

    run.script.Batch = look
    try:
        yield seen
    finally:
        run.script.Batch = original
