"""The CUDA backends as far as they go without a GPU: torch's own on fake tensors, FlashAttention's calls on a stand-in.

With a GPU, `benchmarks/gpu_check.py` compares and times the kernels themselves.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_embodied.attention import BlockLayout, PrefixSuffixLayout, attention_backends, varlen_attention
from lightning_embodied.attention.backends import _find_backends
from lightning_embodied.attention.cuda import torch_varlen
from lightning_embodied.attention.reference import varlen_attention_reference
from lightning_embodied.attention.segments import Segments
from lightning_embodied.errors import ConfigError

HOPPER, BLACKWELL, AMPERE, VOLTA = (9, 0), (10, 0), (8, 0), (7, 0)


def exact(query, key, value, cu_q, cu_k, causal, scale):
    return varlen_attention_reference(query, key, value, Segments(cu_q, cu_k, 0, 0, causal, scale))


def flash_attention_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """flash-attn 2.8's signature."""
    return exact(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)


def flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """FlashAttention-3's signature; early versions return the log-sum-exp as well."""
    out = exact(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)
    return out, torch.zeros(q.shape[1], q.shape[0])


def flash_attention_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    return_lse=False,
):  # fmt: skip
    """flash-attn-4 4.0's signature, its last arguments left out."""
    assert qv is None
    return exact(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale), None


FLASH = {
    "flash-attn-2": ("flash_attn", flash_attention_2, AMPERE),
    "flash-attn-3": ("flash_attn_interface", flash_attention_3, HOPPER),
    "flash-attn-4": ("flash_attn.cute", flash_attention_4, BLACKWELL),
}


def install(monkeypatch, name):
    """Puts a stand-in for a FlashAttention package where its import finds it."""
    module, function, capability = FLASH[name]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    found = ModuleType(module)
    found.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, module, found)
    return capability


def by_name(capability):
    return {backend.name: backend for backend in _find_backends(capability)}


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_is_called_as_its_version_wants(monkeypatch, name, causal):
    backend = by_name(install(monkeypatch, name))[name]
    assert backend.available
    query, key = torch.randn(7, 4, 8), torch.randn(9, 2, 8)
    cu_q, cu_k = torch.tensor([0, 3, 7]).int(), torch.tensor([0, 5, 9]).int()
    out = backend.kernel(query, key, key, Segments(cu_q, cu_k, 4, 5, causal, 0.3))
    torch.testing.assert_close(out, exact(query, key, key, cu_q, cu_k, causal, 0.3))
    nothing = torch.zeros(3, dtype=torch.int32)
    assert backend.kernel(query[:0], key, key, Segments(nothing, cu_k, 0, 5, causal, 0.3)).shape == (0, 4, 8)
    assert not backend.kernel(query, key[:0], key[:0], Segments(cu_q, nothing, 4, 0, causal, 0.3)).any()


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        (HOPPER, "flash-attn-3", "flash-attn-3"),
        (HOPPER, "flash-attn-2", "flash-attn-2"),
        (BLACKWELL, "flash-attn-4", "flash-attn-4"),
        (BLACKWELL, "flash-attn-3", "torch-varlen"),
        (AMPERE, "flash-attn-4", "torch-varlen"),
    ],
)
def test_the_kernel_made_for_the_gpu_comes_first(monkeypatch, capability, installed, chosen):
    install(monkeypatch, installed)
    backends = _find_backends(capability)

    def choose(width, dtype=torch.bfloat16):
        with FakeTensorMode():
            query = torch.empty(4, 2, width, dtype=dtype, device="cuda")
            return next(backend.name for backend in backends if backend.takes(query))

    assert choose(64) == chosen
    assert choose(256) == ("torch-varlen" if chosen == "flash-attn-4" else chosen)
    assert choose(512) == choose(60) == choose(64, torch.float32) == "padded-sdpa"


def test_an_old_gpu_and_a_broken_package_are_reasons(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # as flash-attn-4 alone leaves it
    assert "flash_attn_varlen_func" in by_name(AMPERE)["flash-attn-2"].reason
    assert "7.0, not 8.0 or more" in by_name(VOLTA)["torch-varlen"].reason
    assert "8.0, not 9.x" in by_name(AMPERE)["flash-attn-3"].reason


def test_finding_backends_takes_no_gpu():
    assert {backend.name for backend in attention_backends()} == set(by_name(None))
    assert torch.cuda.is_initialized() == torch.cuda.is_available()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_torch_varlen_fits_torch_forward_and_backward_on_meta_tensors(causal, kv_heads):
    shapes = (20, 4, 64), (30, kv_heads, 64), (30, kv_heads, 64)
    tensors = [torch.empty(s, dtype=torch.bfloat16, device="meta", requires_grad=True) for s in shapes]
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    out = torch_varlen(*tensors, Segments(cu, cu, 9, 12, causal, 0.125))
    assert (out.shape, out.dtype) == (tensors[0].shape, torch.bfloat16)
    grads = torch.autograd.grad(out.sum(), tensors)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]


def test_padding_inside_reads_nothing_back_from_the_device():
    """Meta tensors have no values: an `item` or a `tolist` would raise."""
    (padded,) = (backend for backend in attention_backends() if backend.name == "padded-sdpa")
    query = torch.empty(20, 4, 60, device="meta", requires_grad=True)
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    out = padded.kernel(query, query, query, Segments(cu, cu, 9, 9, True, 0.1))
    assert torch.autograd.grad(out.sum(), query)[0].shape == query.shape


def on_cuda(*shapes, dtype=torch.bfloat16):
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


def attend_to_prefix(backend):
    layout = PrefixSuffixLayout([5, 3], [1, 4], draws=2, device="cuda")
    query, *rows = on_cuda((20, 4, 64), (8, 1, 64), (8, 1, 64), (20, 1, 64), (20, 1, 64))
    return layout.position_ids, layout.attend(query, tuple(rows[:2]), tuple(rows[2:]), backend=backend)


def attend_to_blocks(backend):
    layout = BlockLayout([[4, 1, 3], [2, 1, 1, 1]], device="cuda")
    return (layout.attend(*on_cuda((13, 4, 64), (13, 2, 64), (13, 2, 64)), backend=backend),)


@pytest.mark.parametrize("attend", [attend_to_prefix, attend_to_blocks], ids=lambda attend: attend.__name__)
@pytest.mark.parametrize("backend", [None, "torch-varlen", "padded-sdpa"])
def test_layouts_live_where_the_tokens_are(monkeypatch, attend, backend):
    """Fake tensors refuse to mix devices, and say which kernel's rules are broken."""
    monkeypatch.setattr("lightning_embodied.attention.backends._backends", _find_backends(HOPPER))
    with FakeTensorMode():
        results = attend(backend)
    assert {result.device.type for result in results} == {"cuda"}
    assert results[-1].shape[1:] == (4, 64)


def test_a_forced_kernel_says_what_it_cannot_take(monkeypatch):
    monkeypatch.setattr("lightning_embodied.attention.backends._backends", _find_backends(HOPPER))
    with FakeTensorMode():
        (query,), (cu,) = on_cuda((4, 2, 60), dtype=torch.float32), on_cuda((2,), dtype=torch.int32)
        with pytest.raises(ConfigError, match="float32 on cuda, heads of 60"):
            varlen_attention(query, query, query, cu, cu, 4, 4, backend="torch-varlen")
