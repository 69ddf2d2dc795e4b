"""The example that builds on the script: values for every term of the reward."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
SMALL = {"num_envs": 3, "num_steps": 40, "num_minibatches": 4, "update_epochs": 2, "hidden_size": 8}


@pytest.fixture
def program():
    """The example."""
    pytest.importorskip("mujoco")
    return importlib.import_module("reward_terms")


@pytest.fixture
def prepared(program):
    """Two rollouts of random actions, the second one with its terms, and an agent for them."""
    args = program.args_of(1, 240, **SMALL)
    envs = program.WithTerms(program.script.make_envs(args))
    torch.manual_seed(0)
    spaces = (envs.single_observation_space, envs.single_action_space)
    agent = program.TermsAgent(*spaces, args, 4)
    with torch.no_grad():
        for p in agent.critic_heads.parameters():
            p.add_(0.3 * torch.randn_like(p))
    obs, _ = envs.reset(seed=[1, 2, 3])
    for _ in range(2):
        rollout, obs = program.script.collect_rollout(envs, agent, obs, args)
        terms = envs.take()
    assert rollout.terminated.any()
    return args, agent, rollout, terms


def test_with_one_term_it_is_the_script(program, tmp_path):
    """Bit for bit the weights of `script.train` with one critic, after two updates."""
    args = program.args_of(3, 240, **SMALL, eval_episodes=0, run_dir=str(tmp_path))
    mine = program.train(args, together=True)
    metrics = program.script.train(args)
    theirs, _ = program.script.load_agent(metrics["run_dir"])
    for name, x in theirs.named_parameters():
        assert torch.equal(x, dict(mine.named_parameters())[name]), name
    assert torch.equal(theirs.value_dist.moments.mean, mine.dists[0].moments.mean)


def test_terms_have_equal_weights_and_the_whole_has_none(program, monkeypatch):
    """The last head only watches."""
    weighed = []

    class Enough(Exception):
        """The first batch is prepared."""

    def prepare_batch(agent, rollout, terms, weights, args):
        weighed.append(weights.tolist())
        raise Enough

    monkeypatch.setattr(program, "prepare_batch", prepare_batch)
    for together in (False, True):
        with pytest.raises(Enough):
            program.train(program.args_of(1, 240, **SMALL), together)
    assert weighed == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0]), [1]]


def test_terms_add_up_to_the_reward(program, prepared):
    """What the task paid, but for the rounding of a sum; also where an episode ended. A term that
    is left out is noticed."""
    _, _, rollout, terms = prepared
    assert terms.shape == (40, 3, 3)
    assert_close(terms.sum(-1), rollout.rewards, rtol=1e-5, atol=1e-5)
    program.check_sum(terms, rollout.rewards)
    with pytest.raises(ValueError, match="off the reward"):
        program.check_sum(terms[..., :2], rollout.rewards)


@pytest.mark.parametrize(
    "flag",
    [
        {"num_critics": 2},
        {"norm_returns": False},
        {"value_target": "sr_lambda"},
        {"cvar_weight": 0.5, "cvar_alpha": 0.5},
        {"async_envs": True},
        {"eval_every": 1},
    ],
    ids=str,
)
def test_flags_that_it_would_ignore_are_refused(program, flag):
    """By name, ahead of everything."""
    args = program.args_of(1, 240, **SMALL, **flag)
    name = next(iter(flag)).replace("_", "-")
    with pytest.raises(program.script.UsageError, match=f"^--{name} .*: this program serves"):
        program.train(args, together=False)


def test_one_distribution_is_not_that_of_all_terms(prepared):
    """What the script's agent says of one distribution is refused here."""
    _, agent, *_ = prepared
    for ask in (lambda: agent.value(None), lambda: agent.predict_returns(None, (0.5,))):
        with pytest.raises(NotImplementedError, match="each term has"):
            ask()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--steps", "9"], "--steps 9: must be at least one rollout, 2048"),
        (["--seeds", "7"], "invalid choice: 7"),
    ],
)
def test_wrong_flags_of_the_program_cost_one_line(program, monkeypatch, capsys, line, words):
    """Ahead of any training."""
    monkeypatch.setattr(sys, "argv", ["reward_terms.py", *line])
    with pytest.raises(SystemExit):
        program.main()
    assert words in capsys.readouterr().err


