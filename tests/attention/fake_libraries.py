"""Stand-ins for the attention libraries, which need a GPU: their calls as they are documented, computed in plain torch from nothing but the
arguments. What is not documented to be allowed is refused.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import torch


def attend(q, keys, values):
    """One row: q [N, H, D], the last N of L tokens; keys, values [L, K, D] -> [N, H, D]."""
    group, first = q.shape[1] // keys.shape[1], len(keys) - len(q)
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), keys.float()) / math.sqrt(q.shape[2])
    hidden = torch.arange(len(keys)) > first + torch.arange(len(q)).unsqueeze(1)
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values.float()).to(q.dtype)


def check_int32(*tensors):
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)


def ragged(q, k_pages, v_pages, starts, most_new, lengths, pages):
    """K and V [pages, page size, K, D] -> [T, H, D]"""
    check_int32(starts, lengths, pages)
    assert k_pages.stride(-1) == v_pages.stride(-1) == q.stride(-1) == 1
    bounds = starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(q)
    assert len(bounds) - 1 == len(lengths) == len(pages)
    assert most_new == max(end - start for start, end in itertools.pairwise(bounds))
    outs = []
    for row, length in enumerate(lengths.tolist()):
        used = pages[row, : -(-length // k_pages.shape[1])].long()
        k, v = (tensor[used].flatten(0, 1)[:length] for tensor in (k_pages, v_pages))
        outs.append(attend(q[bounds[row] : bounds[row + 1]], k, v))
    return torch.cat(outs)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, *, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, causal=False
):
    """FlashAttention 3. With new keys it would store them itself; without, `cache_seqlens` counts all keys."""
    assert k is None
    assert v is None
    assert causal
    return ragged(q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, cache_seqlens, page_table)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q=None, max_seqlen_q=None, seqused_k=None, page_table=None, causal=False):
    """FlashAttention 4, of the CuTe DSL. Gives the sums' logarithms too."""
    assert causal
    return ragged(q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, page_table), None


class Wrapper:
    """FlashInfer's wrappers, as far as they are alike. K and V [pages, K, page size, D]."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self._step = None

    def set_plan(self, starts, page_starts, pages, last_page_lens, sizes, dtypes):
        check_int32(starts, page_starts, pages, last_page_lens)
        assert len(starts) == len(page_starts) == len(last_page_lens) + 1
        assert int(page_starts[-1]) == len(pages)
        self._step, self._sizes, self._dtypes = (starts, page_starts, pages, last_page_lens), sizes, dtypes

    def run(self, q, paged_kv_cache):
        k_pages, v_pages = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = self._sizes
        assert q.shape[1:] == (num_heads, head_dim)
        assert k_pages.shape[1:] == v_pages.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert self._dtypes == (q.dtype, k_pages.dtype)
        starts, page_starts, pages, last = self._step
        outs = []
        for row, last_len in enumerate(last.tolist()):
            assert 1 <= last_len <= page_size
            used = pages[page_starts[row] : page_starts[row + 1]].long()
            length = (len(used) - 1) * page_size + last_len
            k, v = (tensor[used].transpose(1, 2).flatten(0, 1)[:length] for tensor in (k_pages, v_pages))
            outs.append(attend(q[starts[row] : starts[row + 1]], k, v))
        return torch.cat(outs)


class PrefillWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
        *, causal=False, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.set_plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes, (q_data_type, kv_data_type))


class DecodeWrapper(Wrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self.set_plan(
            starts, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size), (q_data_type, kv_data_type)
        )


FLASHINFER = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper, BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper)
MODULES = {
    "fa 3": {"flash_attn_interface": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)},
    "fa 4": {
        "flash_attn_interface": None,
        "sgl_kernel": None,
        "sgl_kernel.flash_attn": None,
        "flash_attn": SimpleNamespace(),
        "flash_attn.cute": SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func),
    },
    "fi": {"flashinfer": FLASHINFER},
}
"""What `sys.modules` holds where a library is installed; None: it cannot be imported."""
