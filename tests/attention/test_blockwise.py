"""Block-wise attention against the dense mask of openpi (pi0, pi0.5, SmolVLA), forward and backward in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.attention import BlockLayout, PrefixSuffixLayout, varlen_attention
from lightning_embodied.errors import ConfigError

HORIZON = 5
STRUCTURES = {"pi05": (HORIZON,), "pi0": (1, HORIZON), "smolvla": (1,) * HORIZON, "state in prefix": (2, 1, 1, 3)}


def openpi_mask(blocks):
    """`make_att_2d_masks`: token i sees j of its sample if cumsum(att)[j] <= cumsum(att)[i]."""
    sample = torch.tensor([b for b, lengths in enumerate(blocks) for n in lengths for _ in range(n)])
    att = torch.tensor([int(i == 0) for lengths in blocks for n in lengths for i in range(n)])
    block = att.cumsum(0)
    return (sample[:, None] == sample[None]) & (block[None] <= block[:, None])


def masked(query, key, value, mask):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), value)


def tokens(rows, heads=4, kv_heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(rows, n, 4, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    grads = (torch.autograd.grad(out, inputs, grad, allow_unused=True) for out in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=6), min_size=1, max_size=5).filter(
        lambda blocks: sum(map(sum, blocks)) > 0
    ),
    heads=st.sampled_from([(4, 1), (2, 2)]),
)
def test_any_blocks_match_the_dense_mask(blocks, heads):
    inputs = tokens(sum(map(sum, blocks)), *heads)
    assert_same(BlockLayout(blocks).attend(*inputs), masked(*inputs, openpi_mask(blocks)), inputs)


@pytest.mark.parametrize("suffix", STRUCTURES.values(), ids=STRUCTURES)
def test_policies_with_missing_cameras(suffix):
    blocks = [[prefix, *suffix] for prefix in (48 + 7, 16 + 7, 7, 1)]
    inputs = tokens(sum(map(sum, blocks)))
    assert_same(BlockLayout(blocks).attend(*inputs), masked(*inputs, openpi_mask(blocks)), inputs)


@settings(deadline=None, max_examples=40)
@given(
    prefixes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    suffix=st.sampled_from(list(STRUCTURES.values())),
    draws=st.integers(1, 4),
)
def test_shared_prefixes_equal_separate_passes(prefixes, suffix, draws):
    horizon, total = sum(suffix), sum(prefixes)
    layout = PrefixSuffixLayout(prefixes, suffix, draws)
    prefix = tokens(total)[1:]
    rows = tokens(len(prefixes) * draws * horizon, seed=2)
    inputs = [*prefix, *rows]
    out = layout.attend(rows[0], (prefix[0], prefix[1]), (rows[1], rows[2]))
    expected, positions = [], []
    for sample, stop in enumerate(torch.tensor(prefixes).cumsum(0).tolist()):
        mine = [tensor[stop - prefixes[sample] : stop] for tensor in prefix]
        mask = openpi_mask([[prefixes[sample], *suffix]])[prefixes[sample] :]
        for draw in range(draws):
            own = [row[(sample * draws + draw) * horizon :][:horizon] for row in rows]
            keys = [torch.cat(pair) for pair in zip(mine, own[1:], strict=True)]
            expected.append(masked(own[0], *keys, mask))
            positions += range(prefixes[sample], prefixes[sample] + horizon)
    assert layout.position_ids.tolist() == positions
    assert_same(out, torch.cat(expected), inputs)


@pytest.mark.parametrize("suffix", STRUCTURES.values(), ids=STRUCTURES)
def test_a_cached_prefix_gives_what_the_whole_sequence_gives(suffix):
    prefixes = [9, 4, 9]
    blocks = [[prefix, *suffix] for prefix in prefixes]
    query, key, value = tokens(sum(map(sum, blocks)))
    is_prefix = torch.cat([torch.arange(sum(lengths)) < lengths[0] for lengths in blocks])
    whole = BlockLayout(blocks).attend(query, key, value)
    cu = torch.tensor([0, 9, 13, 22], dtype=torch.int32)
    prefix = varlen_attention(query[is_prefix], key[is_prefix], value[is_prefix], cu, cu, 9, 9)
    torch.testing.assert_close(prefix, whole[is_prefix])
    cache = key[is_prefix], value[is_prefix]
    layout = PrefixSuffixLayout(prefixes, suffix)
    rest = layout.attend(query[~is_prefix], cache, (key[~is_prefix], value[~is_prefix]))
    torch.testing.assert_close(rest, whole[~is_prefix])


def test_gradcheck():
    layout = BlockLayout([[3, 1, 2], [2, 1, 1, 1], [0, 2]])
    assert torch.autograd.gradcheck(layout.attend, tokens(13, 2, 1))


def test_other_samples_stay_bitwise_the_same():
    blocks = [[6, 1, 5], [3, 1, 5], [6, 1, 5]]
    layout = BlockLayout(blocks)
    inputs = [tensor.float() for tensor in tokens(33)]
    mine = torch.arange(33) // 12 == 0
    changed = [torch.where(mine[:, None, None], tensor * 50 - 7, tensor) for tensor in inputs]
    assert torch.equal(layout.attend(*inputs)[~mine], layout.attend(*changed)[~mine])


def test_no_tokens():
    assert BlockLayout([[0]]).attend(*tokens(0)).shape == (0, 4, 4)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: BlockLayout([[3, 1], [3, -1]]), r"blocks=…\)\[1\]\[1\]"),
        (lambda: BlockLayout([[float("nan")]]), "no whole number"),
        (lambda: PrefixSuffixLayout([4, -1], [3]), r"prefix_lengths=…\)\[1\]"),
        (lambda: PrefixSuffixLayout([4], [2.5]), "suffix_blocks"),
        (lambda: PrefixSuffixLayout([4], []), "suffix_blocks"),
        (lambda: PrefixSuffixLayout([4], [3], draws=0), "draws"),
    ],
)
def test_lengths_that_are_none_are_named(make, place):
    with pytest.raises(ConfigError, match=place):
        make()


def test_rows_that_do_not_fit_the_layout_are_refused():
    query, key, value = tokens(7)
    with pytest.raises(ConfigError, match="do not cover the tokens"):
        BlockLayout([[3, 3]]).attend(query, key, value)
    with pytest.raises(ConfigError, match="do not cover the tokens"):
        PrefixSuffixLayout([4], [3]).attend(query[:3], (key[:5], value[:5]), (key[:3], value[:3]))


def test_compiles_into_one_graph():
    layout = BlockLayout([[4, 1, 3], [2, 1, 1, 1]])
    inputs = tokens(13)
    compiled = torch.compile(layout.attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), layout.attend(*inputs))
