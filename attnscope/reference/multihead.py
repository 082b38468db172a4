"""Multi-head attention as a layer that learns (Vaswani et al. 2017, section 3.2.2).

    head_h = attention(query W_Q_h, key W_K_h, value W_V_h),   output = [head_1 ; ... ; head_H] W_O

Shapes: H query head, G kv head, Q query, K key, D width of a head's q and k, V of its v, E model width.
"""

from torch import Tensor, nn

from attnscope.reference.attention import attention_output, attention_weights, split_heads


class MultiHeadAttention(nn.Module):
    """Learned W_Q, W_K, W_V, W_O around scaled dot-product attention.

    d_model: width of the inputs and of the output. n_kv_heads: fewer heads for k and v, grouped-query or with 1
    multi-query. d_key, d_value: width per head, d_model // n_heads where left out. out_proj=False leaves W_O away: the
    output is the heads side by side, n_heads * d_value wide. dropout: on the weights, while training.
    Raises ValueError where d_model is no multiple of n_heads, n_heads none of n_kv_heads, a size is below 1, or dropout
    is not in [0, 1).

    >>> attn = MultiHeadAttention(3, 1, d_key=5, d_value=4, out_proj=False)
    >>> x = torch.randn(50, 5, 3)
    >>> attn(x, x, x)[0].shape
    torch.Size([50, 5, 4])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        bias: bool = False,
        out_proj: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.dropout = dropout
        # Sizes that do not divide would give heads of another width than the weights were made for.
        _at_least_one(d_model=d_model, n_heads=n_heads, n_kv_heads=self.n_kv_heads)
        if d_model % n_heads:
            raise ValueError(
                f"expected d_model to be a multiple of n_heads, got d_model={d_model} and n_heads={n_heads}"
            )
        if n_heads % self.n_kv_heads:
            raise ValueError(
                f"expected n_heads to be a multiple of n_kv_heads, got n_heads={n_heads} and "
                f"n_kv_heads={self.n_kv_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"expected dropout in [0, 1), got {dropout}")
        self.d_key = d_model // n_heads if d_key is None else d_key
        self.d_value = d_model // n_heads if d_value is None else d_value
        _at_least_one(d_key=self.d_key, d_value=self.d_value)
        # A row of heads each, as a checkpoint has them: head h is rows h * d_key to (h + 1) * d_key of W_Q.
        self.W_Q = nn.Linear(d_model, n_heads * self.d_key, bias=bias)
        self.W_K = nn.Linear(d_model, self.n_kv_heads * self.d_key, bias=bias)
        self.W_V = nn.Linear(d_model, self.n_kv_heads * self.d_value, bias=bias)
        self.W_O = nn.Linear(n_heads * self.d_value, d_model, bias=bias) if out_proj else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices uniform with variance 2 / (in + out) (Glorot and Bengio 2010, equation 16), biases 0.

        >>> MultiHeadAttention(8, 2).reset_parameters()
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self, query_QE: Tensor, key_KE: Tensor, value_KE: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output (..., Q, E) and weights (..., H, Q, K), the weights before dropout.

        query (..., Q, E), key and value (..., K, E); the same tensor three times is self-attention. mask: boolean
        (True = attend) or additive, broadcast to (..., H, Q, K), as `masks` makes them.

        >>> output, weights_HQK = attn(x, x, x, causal_mask(*positions(5)))
        """
        q_HQD = split_heads(self.W_Q(query_QE), self.n_heads)
        k_GKD = split_heads(self.W_K(key_KE), self.n_kv_heads)
        v_GKV = split_heads(self.W_V(value_KE), self.n_kv_heads)
        weights_HQK = attention_weights(q_HQD, k_GKD, mask=mask)
        dropout = self.dropout if self.training else 0.0
        heads_QE = attention_output(weights_HQK, v_GKV, dropout=dropout).transpose(-3, -2).flatten(-2)
        return (heads_QE if self.W_O is None else self.W_O(heads_QE)), weights_HQK


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"expected {name} to be at least 1, got {name}={size}")
