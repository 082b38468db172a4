"""Attention as one would write it by hand: a loop over heads and queries, in float64. The form to believe first.

Same functions, same arguments and same order of steps as `attention.py` (Vaswani et al. 2017, equation 1): scale,
softcap, bias, mask, sink, softmax. Slow on purpose; tests hold the matrix form against it, head by head.

Shapes: H query head, G kv head, Q query, K key, D width of q and k, V width of v; any leading (batch) dims.
"""

import itertools
import math

import torch
from torch import Tensor


def attention_weights(
    q_HQD: Tensor,
    k_GKD: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The weights of every head and query, one row at a time: (..., H, Q, K), float64.

    Arguments and meaning as in `attention.attention_weights`.

    >>> attention_weights(torch.zeros(1, 1, 4), torch.zeros(1, 2, 4))
    tensor([[[0.5000, 0.5000]]], dtype=torch.float64)
    """
    q_BHQD, k_BGKD = _one_batch_dim(q_HQD), _one_batch_dim(k_GKD)
    shape = (*q_HQD.shape[:-1], k_GKD.shape[-2])
    bias_BHQK = None if bias is None else _one_batch_dim(bias.expand(shape))
    mask_BHQK = None if mask is None else _one_batch_dim(mask.expand(shape), keep_bool=True)
    weights_BHQK = torch.zeros(*q_BHQD.shape[:-1], shape[-1], dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, q_BHQD.shape[:3])):
        kv_head = h // (q_BHQD.shape[1] // k_BGKD.shape[1])
        weights_BHQK[b, h, i] = row_weights(
            row_logits(q_BHQD[b, h, i], k_BGKD[b, kv_head], scale, softcap),
            None if bias_BHQK is None else bias_BHQK[b, h, i],
            None if mask_BHQK is None else mask_BHQK[b, h, i],
            None if sinks is None else float(sinks[h]),
        )
    return weights_BHQK.reshape(shape)


def attention_output(weights_HQK: Tensor, v_GKV: Tensor) -> Tensor:
    """Each query's weighted sum of its head's values: (..., H, Q, V), float64.

    >>> attention_output(torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[4.0], [8.0]]]))
    tensor([[[7.]]], dtype=torch.float64)
    """
    weights_BHQK, v_BGKV = _one_batch_dim(weights_HQK), _one_batch_dim(v_GKV)
    output_BHQV = torch.zeros(*weights_BHQK.shape[:-1], v_BGKV.shape[-1], dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, weights_BHQK.shape[:3])):
        kv_head = h // (weights_BHQK.shape[1] // v_BGKV.shape[1])
        for weight, value_V in zip(weights_BHQK[b, h, i], v_BGKV[b, kv_head], strict=True):
            output_BHQV[b, h, i] += weight * value_V
    return output_BHQV.reshape(*weights_HQK.shape[:-1], v_GKV.shape[-1])


def row_logits(q_D: Tensor, k_KD: Tensor, scale: float | None = None, softcap: float | None = None) -> Tensor:
    """One query against the keys of its head: scale * q . k for each, soft-capped where asked; (K,).

    >>> row_logits(torch.ones(4), torch.ones(2, 4))
    tensor([2., 2.])
    """
    scale = 1 / math.sqrt(len(q_D)) if scale is None else scale
    logits_K = torch.stack([scale * torch.sum(q_D * k_D) for k_D in k_KD])
    return logits_K if softcap is None else softcap * torch.tanh(logits_K / softcap)


def row_weights(
    logits_K: Tensor, bias_K: Tensor | None = None, mask_K: Tensor | None = None, sink: float | None = None
) -> Tensor:
    """One row's bias, mask, sink and softmax, spelled out; (K,). A row that may attend to nothing is zeros.

    >>> row_weights(torch.zeros(3), mask_K=torch.tensor([True, True, False]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    logits_K = logits_K if bias_K is None else logits_K + bias_K
    if mask_K is not None:
        logits_K = torch.where(mask_K, logits_K, -torch.inf) if mask_K.dtype == torch.bool else logits_K + mask_K
    largest = max(float(logits_K.max()), -math.inf if sink is None else sink)
    if largest == -math.inf:
        return torch.zeros_like(logits_K)
    exp_K = torch.exp(logits_K - largest)
    return exp_K / (exp_K.sum() + (0.0 if sink is None else math.exp(sink - largest)))


def _one_batch_dim(x: Tensor, keep_bool: bool = False) -> Tensor:
    x = x.detach().reshape(-1, *x.shape[-3:])
    return x if keep_bool and x.dtype == torch.bool else x.double()
