"""varlen_attention against fp64 dense masked attention, forward and backward, and what it refuses."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_embodied.attention import attention_backends, choose_backend, force_backend, varlen_attention
from lightning_embodied.errors import ConfigError

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def cumulative(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def dense(query, key, value, lengths_q, lengths_k, causal=False, scale=None):
    """One masked softmax over all tokens; independent of the segments' loops in the package."""
    sample_q = torch.repeat_interleave(torch.arange(len(lengths_q)), torch.tensor(lengths_q))
    sample_k = torch.repeat_interleave(torch.arange(len(lengths_k)), torch.tensor(lengths_k))
    seen = sample_q[:, None] == sample_k[None]
    if causal:
        from_end_q = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths_q])
        from_end_k = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths_k])
        seen &= from_end_k[None] >= from_end_q[:, None]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[2] ** -0.5)
    weights = torch.where(seen, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("hqk,khd->qhd", weights, value)


def draw(lengths_q, lengths_k, heads=2, kv_heads=2, dim=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(lengths_q), heads, dim), (sum(lengths_k), kv_heads, dim), (sum(lengths_k), kv_heads, dim)
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


def run(tensors, lengths_q, lengths_k, **options):
    return varlen_attention(
        *tensors, cumulative(lengths_q), cumulative(lengths_k), max(lengths_q), max(lengths_k), **options
    )


@settings(deadline=None, max_examples=90)
@given(
    data=st.data(),
    lengths_q=LENGTHS,
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (4, 1)]),
    causal=st.booleans(),
    backend=st.sampled_from(["cpu-flash", "padded-sdpa", "reference"]),
)
def test_matches_dense_attention_forward_and_backward(data, lengths_q, heads, causal, backend):
    same = data.draw(st.booleans(), label="self-attention")
    number = len(lengths_q)
    lengths_k = lengths_q if same else data.draw(st.lists(st.integers(0, 9), min_size=number, max_size=number))
    tensors = draw(lengths_q, lengths_k, *heads)
    out = run(tensors, lengths_q, lengths_k, causal=causal, backend=backend)
    expected = dense(*tensors, lengths_q, lengths_k, causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad(o, tensors, grad, allow_unused=True) for o in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu-flash", "padded-sdpa"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [2000], [7, 0, 600, 600, 2]])
def test_dtypes_and_long_segments(dtype, tolerance, lengths, backend):
    tensors = draw(lengths, lengths, 2, 1, 16, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, expected = run(tensors, lengths, lengths, backend=backend), dense(*exact, lengths, lengths)
    assert out.dtype == dtype
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()
    grads = torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), exact)
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("backend", ["cpu-flash", "padded-sdpa", "reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, backend):
    lengths_q, lengths_k = [3, 0, 2, 2, 4], [3, 2, 5, 1, 0]
    tensors = draw(lengths_q, lengths_k, 2, 1, 3)
    assert torch.autograd.gradcheck(lambda *t: run(t, lengths_q, lengths_k, causal=causal, backend=backend), tensors)


@settings(deadline=None, max_examples=3)
@given(number=st.integers(1000, 2000), longest=st.integers(1, 2), random=st.randoms(), causal=st.booleans())
def test_thousands_of_segments(number, longest, random, causal):
    lengths = [random.randint(0, longest) for _ in range(number)]
    tensors = draw(lengths, lengths, 2, 1)
    out, expected = run(tensors, lengths, lengths, causal=causal), dense(*tensors, lengths, lengths, causal)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(o.square().sum(), tensors) for o in (out, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu-flash", "padded-sdpa", "reference"])
@pytest.mark.parametrize(("lengths_q", "lengths_k"), [([0], [0]), ([0, 0], [3, 2]), ([3, 2], [0, 0])])
def test_nothing_to_attend_to(backend, lengths_q, lengths_k):
    tensors = draw(lengths_q, lengths_k)
    out = run(tensors, lengths_q, lengths_k, backend=backend)
    assert not out.any()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_scale_of_the_scores(scale):
    tensors = draw([5, 3], [2, 7])
    expected = dense(*tensors, [5, 3], [2, 7], scale=scale)
    for backend in ("cpu-flash", "padded-sdpa", "reference"):
        torch.testing.assert_close(run(tensors, [5, 3], [2, 7], scale=scale, backend=backend), expected)


def test_padding_rows_are_a_segment_of_their_own():
    """FP8 matrix products want a multiple of 16 rows: the rows added change nothing for the others."""
    lengths = [5, 3, 3]
    tensors = draw(lengths, lengths, dtype=torch.float32)
    padded = [torch.cat([tensor, torch.full((5, *tensor.shape[1:]), 7.0)]) for tensor in tensors]
    assert torch.equal(run(padded, [*lengths, 5], [*lengths, 5])[:11], run(tensors, lengths, lengths))


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=8), which=st.integers(0, 7), causal=st.booleans())
def test_samples_never_see_each_other(lengths, which, causal):
    which %= len(lengths)
    tensors = draw(lengths, lengths, 4, 2, 8, torch.float32)
    start = sum(lengths[:which])
    mine = torch.zeros(sum(lengths), dtype=torch.bool)
    mine[start : start + lengths[which]] = True
    other = [torch.where(mine[:, None, None], 100 * tensor + 3, tensor).detach().requires_grad_() for tensor in tensors]
    results = []
    for inputs in (tensors, other):
        out = run(inputs, lengths, lengths, causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[~mine], after[~mine])


def test_repeated_runs_are_bitwise_equal():
    lengths = [31, 31, 8, 31, 100]
    results = []
    for _ in range(3):
        tensors = draw(lengths, lengths, 4, 2, 16, torch.float32)
        out = run(tensors, lengths, lengths)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_strided_views_of_one_projection():
    lengths = [5, 3, 3]
    packed = torch.randn(11, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    views = packed.unbind(1)
    out, expected = run(views, lengths, lengths), dense(*views, lengths, lengths)
    torch.testing.assert_close(out, expected)
    transposed = [view.transpose(1, 2).contiguous().transpose(1, 2) for view in views]
    torch.testing.assert_close(run(transposed, lengths, lengths), expected)


def compiled_equals_eager(compiler, backend, causal):
    """Other packs of other lengths run the graph that the second one made, and give what they give without it."""

    def loss(query, key, value, cu, longest):
        out = varlen_attention(query * 2, key, value, cu, cu, longest, longest, causal=causal, backend=backend)
        return out.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, backend=compiler, fullgraph=True, dynamic=True)
    for number, lengths in enumerate([[4, 7, 7, 1], [9, 2, 3, 8, 5], [3, 3, 6]]):
        tensors, cu, longest = draw(lengths, lengths, 2, 1, 8), cumulative(lengths), max(lengths)
        eager = torch.autograd.grad(loss(*tensors, cu, longest), tensors)
        with torch._dynamo.config.patch(error_on_recompile=number > 1):
            found = torch.autograd.grad(compiled(*tensors, cu, longest), tensors)
        for a, b in zip(found, eager, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["cpu-flash", "padded-sdpa"])
def test_compiles_into_one_graph_for_all_packs(backend, causal):
    compiled_equals_eager("aot_eager", backend, causal)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor_compiles_it():
    compiled_equals_eager("inductor", "cpu-flash", causal=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32)}, "do not cover the tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 7])}, "int32"),
        ({"cu_seqlens_q": torch.tensor([0, 8, 7], dtype=torch.int32)}, "shortest segment -1"),
        ({"cu_seqlens_k": torch.tensor([0, 7], dtype=torch.int32)}, "number of segments"),
        ({"max_seqlen_q": 3}, "below the longest segment"),
        ({"max_seqlen_k": torch.tensor(4)}, "not a Python int"),
        ({"key": torch.zeros(7, 3, 4)}, "Hq a multiple of Hkv"),
        ({"value": torch.zeros(7, 2, 4, dtype=torch.float64), "key": torch.zeros(7, 2, 4)}, "one floating dtype"),
        ({"backend": "flesh"}, "no such attention backend"),
        ({"cu_seqlens_q": [0, 3, 7]}, "list"),
        ({"query": [[0.0]]}, "query is no tensor"),
        ({name: torch.zeros(7, 2, 0) for name in ("query", "key", "value")}, "do not fit each other"),
        ({n: torch.zeros(7, 2, 4, dtype=torch.float8_e4m3fn) for n in ("query", "key", "value")}, "bfloat16"),
        ({"value": torch.zeros(7, 2, 4, device="meta")}, "different devices"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "gives no gradient"),
    ],
)
def test_wrong_arguments_are_named(change, word):
    cu = cumulative([3, 4])
    right = {name: torch.zeros(7, 2, 4) for name in ("query", "key", "value")}
    right |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4, "max_seqlen_k": 4}
    assert varlen_attention(**right).shape == (7, 2, 4)
    with pytest.raises(ConfigError) as caught:
        varlen_attention(**{**right, **change})
    assert word in str(caught.value)


def test_backends_say_why_and_can_be_forced():
    query = torch.zeros(1, 1, 4)
    assert choose_backend(query).name == "cpu-flash"
    with force_backend("reference"):
        assert choose_backend(query).name == "reference"
        assert choose_backend(query, "cpu-flash").name == "cpu-flash"
    assert choose_backend(query).name == "cpu-flash"
    assert choose_backend(torch.zeros(1, 1, 4, device="meta")).name == "padded-sdpa"
    assert all(backend.reason for backend in attention_backends())
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_backend(query, "torch-varlen")
