"""Names and shapes of a model like a Llama, for measurements over weights of a wanted size."""

from __future__ import annotations

from math import sqrt

LAYERS = 18
_ITEMSIZE = 2  # bfloat16
_STEP = 8  # the hidden size is a multiple of it, so that every size below is whole
# Sizes as multiples of the hidden size: at 4096 these are 14336, 1024 and 64000.
_MLP, _KEYS, VOCABULARY = 3.5, 0.25, 15.625


def llama_shapes(
    nbytes: int, layers: int = LAYERS, vocabulary_of_hidden: float = VOCABULARY
) -> dict[str, tuple[int, ...]]:
    """Name to shape of the 165 weights of a Llama-like model that has about ``nbytes`` bytes in bfloat16.

    By default 18 layers of nine tensors (grouped-query attention, gated MLP, two norms), embedding, last norm and head;
    the hidden size is what varies. At 8.29 GiB it is 4096 with a vocabulary of 64000. The names are those of
    transformers' ``LlamaForCausalLM``, in its order. Below 128 KiB the smallest such model is returned. Raises
    ValueError for a size that is not positive.
    """
    if nbytes <= 0:
        raise ValueError(f"a model of {nbytes} bytes was asked for: give a positive size")
    per_square = layers * (2 + 2 * _KEYS + 3 * _MLP) + 2 * vocabulary_of_hidden  # parameters, without norms
    hidden = _STEP * max(1, round(sqrt(nbytes / _ITEMSIZE / per_square) / _STEP))
    vocabulary = int(vocabulary_of_hidden * hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in _layer(hidden).items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _layer(hidden: int) -> dict[str, tuple[int, ...]]:
    keys, mlp = int(_KEYS * hidden), int(_MLP * hidden)
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