def test_advantages_of_the_sum_are_the_sum_of_advantages(program, prepared):
    """GAE is linear in rewards and values: with weights of 1 each, and a head for the whole whose
    weight is 0, they are those of the summed rewards and the summed values."""
    args, agent, rollout, terms = prepared
    for dist in agent.dists:
        dist.moments.merge(torch.tensor(2.0), torch.tensor(9.0), weight=1)
    script = program.script
    with torch.no_grad():
        obs, after = agent.normalize_obs(rollout.obs), agent.normalize_obs(rollout.next_obs)
        outputs, later = script.run_critics(agent, rollout, obs, after)
        values = agent.term_values(outputs)[..., :3].sum(-1)
        next_values = agent.term_values(later)[..., :3].sum(-1)
    ends = rollout.terminated, rollout.truncated
    expected, _ = script.gae(terms.sum(-1), values, next_values, *ends, args.gamma, args.gae_lambda)
    whole = torch.cat((terms, rollout.rewards[..., None]), -1)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch = program.prepare_batch(agent, rollout, whole, weights, args)
    assert_close(batch.advantages, expected.flatten())
    assert batch.targets.shape == (120, 4, args.num_atoms)
    assert_close(batch.targets.sum(-1), torch.ones(120, 4))


def test_each_term_has_statistics_of_its_own(program, prepared):
    """A term in another unit moves its own targets alone."""
    args, agent, rollout, terms = prepared
    whole = torch.cat((terms, rollout.rewards[..., None]), -1)
    weights = torch.full((4,), 0.25)
    program.prepare_batch(agent, rollout, whole, weights, args)
    stds = torch.stack([dist.moments.std for dist in agent.dists])
    assert len(stds.unique()) == 4
    other = program.TermsAgent(agent.observation_space, agent.action_dist.space, args, 4)
    other.load_state_dict(
        {k: v for k, v in agent.state_dict().items() if "moments" not in k}, strict=False
    )
    scaled = whole * torch.tensor([1000.0, 1, 1, 1])
    program.prepare_batch(other, rollout, scaled, weights, args)
    assert float(other.dists[0].moments.std / stds[0]) == pytest.approx(1000, rel=0.5)


def test_every_head_learns_its_own_term(program, prepared):
    """All heads get gradients; another target of one term changes those of its head alone."""
    args, agent, rollout, terms = prepared
    whole = torch.cat((terms, rollout.rewards[..., None]), -1)
    batch = program.prepare_batch(agent, rollout, whole, torch.full((4,), 0.25), args)

    def gradients(one):
        agent.zero_grad()
        program.terms_loss(agent, one, args)[0].backward()
        return [head[-1].weight.grad.clone() for head in agent.critic_heads]

    before = gradients(batch)
    assert all(x.abs().max() > 0 for x in before)
    targets = batch.targets.clone()
    targets[:, 1] = targets[:, 1].flip(-1)
    after = gradients(batch._replace(targets=targets))
    assert [not torch.equal(x, y) for x, y in zip(before, after)] == [False, True, False, False]


@pytest.fixture
def kept(program, monkeypatch, tmp_path):
    """A table of its own for the program."""
    table = program.Table(tmp_path / "reward_terms.csv", program.COLUMNS, end="\n")
    monkeypatch.setattr(program, "TABLE", table)
    monkeypatch.setattr(program, "RESULTS", tmp_path)
    return table


