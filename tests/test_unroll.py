"""Recurrent pass over a rollout in which episodes begin anywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from distributional_ppo_lstm import unroll_lstm

T, N, F, H = 7, 4, 3, 5
PATTERNS = {  # (step, environment) of every step that opens an episode
    "none": [],
    "first step of one": [(0, 2)],
    "first step of all": [(0, n) for n in range(N)],
    "last step of one": [(T - 1, 1)],
    "last step of all": [(T - 1, n) for n in range(N)],
    "all at once": [(3, n) for n in range(N)],
    "consecutive": [(2, 1), (3, 1), (4, 1), (3, 2)],
    "uneven": [(1, 0), (3, 0), (4, 0), (6, 0), (5, 1), (2, 3), (5, 3)],
    "first and last": [(0, 0), (T - 1, 0), (0, 3), (T - 1, 2)],
    "every step of every one": [(t, n) for t in range(T) for n in range(N)],
}
LAST_STARTS = [(1, 4), (2, 3)]  # (environment, step) of the last start in "consecutive"


def starts(pattern: str) -> Tensor:
    """The mask (T, N) of a pattern."""
    episode_start = torch.zeros(T, N, dtype=torch.bool)
    for t, n in PATTERNS[pattern]:
        episode_start[t, n] = True
    return episode_start


State = tuple[Tensor, Tensor]


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.LSTM, Tensor, State]:
    """An LSTM, inputs and an initial state that all want gradients."""
    lstm = nn.LSTM(F, H, dtype=dtype)
    inputs = (2 * torch.randn(T, N, F, dtype=dtype)).requires_grad_()
    h = (2 * torch.rand(1, N, H, dtype=dtype) - 1).requires_grad_()
    c = (3 * torch.randn(1, N, H, dtype=dtype)).requires_grad_()
    return lstm, inputs, (h, c)


def step_by_step(
    lstm: nn.LSTM, inputs: Tensor, state: State, episode_start: Tensor
) -> tuple[Tensor, State]:
    """One call per step, each from a state that is zero where the step opens an episode."""
    outputs = []
    for x, start in zip(inputs, episode_start):
        state = tuple(s * ~start[:, None] for s in state)
        output, state = lstm(x[None], state)
        outputs.append(output)
    return torch.cat(outputs), state


def everything(
    unroll: Callable,
    lstm: nn.LSTM,
    inputs: Tensor,
    state: State,
    episode_start: Tensor,
) -> list[Tensor]:
    """Outputs, final state, and gradients in inputs, initial state and parameters."""
    outputs, (h, c) = unroll(lstm, inputs, state, episode_start)
    results = [outputs, h, c]
    weights = torch.Generator().manual_seed(1)
    loss = 0
    for x in results:
        weight = torch.randn(x.shape, generator=weights, dtype=x.dtype)
        loss = loss + (weight * x).sum()
    leaves = (inputs, *state, *lstm.parameters())
    return results + list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_unroll_equals_the_loop_over_steps(pattern, dtype):
    """Ours: one call gives what the loop gives, gradients too; to 1e-10 in float64."""
    data, episode_start = problem(dtype), starts(pattern)
    actual = everything(unroll_lstm, *data, episode_start)
    expected = everything(step_by_step, *data, episode_start)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert actual[0].shape == (T, N, H)
    assert actual[1].shape == actual[2].shape == (1, N, H)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_unroll_without_gradients_equals_the_loop(pattern):
    """Ours: the kernels that torch picks under no_grad give the same outputs and state."""
    data, episode_start = problem(torch.float32), starts(pattern)
    with torch.no_grad():
        actual = unroll_lstm(*data, episode_start)
        expected = step_by_step(*data, episode_start)
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_unroll_equals_the_loop_for_random_episodes(density):
    """Ours: long and narrow to short and wide, one step and one environment included."""
    for steps, envs in ((1, 1), (1, 6), (2, 3), (19, 1), (13, 6)):
        lstm = nn.LSTM(2, 3, dtype=torch.float64)
        inputs = torch.randn(steps, envs, 2, dtype=torch.float64).requires_grad_()
        state = [torch.randn(1, envs, 3, dtype=torch.float64).requires_grad_() for _ in "hc"]
        episode_start = torch.rand(steps, envs) < density
        data = (lstm, inputs, tuple(state), episode_start)
        actual, expected = everything(unroll_lstm, *data), everything(step_by_step, *data)
        assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_unroll_passes_gradcheck():
    """Ours: finite differences in inputs, initial state and parameters, across two resets."""
    lstm = nn.LSTM(2, 2, dtype=torch.float64)
    inputs = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    state = [torch.rand(1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in "hc"]
    episode_start = torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]]).bool()

    def run(inputs: Tensor, h: Tensor, c: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        outputs, state = unroll_lstm(lstm, inputs, (h, c), episode_start)
        return outputs, *state

    assert torch.autograd.gradcheck(run, (inputs, *state, *lstm.parameters()))


def test_an_episode_sees_nothing_of_the_one_before():
    """Ours: wild inputs and states ahead of a start change no output after it, to 1e-12."""
    lstm, inputs, (h, c) = problem()
    episode_start = starts("consecutive")
    outputs, state = unroll_lstm(lstm, inputs, (h, c), episode_start)
    wild = inputs.detach().clone()
    for column, first in LAST_STARTS:
        wild[:first, column] = 1e6 * (-1) ** column
    large_c = c.detach() * 1e3
    wild_outputs, wild_state = unroll_lstm(lstm, wild, (-h, large_c), episode_start)
    for column, first in LAST_STARTS:
        assert_close(wild_outputs[first:, column], outputs[first:, column], rtol=0, atol=1e-12)
        for x, y in zip(wild_state, state):
            assert_close(x[0, column], y[0, column], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("column", "first"), LAST_STARTS)
def test_an_episode_sends_no_gradient_to_the_one_before(column, first):
    """Ours: what comes after a start has no gradient in inputs and states ahead of it."""
    lstm, inputs, (h, c) = problem()
    outputs, state = unroll_lstm(lstm, inputs, (h, c), starts("consecutive"))
    later = outputs[first:, column].sum() + state[1][0, column].sum()
    gradients = torch.autograd.grad(later, (inputs, h, c))
    assert not gradients[0][:first, column].any()
    assert gradients[0][first:, column].any()
    assert not gradients[1].any()
    assert not gradients[2].any()


def test_environments_do_not_mix():
    """Ours: every column alone gives what it gives among the others, whatever their episodes."""
    lstm, inputs, state = problem()
    episode_start = starts("uneven")
    outputs, (h, c) = unroll_lstm(lstm, inputs, state, episode_start)
    for n in range(N):
        one = slice(n, n + 1)
        own = (state[0][:, one], state[1][:, one])
        column = (inputs[:, one], own, episode_start[:, one])
        alone, (h_alone, c_alone) = unroll_lstm(lstm, *column)
        assert_close(alone, outputs[:, one])
        assert_close((h_alone, c_alone), (h[:, one], c[:, one]))


def test_a_rollout_in_two_parts_equals_the_whole():
    """Ours: the returned state is the one after the last step, ready for the next call."""
    lstm, inputs, state = problem()
    for pattern in PATTERNS:
        episode_start = starts(pattern)
        whole, end = unroll_lstm(lstm, inputs, state, episode_start)
        for cut in (1, 4):
            first, middle = unroll_lstm(lstm, inputs[:cut], state, episode_start[:cut])
            second, last = unroll_lstm(lstm, inputs[cut:], middle, episode_start[cut:])
            assert_close(torch.cat((first, second)), whole)
            assert_close(last, end)


def test_the_fused_call_is_made_in_training_mode(monkeypatch):
    """Ours: cuDNN refuses the backward pass otherwise; the CPU does not care."""
    call = torch.lstm
    seen = []

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(options["train"])
        return call(*args, **options)

    monkeypatch.setattr(torch, "lstm", watched)
    lstm, zero = nn.LSTM(F, H), torch.zeros(1, N, H)
    unroll_lstm(lstm, torch.randn(T, N, F), (zero, zero), starts("uneven"))
    assert seen == [True]


def test_unroll_leaves_its_arguments_alone():
    """Ours: neither inputs, state and mask nor the parameters are changed in place."""
    lstm, inputs, state = problem()
    episode_start = starts("uneven")
    arguments = [inputs, *state, episode_start, *lstm.parameters()]
    before = [x.detach().clone() for x in arguments]
    unroll_lstm(lstm, inputs, state, episode_start)
    assert all(x.equal(y) for x, y in zip(arguments, before))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_unroll_has_no_loop_over_steps(pattern):
    """Ours: speed; at most one LSTM call per run between resets."""
    lstm, inputs, state = problem()
    episode_start = starts(pattern)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        unroll_lstm(lstm, inputs, state, episode_start)
    calls = sum(e.name in ("aten::lstm", "aten::lstm_cell") for e in profile.events())
    assert 1 <= calls <= 1 + int(episode_start[1:].any(1).sum())
