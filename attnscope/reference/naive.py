"""Attention as one would write it by hand: loops over heads and queries, in float64. The form to believe first.

Softmax attention has the functions, arguments and order of steps of `attention.py` (Vaswani et al. 2017, equation 1):
scale, softcap, bias, mask, sink, softmax. Tests hold the matrix form against it, head by head.

Layers that mix tokens without a softmax follow, one token after another, in the dtype that comes in:

    y = M v        M signed, queries x keys: what the state has kept of each earlier value, read by the query

Their state is linear in the values, so each rule is run once with the values and once with unit vectors in their
place. Tests hold a model's own functions against these, and these against formulas of one weight.

Shapes: H query head, G kv head, Q query, K key, D width of q and k, V width of v; any leading (batch) dims. Of layers
without a softmax: B text, T token, C channel, N states of a channel, W taps.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

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


class Mixed(NamedTuple):
    """What a rule gives: y, shaped as the values, and the map, (B, H, Q, K), or (B, C, Q, K) where channels have one.

    >>> Mixed(torch.ones(1, 2, 1, 1), torch.eye(2)[None, None]).map.shape
    torch.Size([1, 1, 2, 2])
    """

    output: Tensor
    map: Tensor


def linear_attention(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, decay_BTH: Tensor) -> Mixed:
    """S_t = a_t S_{t-1} + k_t v_t^T, y_t = S_t^T q_t: linear attention whose state fades.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236; with a decay Sun et al. 2023, arXiv 2307.08621.

    >>> linear_attention(one, one, one, 0.5 * one[..., 0]).map
    tensor([[[[1.0000, 0.0000],
              [0.5000, 1.0000]]]])
    """

    def mix(v_BTHV: Tensor) -> Tensor:
        state_BHDV = v_BTHV.new_zeros(q_BTHD.shape[0], *q_BTHD.shape[2:], v_BTHV.shape[-1])
        outputs = []
        for t in range(q_BTHD.shape[1]):
            written_BHDV = k_BTHD[:, t, :, :, None] * v_BTHV[:, t, :, None]
            state_BHDV = decay_BTH[:, t, :, None, None] * state_BHDV + written_BHDV
            outputs.append((q_BTHD[:, t, :, :, None] * state_BHDV).sum(-2))
        return torch.stack(outputs, 1)

    return _mixed(mix, v_BTHV)


def lightning(q_BTHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, slope_H: Tensor) -> Mixed:
    """Lightning attention: every head fades by exp(-slope) with each token.

    Source: Qin et al. 2024, arXiv 2405.17381; MiniMax 2025, arXiv 2501.08313, section 2.2.

    >>> lightning(one, one, one, torch.zeros(1)).map[0, 0, 1]
    tensor([1., 1.])
    """
    return linear_attention(q_BTHD, k_BTHD, v_BTHV, torch.exp(-slope_H).expand(*q_BTHD.shape[:3]))


def mlstm(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, input_BTH: Tensor, forget_BTH: Tensor, eps: float = 0.0
) -> Mixed:
    """xLSTM's matrix memory: exponential input gates, and a normaliser that fades as the state does.

    C_t = f_t C_{t-1} + i_t k_t v_t^T,   n_t = f_t n_{t-1} + i_t k_t,   y_t = C_t^T q_t / max(|n_t . q_t|, 1)
    with i_t = exp(input), f_t = sigmoid(forget), q over sqrt(D). State and normaliser are kept divided by exp(m_t), the
    largest exponent so far, 0 at first. eps: added to the divided denominator.
    Source: Beck et al. 2024, arXiv 2405.04517, equations 19 to 27 and appendix A.

    >>> mlstm(one, one, one, torch.zeros(1, 2, 1), torch.zeros(1, 2, 1)).output.flatten()
    tensor([1., 1.])
    """
    B, T, H, D = q_BTHD.shape

    def mix(v_BTHV: Tensor) -> Tensor:
        state_BHDV = v_BTHV.new_zeros(B, H, D, v_BTHV.shape[-1])
        normaliser_BHD, m_BH = q_BTHD.new_zeros(B, H, D), q_BTHD.new_zeros(B, H)
        outputs = []
        for t in range(T):
            fade_BH = torch.nn.functional.logsigmoid(forget_BTH[:, t]) + m_BH
            m_BH = torch.maximum(fade_BH, input_BTH[:, t])
            keep_BH, write_BH = torch.exp(fade_BH - m_BH), torch.exp(input_BTH[:, t] - m_BH)
            k_BHD, q_BHD = write_BH[..., None] * k_BTHD[:, t], q_BTHD[:, t] / math.sqrt(D)
            state_BHDV = keep_BH[..., None, None] * state_BHDV + k_BHD[..., None] * v_BTHV[:, t, :, None]
            normaliser_BHD = keep_BH[..., None] * normaliser_BHD + k_BHD
            size_BH = torch.maximum((normaliser_BHD * q_BHD).sum(-1).abs(), torch.exp(-m_BH)) + eps
            outputs.append((q_BHD[..., None] * state_BHDV).sum(-2) / size_BH[..., None])
        return torch.stack(outputs, 1)

    return _mixed(mix, v_BTHV)


def gated_delta(
    q_BTHD: Tensor, k_BTHD: Tensor, v_BTHV: Tensor, log_decay: Tensor, write_BTH: Tensor, scale: float | None = None
) -> Mixed:
    """The gated delta rule: what the state has under the token's key is taken out before its value is written.

    S = a_t S_{t-1},   S_t = S + b_t k_t (v_t - S^T k_t)^T,   y_t = S_t^T q_t,   a_t = exp(log_decay)
    log_decay: (B, T, H), or (B, T, H, D) with one for each channel of the key: Kimi's delta attention. q and k as they
    meet. scale: of q, 1 / sqrt(D) where it is None.
    Source: Yang et al. 2024, arXiv 2412.06464, equation 10; Kimi Team 2025, arXiv 2510.26692, equation 1.

    >>> gated_delta(one, one, one, torch.zeros(1, 2, 1), torch.ones(1, 2, 1)).map[0, 0, 1]    # overwritten
    tensor([0., 1.])
    """
    B, T, H, D = q_BTHD.shape
    decay_BTHD = log_decay.exp() if log_decay.ndim == 4 else log_decay.exp()[..., None].expand(B, T, H, D)
    scale = 1 / math.sqrt(D) if scale is None else scale

    def mix(v_BTHV: Tensor) -> Tensor:
        state_BHDV = v_BTHV.new_zeros(B, H, D, v_BTHV.shape[-1])
        outputs = []
        for t in range(T):
            k_BHD1 = k_BTHD[:, t, :, :, None]
            state_BHDV = decay_BTHD[:, t, :, :, None] * state_BHDV
            wrong_BHV = v_BTHV[:, t] - (k_BHD1 * state_BHDV).sum(-2)
            state_BHDV = state_BHDV + write_BTH[:, t, :, None, None] * k_BHD1 * wrong_BHV[..., None, :]
            outputs.append((scale * q_BTHD[:, t, :, :, None] * state_BHDV).sum(-2))
        return torch.stack(outputs, 1)

    return _mixed(mix, v_BTHV)


def mamba2(
    x_BTHV: Tensor, step_BTH: Tensor, A_H: Tensor, B_BTHD: Tensor, C_BTHD: Tensor, skip_H: Tensor | None = None
) -> Mixed:
    """Mamba-2: a decay for each head and token, exp(A step); what skips the state is on the map's diagonal.

    step_BTH: after its bias, softplus and limits. Source: Dao & Gu 2024, arXiv 2405.21060, equation 1 and section 6.

    >>> mamba2(one, torch.ones(1, 2, 1), torch.zeros(1), one, one, torch.ones(1)).map[0, 0, 1]
    tensor([1., 2.])
    """
    output, map_BHQK = linear_attention(C_BTHD, step_BTH[..., None] * B_BTHD, x_BTHV, torch.exp(A_H * step_BTH))
    if skip_H is None:
        return Mixed(output, map_BHQK)
    skips_HQK = skip_H[:, None, None] * torch.eye(x_BTHV.shape[1]).to(map_BHQK)
    return Mixed(output + skip_H[:, None] * x_BTHV, map_BHQK + skips_HQK)


def mamba(
    x_BTC: Tensor, step_BTC: Tensor, A_CN: Tensor, B_BTN: Tensor, C_BTN: Tensor, skip_C: Tensor | None = None
) -> Mixed:
    """Mamba: every channel has its own decays, exp(A step), and its own map; what skips the state is on the diagonal.

    step_BTC: after its bias and softplus. Source: Gu & Dao 2023, arXiv 2312.00752, algorithm 2.

    >>> mamba(one[..., 0], one[..., 0], torch.zeros(1, 1), one[..., 0], one[..., 0], torch.ones(1)).map[0, 0, 1]
    tensor([1., 2.])
    """

    def mix(x_BTCM: Tensor) -> Tensor:
        state_BCNM = x_BTCM.new_zeros(x_BTCM.shape[0], *A_CN.shape, x_BTCM.shape[-1])
        outputs = []
        for t in range(x_BTCM.shape[1]):
            decay_BCN = torch.exp(A_CN * step_BTC[:, t, :, None])
            write_BCN = step_BTC[:, t, :, None] * B_BTN[:, t, None]
            state_BCNM = decay_BCN[..., None] * state_BCNM + write_BCN[..., None] * x_BTCM[:, t, :, None]
            output_BCM = (C_BTN[:, t, None, :, None] * state_BCNM).sum(-2)
            outputs.append(output_BCM if skip_C is None else output_BCM + skip_C[:, None] * x_BTCM[:, t])
        return torch.stack(outputs, 1)

    return _by_channel(mix, x_BTC)


def rwkv(decay_C: Tensor, first_C: Tensor, k_BTC: Tensor, v_BTC: Tensor) -> Mixed:
    """RWKV-4: a mean of each channel's values, weighted by exp(k) that fades with distance, the own by exp(u + k).

    decay_C: w, the model's `time_decay`; each token fades by exp(-exp(w)). first_C: u, its `time_first`.
    Source: Peng et al. 2023, arXiv 2305.13048, equation 14.

    >>> rwkv(torch.zeros(1), torch.zeros(1), one[..., 0], one[..., 0]).map.sum(-1)
    tensor([[[1., 1.]]])
    """

    def mix(v_BTCM: Tensor) -> Tensor:
        outputs = []
        for i in range(v_BTCM.shape[1]):
            back_j = torch.arange(i - 1, -1, -1).to(k_BTC)  # 0 for the token before
            logits_BjC = torch.cat(
                [k_BTC[:, :i] - back_j[:, None] * decay_C.exp(), (first_C + k_BTC[:, i])[:, None]], 1
            )
            weights_BjC = torch.softmax(logits_BjC, 1)
            outputs.append((weights_BjC[..., None] * v_BTCM[:, : i + 1]).sum(1))
        return torch.stack(outputs, 1)

    return _by_channel(mix, v_BTC)


def gated_recurrence(x_BTC: Tensor, decay_BTC: Tensor) -> Mixed:
    """h_t = a_t h_{t-1} + x_t for every channel: the recurrence of Griffin's RG-LRU; x is gated before.

    Source: De et al. 2024, arXiv 2402.19427, equation 4.

    >>> gated_recurrence(one[..., 0], 0.5 * one[..., 0]).output.flatten()
    tensor([1.0000, 1.5000])
    """

    def mix(x_BTCM: Tensor) -> Tensor:
        state_BCM, outputs = torch.zeros_like(x_BTCM[:, 0]), []
        for t in range(x_BTCM.shape[1]):
            state_BCM = decay_BTC[:, t, :, None] * state_BCM + x_BTCM[:, t]
            outputs.append(state_BCM)
        return torch.stack(outputs, 1)

    return _by_channel(mix, x_BTC)


def convolution(x_BTC: Tensor, taps_CW: Tensor, bias_C: Tensor | None = None) -> Mixed:
    """A short convolution of each channel over its last W tokens, the last tap on the token itself.

    A bias is added to the output and is in no map.

    >>> convolution(one[..., 0], torch.tensor([[2.0, 3.0]])).map[0, 0, 1]
    tensor([2., 3.])
    """
    width = taps_CW.shape[1]

    def mix(x_BTCM: Tensor) -> Tensor:
        outputs = []
        for t in range(x_BTCM.shape[1]):
            places = range(max(0, t - width + 1), t + 1)
            outputs.append(
                sum((taps_CW[:, width - 1 - (t - j), None] * x_BTCM[:, j] for j in places), x_BTCM[:, t] * 0)
            )
        return torch.stack(outputs, 1)

    output, map_BCQK = _by_channel(mix, x_BTC)
    return Mixed(output if bias_C is None else output + bias_C, map_BCQK)


def _one_batch_dim(x: Tensor, keep_bool: bool = False) -> Tensor:
    x = x.detach().reshape(-1, *x.shape[-3:])
    return x if keep_bool and x.dtype == torch.bool else x.double()


def _mixed(mix: Callable[[Tensor], Tensor], v_BTHV: Tensor) -> Mixed:
    """What a rule makes of its values, and of unit vectors in their place."""
    B, T, H, _ = v_BTHV.shape
    unit = torch.eye(T).to(v_BTHV)[None, :, None].expand(B, T, H, T)
    return Mixed(mix(v_BTHV), mix(unit).transpose(1, 2))


def _by_channel(mix: Callable[[Tensor], Tensor], x_BTC: Tensor) -> Mixed:
    """The same where every channel has a map: channels are heads of width 1."""
    output_BTC1, map_BCQK = _mixed(mix, x_BTC[..., None])
    return Mixed(output_BTC1[..., 0], map_BCQK)
