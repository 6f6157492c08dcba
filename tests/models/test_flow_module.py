"""FlowMatchingModule on velocity fields known in closed form, for both directions of flow time."""

import pytest
import torch
from torch import nn

from lightning_embodied.errors import ConfigError
from lightning_embodied.models import FlowMatchingModule
from tests.models.conftest import ACTION, HORIZON, make_collator, make_samples, make_spec

WIDTH = ACTION + 2


class Known(FlowMatchingModule):
    """Knows the actions of each batch: its velocity is exact wherever the noise was."""

    def build(self, spec):
        self.error = nn.Parameter(torch.zeros(WIDTH))
        self.read = 0

    @property
    def action_width(self):
        return WIDTH

    def observe(self, batch):
        self.read += 1
        targets = self.targets[:, None]

        def velocity(noisy, time):
            time = time[..., None, None]
            exact = (noisy - targets) / time if self.noise_time else (targets - noisy) / (1 - time)
            return exact + self.error

        return velocity


class FromZero(Known):
    noise_time = 0


@pytest.fixture(params=[Known, FromZero])
def policy(request):
    made = request.param(noise_samples_per_observation=3)
    made.spec = make_spec()
    made.configure_model()
    return made


@pytest.fixture
def batch(policy):
    batch = make_collator()(make_samples(4))
    policy.targets = nn.functional.pad(policy.normalized_actions(batch), (0, WIDTH - ACTION))
    return batch


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_denoising_follows_the_field_to_the_actions(policy, batch, steps):
    policy.denoising_steps = steps
    found = policy.sample_actions(batch, noise=torch.randn(4, HORIZON, WIDTH))
    torch.testing.assert_close(found, policy.normalized_actions(batch), rtol=0, atol=1e-5)
    assert policy.read == 1


def test_the_exact_field_has_no_loss_and_draws_share_an_observation(policy, batch):
    time = torch.rand(4, 3) * 0.8 + 0.1
    terms = policy(batch, torch.randn(4, 3, HORIZON, WIDTH), time)
    assert float(terms.mean.detach()) < 1e-6
    assert int(terms.count) == 3 * ACTION * int((~batch.action_is_pad).sum())
    assert policy.read == 1


def test_the_loss_is_the_squared_error_of_the_dimensions_of_the_data(policy, batch):
    noise, time = torch.randn(4, 3, HORIZON, WIDTH), torch.rand(4, 3) * 0.8 + 0.1
    with torch.no_grad():
        policy.error.fill_(0.5)
        policy.error[ACTION:] = 100.0
    terms = policy(batch, noise, time)
    assert float(terms.mean) == pytest.approx(0.25, rel=1e-3)
    terms.total.backward()
    assert not policy.error.grad[ACTION:].any()


def test_numbers_below_one_are_named():
    for option in ("noise_samples_per_observation", "denoising_steps"):
        with pytest.raises(ConfigError, match=rf"Known\({option}"):
            Known(**{option: 0})
