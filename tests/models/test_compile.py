"""Compiled layers of packed policies: one graph for all packs, no breaks, and what the policy computes without."""

import re
from pathlib import Path

import pytest
import torch

from tests.models import conftest, pi_golden
from tests.models.groot import policies as groot

PACKS = ([0, 1, 2, 3], [0, 2], [1, 2, 3], [3, 0, 1])


def small():
    policy, samples = conftest.make_policy(depth=2), conftest.make_samples(4)
    batches = [conftest.make_collator()([samples[i] for i in pack]) for pack in PACKS]
    return policy, batches, [policy.prefix.layers, policy.expert.layers]


def pi05():
    golden = pi_golden.Golden("pi05")
    policy = golden.policy()
    batches = [golden.batch(policy, "mixed", pack) for pack in PACKS]
    towers = policy.model.vision.vision_model.encoder, policy.model.language, policy.model.expert
    return policy, batches, [tower.layers for tower in towers]


def groot_n15():
    policy, samples = groot.make_policy(tune_llm=True), conftest.make_samples(4)
    batches = [groot.make_collator()([samples[i] for i in pack]) for pack in PACKS]
    language, head = policy.model.backbone.eagle_model.language_model, policy.model.action_head
    return policy, batches, [language.model.layers, head.model.transformer_blocks]


def step(policy, batch):
    torch.manual_seed(0)
    policy.zero_grad()
    policy(batch).total.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "compiler"), [(small, "aot_eager"), (pi05, "eager"), (groot_n15, "eager")])
def test_compiled_layers_compute_the_same_for_all_packs(make, compiler):
    policy, batches, stacks = make()
    expected = [step(policy, batch) for batch in batches]
    torch.compiler.reset()
    for layer in [layer for layers in stacks for layer in layers]:
        layer.compile(backend=compiler, fullgraph=True, dynamic=True)
    for number, (batch, values) in enumerate(zip(batches, expected, strict=True)):
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            found = step(policy, batch)
        assert found.keys() == values.keys()
        for name, value in values.items():
            assert (found[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


def test_the_documented_lines():
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "compile" in block]
    policy, _, _ = pi05()
    names = list(policy.state_dict())
    exec(code, {"policy": policy})  # noqa: S102  the page's own lines
    compiled = [name for name, module in policy.named_modules() if module._compiled_call_impl is not None]
    assert len(compiled) == len(policy.model.language.layers) + len(policy.model.expert.layers)
    assert list(policy.state_dict()) == names
