"""Advantages of the policy gradient of CVaR, from quantiles and from atoms."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import distributional_ppo_categorical as categorical
import distributional_ppo_lstm as lstm


def tensor(data: list) -> Tensor:
    return torch.tensor(data, dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# A lottery: 1 with probability 0.7, else -4; mean -0.5. Ten quantiles, or eleven atoms.
LOTTERY = tensor([-4.0] * 3 + [1.0] * 7).view(1, 1, 10)
ATOMS = torch.linspace(-4, 6, 11).double()
LOTTERY_PROBS = tensor([[[0.3, 0, 0, 0, 0, 0.7, 0, 0, 0, 0, 0]]])
OUTCOMES = [
    # alpha 0.1: nu = CVaR = -4. u(-4) = -4, u(1) = -4: nothing above nu counts. A = 0.
    (-4.0, 0.1, 0.0),
    (1.0, 0.1, 0.0),
    # alpha 0.5: nu = 1, CVaR = (0.3 * -4 + 0.2 * 1) / 0.5 = -2. u(1) = 1, so A = 3;
    # u(-4) = 1 - 5 / 0.5 = -9, so A = -7; in the mean 0.7 * 3 - 0.3 * 7 = 0.
    (1.0, 0.5, 3.0),
    (-4.0, 0.5, -7.0),
    # 6 counts as nu: no more than 1
    (6.0, 0.5, 3.0),
]


@pytest.mark.parametrize(
    ("outcome", "alpha", "expected"),
    # u(-6) = -4 - 2 / 0.1 = -24, which is 20 below the CVaR
    [*OUTCOMES, (-6.0, 0.1, -20.0)],
)
def test_closed_form_of_a_lottery_with_quantiles(outcome, alpha, expected):
    """Rockafellar & Uryasev 2000, theorem 1: nu + min(x - nu, 0) / alpha, less the CVaR.

    A line joins the points at 0.25 and 0.35: the triangle 0.25..0.3..0.35 is antisymmetric and
    cancels in the CVaR at 0.5.
    """
    targets = torch.full((1, 1, 1), outcome).double()
    out = lstm.cvar_advantages(targets, LOTTERY, alpha)
    assert out.shape == (1, 1)
    assert float(out) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("outcome", "alpha", "expected"), OUTCOMES)
def test_closed_form_of_a_lottery_with_atoms(outcome, alpha, expected):
    """Rockafellar & Uryasev 2000, theorem 1: outcomes that lie on atoms."""
    encoded = categorical.two_hot(tensor([[outcome]]), ATOMS)
    out = categorical.cvar_advantages_categorical(encoded, LOTTERY_PROBS, ATOMS, alpha)
    assert out.shape == (1, 1)
    assert float(out) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("probs", "alpha", "expected"),
    [
        # F(0) = 0.25 = alpha: nu = 0, u(2) = 0; CVaR = 0
        ([0.25, 0.75, 0.0], 0.25, 0.0),
        # nu = 2, the last atom, u(2) = 2; CVaR = (0 * .25 + 1 * .25 + 2 * .4) / .9 = 7 / 6
        ([0.25, 0.25, 0.5], 0.9, 2 - 7 / 6),
    ],
)
def test_value_at_risk_of_cvar_advantages_is_an_atom(probs, alpha, expected):
    """Rockafellar & Uryasev 2000: all returns at 2; nu is the least atom z with F(z) >= alpha."""
    target = tensor([[[0.0, 0.0, 1.0]]])
    atoms = tensor([0.0, 1.0, 2.0])
    advantage = categorical.cvar_advantages_categorical(target, tensor([[probs]]), atoms, alpha)
    assert float(advantage) == pytest.approx(expected, abs=1e-12)


def test_alpha_1_is_the_difference_of_means_of_quantiles():
    """Rockafellar & Uryasev 2000: CVaR_1 is the mean, for any targets."""
    targets, quantiles = randn(5, 2, 4), randn(5, 2, 7)
    out = lstm.cvar_advantages(targets, quantiles, 1.0)
    assert_close(out, targets.mean(-1) - quantiles.mean(-1))


def test_alpha_1_is_the_difference_of_means_of_atoms():
    """Rockafellar & Uryasev 2000: CVaR_1 is the mean, for any distributions."""
    atoms = torch.linspace(-2, 3, 9).double()
    targets = randn(5, 2, 9).softmax(-1)
    probs = randn(5, 2, 9).softmax(-1)
    out = categorical.cvar_advantages_categorical(targets, probs, atoms, 1.0)
    assert_close(out, targets @ atoms - probs @ atoms)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.9])
def test_own_quantiles_as_targets_give_no_advantage(alpha):
    """Rockafellar & Uryasev 2000, theorem 1: 0 where alpha K is whole and F^-1 linear."""
    line = 3 * torch.arange(20).double() - 7
    own = line[torch.randperm(20)].expand(2, 3, 20)
    assert_close(lstm.cvar_advantages(own, own, alpha), torch.zeros(2, 3).double())


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.9])
def test_own_atoms_as_targets_give_no_advantage(alpha):
    """Rockafellar & Uryasev 2000, theorem 1: exactly 0 for any distribution on atoms."""
    atoms = torch.linspace(-2, 3, 11).double()
    probs = randn(4, 3, 11).softmax(-1)
    out = categorical.cvar_advantages_categorical(probs, probs, atoms, alpha)
    assert_close(out, torch.zeros(4, 3).double())


def test_targets_of_other_states_are_refused():
    """They would broadcast, and all states of a step would share a target."""
    probs = randn(4, 3, 11).softmax(-1)
    told = r"cvar_advantages_categorical: targets are \(4, 1, 11\) and probs \(4, 3, 11\)"
    with pytest.raises(ValueError, match=told):
        categorical.cvar_advantages_categorical(probs[:, :1], probs, torch.linspace(-2, 3, 11), 0.1)


def test_advantages_of_quantiles_scale_and_shift_with_the_returns():
    """Rockafellar & Uryasev 2000: returns x10 + 3, advantages x10."""
    targets, quantiles = randn(3, 2, 5), randn(3, 2, 9)
    base = lstm.cvar_advantages(targets, quantiles, 0.2)
    out = lstm.cvar_advantages(10 * targets + 3, 10 * quantiles + 3, 0.2)
    assert_close(out, 10 * base)


def test_advantages_of_atoms_scale_and_shift_with_the_returns():
    """Rockafellar & Uryasev 2000: atoms x10 + 3, advantages x10."""
    atoms = torch.linspace(-2, 2, 9).double()
    targets = randn(3, 2, 9).softmax(-1)
    probs = randn(3, 2, 9).softmax(-1)
    base = categorical.cvar_advantages_categorical(targets, probs, atoms, 0.2)
    out = categorical.cvar_advantages_categorical(targets, probs, 10 * atoms + 3, 0.2)
    assert_close(out, 10 * base)


@pytest.mark.parametrize(("targets", "quantiles"), [((4,), (4, 3)), ((4, 1), (4, 1, 3))])
def test_returns_of_all_states_are_no_samples(targets, quantiles):
    """Lambda-returns without an axis of samples would broadcast, and be averaged over states."""
    with pytest.raises(ValueError, match="cvar_advantages: targets are"):
        lstm.cvar_advantages(torch.zeros(targets), torch.zeros(quantiles), 0.2)


def test_advantages_of_quantiles_carry_no_gradient():
    """Ours: a risk term never enters a critic's loss, nor its targets."""
    targets = torch.randn(3, 2, 5, requires_grad=True)
    quantiles = torch.randn(3, 2, 7, requires_grad=True)
    assert not lstm.cvar_advantages(targets, quantiles, 0.2).requires_grad


def test_advantages_of_atoms_carry_no_gradient():
    """Ours: a risk term never enters a critic's loss, nor its targets."""
    targets = torch.randn(3, 2, 5, requires_grad=True).softmax(-1)
    probs = torch.randn(3, 2, 5, requires_grad=True).softmax(-1)
    atoms = torch.linspace(-2, 2, 5)
    assert not categorical.cvar_advantages_categorical(targets, probs, atoms, 0.2).requires_grad