@pytest.mark.slow
def test_a_run_and_its_picture(program, kept, monkeypatch, tmp_path, capsys):
    """Both ways at tiny size, of 300 steps the two whole rollouts; a shorter run draws nothing.
    Returns of an episode worked by hand at its end."""
    pytest.importorskip("matplotlib")
    usual = program.args_of
    monkeypatch.setattr(program, "args_of", lambda *given: usual(*given, **SMALL, eval_episodes=2))
    monkeypatch.setattr(program, "STEPS", 300)
    picture = tmp_path / "reward_terms.png"
    first, *_ = program.cells(120)
    kept.append(program.run_one(program.Run(first, 1)))
    assert not picture.exists()
    for cell in program.cells(300):
        kept.append(program.run_one(program.Run(cell, 1)))
    assert picture.stat().st_size > 10_000
    program.report()
    told = [(row["variant"], row["steps"]) for row in kept.rows()]
    assert told == [("terms", "120"), ("terms", "240"), ("one", "240")]
    assert -1 <= float(kept.rows()[0]["correlation"]) <= 1
    lines = (tmp_path / "reward_terms.md").read_text().splitlines()[2:5]
    assert [line[:18] for line in lines] == [
        "| terms | 1 | 240 ", "| one | 1 | 240 | ", "| terms | 1 | 120 ",
    ]  # fmt: skip

    args = program.args_of(1, 240)
    agent = program.train(args, together=False)
    episode = program.play(agent, args, seed=5)
    survived = episode.returns[:, program.TERMS.index("reward_survive")]  # 1 for each step
    np.testing.assert_allclose(survived[:-1], 1 + args.gamma * survived[1:])
    assert episode.values.shape == (len(episode.returns), 4)
    assert episode.known == len(episode.returns) < 1000  # it fell


def test_rows_of_another_length_are_other_runs(program, kept):
    """They are not skipped, and have lines of their own. Steps are those that are done."""
    row = dict.fromkeys(program.COLUMNS, 1) | {"task": "Hopper-v5", "script": program.CATEGORICAL}
    row["flags"] = program.common.spelt_out(program.CATEGORICAL, program.PRESET)
    for steps, score in ((4096, 10), (8192, 50)):
        kept.append(row | {"variant": "terms", "steps": steps, "return_mean": score})
    left = {(run.cell.variant, run.seed) for run in program.missing(5000, [1, 2])}
    assert left == {("terms", 2), ("one", 1), ("one", 2)}
    assert len(program.missing(7000, [1, 2])) == 4
    program.report()
    lines = (program.RESULTS / "reward_terms.md").read_text().splitlines()[2:4]
    assert lines[0].startswith("| terms | 1 | 8192 | 50 | 50 |")
    assert lines[1].startswith("| terms | 1 | 4096 | 10 | 10 |")


def test_rows_of_another_preset_do_not_pass_as_done(program, kept):
    """They have to be taken out first."""
    row = dict.fromkeys(program.COLUMNS, 1) | {"task": "Hopper-v5", "script": program.CATEGORICAL}
    kept.append(row | {"variant": "terms", "steps": 4096, "flags": "--num-steps 8"})
    with pytest.raises(ValueError, match="seed 1 of 4096 steps has --num-steps 8, and --preset"):
        program.missing(5000, [1])


def test_returns_are_told_seed_by_seed(program, kept):
    """Rows come as runs end."""
    row = dict.fromkeys(program.COLUMNS, 1) | {"task": "Hopper-v5", "script": program.CATEGORICAL}
    for seed in (10, 2, 1):
        kept.append(row | {"variant": "one", "seed": seed, "return_mean": seed})
    program.report()
    assert "| 1, 2, 10 |" in (program.RESULTS / "reward_terms.md").read_text()


def test_returns_ahead_of_a_time_limit_are_not_known(program):
    """0.99^298 = 0.05003 and 0.99^299 = 0.0495: the last 298 steps of a thousand lack too much."""
    assert program.known_returns(1000, False, 0.99) == 702
    assert program.known_returns(1000, True, 0.99) == 1000
    assert program.known_returns(200, False, 0.99) == 0
