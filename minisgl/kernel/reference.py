"""Plain-torch twins of every kernel: what each must compute, readable first. They run anywhere and are the oracle in kernel tests.

They know tensors only: no requests, no scheduler, no model. Called by the layers and backends on a CPU, and by tests.

Letters: T tokens, B rows, H query heads, K KV heads, D head dim, P pages, V vocabulary, E experts, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = [
    "add_rms_norm",
    "apply_rope",
    "experts",
    "kv_rows",
    "paged_attention",
    "rms_norm",
    "route",
    "silu_mul",
    "store_kv",
    "vocab_embedding",
    "write_rows",
]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467): statistics in fp32, the gain applied in x's dtype."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); both [T, hidden] in x's dtype."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, D] by cos and sin [T, D/2] (arXiv 2104.09864, halves layout: dimension i pairs with i + D/2)."""
    half = x.shape[-1] // 2
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x)  # filled in place: on a CPU each operation of a small step costs more than its arithmetic
    torch.mul(first, c, out=out[..., :half]).addcmul_(second, s, value=-1)
    torch.mul(second, c, out=out[..., half:]).addcmul_(first, s)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I], gate in the first half -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def vocab_embedding(ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> torch.Tensor:
    """Rows of this rank's vocabulary block, which starts at `first_id`; foreign ids give zeros. ids [T] -> [T, hidden]."""
    if len(weight) == 0:
        return weight.new_zeros(len(ids), weight.shape[1])
    local = ids - first_id
    is_ours = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(is_ours, local, 0), weight)
    return rows.masked_fill(~is_ours.unsqueeze(-1), 0)


def store_kv(pool: torch.Tensor, values: torch.Tensor, write_slots: torch.Tensor) -> None:
    """Write values [T, K, D] into pool [P, K, page_size, D] at write_slots [T] (page * page_size + offset)."""
    num_kv_heads, page_size = pool.shape[1:3]
    write_rows(pool, values, kv_rows(write_slots, num_kv_heads, page_size))


def kv_rows(write_slots: torch.Tensor, num_kv_heads: int, page_size: int) -> torch.Tensor:
    """int64 [T * K]: where the heads of slots [T] stand in a pool seen as rows [P * K * page_size, D]."""
    pages, offsets = write_slots // page_size, write_slots % page_size
    heads = torch.arange(num_kv_heads, device=write_slots.device)
    return ((pages.unsqueeze(1) * num_kv_heads + heads) * page_size + offsets.unsqueeze(1)).reshape(-1)


def write_rows(pool: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
    """Write values [T, K, D] into pool [P, K, page_size, D] at `rows`, which `kv_rows` gave."""
    pool.view(-1, pool.shape[-1]).index_copy_(0, rows, values.reshape(-1, pool.shape[-1]))


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_rows: torch.Tensor,
    cached_lens: list[int],
    extend_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens over pages, row after row; K/V of the new tokens are stored already.

    q [T, H, D], rows one after the other; pools [P, K, page_size, D]; page_rows [B, pages] ids; lengths in tokens, B each.
    Returns [T, H, D].
    """
    num_heads, num_kv_heads = q.shape[1], k_pool.shape[1]
    out = torch.empty_like(q)
    start = 0
    for row, (cached, extend) in enumerate(zip(cached_lens, extend_lens, strict=True)):
        length = cached + extend
        pages = page_rows[row].long()
        k, v = (pool[pages].transpose(0, 1).flatten(1, 2)[:, :length] for pool in (k_pool, v_pool))
        k, v = (t.repeat_interleave(num_heads // num_kv_heads, dim=0) for t in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[start : start + extend].float(), k.float()) * scale
        visible = torch.arange(length, device=q.device) <= torch.arange(cached, length, device=q.device).unsqueeze(1)
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[start : start + extend] = torch.einsum("hqk,hkd->qhd", probs, v.float()).to(q.dtype)
        start += extend
    return out


def route(router_logits: torch.Tensor, num_experts_per_token: int, is_renormalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (fp32) and ids (int64), [T, k] each, of the k likeliest experts of router logits [T, E]."""
    probs = router_logits.float().softmax(-1)
    weights, ids = probs.topk(num_experts_per_token, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if is_renormalised else weights), ids


def experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum of each token's experts. x [T, hidden]; gate_up [E, 2 I, hidden]; down [E, hidden, I]; weights, ids [T, k] -> [T, hidden]."""
    out = torch.zeros_like(x)
    for expert in torch.bincount(ids.reshape(-1)).nonzero().reshape(-1).tolist():
        tokens, rank = torch.where(ids == expert)
        hidden = silu_mul(F.linear(x[tokens], gate_up[expert]))
        scaled = F.linear(hidden, down[expert]) * weights[tokens, rank].unsqueeze(-1)
        out.index_add_(0, tokens, scaled.to(x.dtype))
    return out
