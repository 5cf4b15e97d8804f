"""What a decoder is made of, and its translation from and to Hugging Face's config.json.

One frozen (hashable) `DecoderConfig` covers every family: a family is a set of values, not a class.
Both spellings are read: transformers 5 (`rope_parameters`, `layer_types`) and the older one
(`rope_theta`, `rope_scaling`, patterns). Written is the older spelling, which both understand.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvjax.models.config_values import Values, show
from kvjax.models.rope_config import RopeConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3")
MAX_LAYERS = 4096
MAX_CONTEXT = 1 << 30


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None = None  # a token sees itself and window-1 before it
    rope: RopeConfig | None = RopeConfig()  # None: a layer without positions


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer; `attention_scale` 0 stands for head_dim ** -0.5."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    context: int
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # 1.0: Gemma's (1 + w)
    sandwich_norms: bool = False  # Gemma: also a norm after attention and one after the MLP
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over head_dim on q and k before RoPE
    activation: str = "silu"  # "silu" | "gelu_tanh"
    attention_scale: float = 0.0  # multiplies q.k
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    tie_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family: {self.family!r} is none of {', '.join(FAMILIES)}")
        if not self.layers:
            raise ValueError("layers: there must be at least one")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_kv_heads} does not divide"
                f" num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} is odd, RoPE pairs channels; make it even")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation: {self.activation!r} is neither silu nor gelu_tanh")
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every weight by its Hugging Face name, and its shape as stored there ([out, in])."""
    embed = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embed}
    layer = _layer_shapes(config)
    for i in range(len(config.layers)):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = embed
    return shapes


def _layer_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = {
        "self_attn.q_proj": (queries, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (keys, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, queries, c.o_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out, inp, bias) in linears.items():
        shapes[f"{name}.weight"] = (out, inp)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,)}
        shapes |= {"self_attn.k_norm.weight": (c.head_dim,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if c.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return shapes | {f"{name}.weight": (c.hidden_size,) for name in norms}


# ---- from Hugging Face ------------------------------------------------------------------------

_GEMMA3_DEFAULTS = {  # published gemma3 configs leave out whatever equals the class's default
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 131072, "rope_theta": 1e6, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28,
        "head_dim": 128,
    },
    "gemma2": {
        "max_position_embeddings": 8192, "sliding_window": 4096, "head_dim": 256,
        "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": _GEMMA3_DEFAULTS,
    "smollm3": {
        "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
}  # fmt: skip


def config_from_hf(data: Mapping[str, Any]) -> DecoderConfig:
    """Reads a config.json's object; ValueError names the key that is missing, absurd or unknown."""
    if not isinstance(data, Mapping):
        raise ValueError("config: the file does not hold an object")
    kind = data.get("model_type")
    if kind == "gemma3":  # the text part of the vision model
        outer, kind = data, "gemma3_text"
        shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        data = {k: outer[k] for k in shared if k in outer}
        data |= Values(outer, {}).section("text_config")
    family = "gemma3" if kind == "gemma3_text" else kind
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model_type: {show(kind)} is none of {', '.join(FAMILIES)}")
    v = Values(data, _DEFAULTS[family])
    _refuse_unsupported(v)
    heads, hidden = v.integer("num_attention_heads"), v.integer("hidden_size")
    if v.get("head_dim") is None and hidden % heads:
        raise ValueError(f"head_dim: missing, and {heads} heads do not divide hidden_size {hidden}")
    gemma = family in ("gemma2", "gemma3")
    bias = family == "qwen2" or v.flag("attention_bias")
    softcap = v.optional_number("attn_logit_softcapping")
    return DecoderConfig(
        family=family,
        vocab_size=v.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=v.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=v.integer("num_key_value_heads", heads),
        head_dim=v.integer("head_dim", hidden // heads),
        layers=_layers(v, family),
        context=v.integer("max_position_embeddings", high=MAX_CONTEXT),
        norm_eps=v.number("rms_norm_eps", 1e-6),
        norm_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        qkv_bias=bias and family != "mistral",
        o_bias=bias and family not in ("mistral", "qwen2"),
        mlp_bias=family in ("llama", "smollm3") and v.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "gemma3"),
        activation=_activation(v),
        attention_scale=v.number("query_pre_attn_scalar") ** -0.5 if gemma else 0.0,
        attention_softcap=softcap if family == "gemma2" else None,  # gemma3 ignores it
        final_softcap=v.optional_number("final_logit_softcapping") if gemma else None,
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        tie_embeddings=v.flag("tie_word_embeddings"),
        bos_id=next(iter(v.ids("bos_token_id")), None),
        eos_ids=v.ids("eos_token_id"),
        pad_id=next(iter(v.ids("pad_token_id")), None),
    )


def _refuse_unsupported(v: Values) -> None:
    if v.get("quantization_config"):
        raise ValueError("quantization_config: quantized weights; load an unquantized checkpoint")
    if v.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: only causal attention is supported")
    if v.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("partial_rotary_factor: only 1 is supported")


def _activation(v: Values) -> str:
    name = v.get("hidden_activation") or v.get("hidden_act") or "silu"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"hidden_act: {show(name)} is none of {', '.join(known)}")
    return known[name]


def _layers(v: Values, family: str) -> tuple[LayerConfig, ...]:
    count = v.integer("num_hidden_layers", high=MAX_LAYERS)
    rotates = _rotates(v, family, count)
    sliding = _sliding(v, family, count, rotates)
    window = v.integer("sliding_window", high=MAX_CONTEXT) if any(sliding) else None
    ropes = {kind: _rope(v, family, kind) for kind in set(sliding)}
    return tuple(
        LayerConfig(window=window if slides else None, rope=ropes[slides] if rotated else None)
        for slides, rotated in zip(sliding, rotates, strict=True)
    )


def _rotates(v: Values, family: str, count: int) -> list[bool]:
    if family != "smollm3":
        return [True] * count
    given = v.sequence("no_rope_layers", (0, 1), count)
    if given is not None:
        return [bool(x) for x in given]
    interval = v.integer("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(count)]


def _sliding(v: Values, family: str, count: int, rotates: list[bool]) -> list[bool]:
    """Which layers have a window: from `layer_types`, or from the family's older pattern."""
    if family == "llama" or v.get("sliding_window") is None:
        return [False] * count
    if family in ("qwen2", "qwen3", "smollm3") and not v.flag("use_sliding_window"):
        return [False] * count
    types = v.sequence("layer_types", ("full_attention", "sliding_attention"), count)
    if types is not None and family != "mistral":
        return [t == "sliding_attention" for t in types]
    if family in ("qwen2", "qwen3"):
        first = v.get("max_window_layers")
        first = 0 if first == 0 else v.integer("max_window_layers")
        return [i >= first for i in range(count)]
    if family == "smollm3":
        return [not rotated for rotated in rotates]
    if family == "gemma2":
        return [i % 2 == 0 for i in range(count)]
    if family == "gemma3":
        key = "_sliding_window_pattern" if "_sliding_window_pattern" in v.data else ""
        pattern = v.integer(key or "sliding_window_pattern")
        return [(i + 1) % pattern != 0 for i in range(count)]
    return [True] * count  # mistral


def _rope(v: Values, family: str, sliding: bool) -> RopeConfig:
    """The rope of the sliding or of the full layers; only gemma3 tells them apart."""
    parameters = v.section("rope_parameters")
    kind = "sliding_attention" if sliding else "full_attention"
    if kind in parameters:
        parameters = Values(parameters, {}).section(kind)
    elif not parameters:
        if family == "gemma3" and sliding:
            return RopeConfig(theta=v.number("rope_local_base_freq", 10000.0))
        parameters = v.section("rope_scaling")
    p = Values(parameters, {})
    if p.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("partial_rotary_factor: only 1 is supported")
    theta = p.number("rope_theta", v.number("rope_theta", 10000.0))
    given = [p.get(key) for key in ("rope_type", "type") if p.get(key) is not None]
    name = given[0] if given else "default"
    if not isinstance(name, str):
        raise ValueError(f"rope_type: {show(name)} is not a name")
    if name == "default":
        return RopeConfig(theta=theta)
    context = v.integer("max_position_embeddings", high=MAX_CONTEXT)
    original = p.integer("original_max_position_embeddings", context, MAX_CONTEXT)
    if name == "llama3":
        return RopeConfig(
            theta, name, factor=p.number("factor"), original_context=original,
            low_freq_factor=p.number("low_freq_factor"),
            high_freq_factor=p.number("high_freq_factor"),
        )  # fmt: skip
    if name == "yarn":
        return RopeConfig(
            theta, name, factor=p.number("factor", context / original), original_context=original,
            beta_fast=p.number("beta_fast", 32.0), beta_slow=p.number("beta_slow", 1.0),
            attention_factor=p.optional_number("attention_factor"),
            mscale=p.optional_number("mscale"), mscale_all_dim=p.optional_number("mscale_all_dim"),
            truncate=p.flag("truncate", True),
        )  # fmt: skip
    return RopeConfig(theta, name, factor=p.number("factor"))


# ---- to Hugging Face --------------------------------------------------------------------------

_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "gemma2": "Gemma2", "gemma3": "Gemma3", "smollm3": "SmolLM3",
}  # fmt: skip


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """A config.json's object from which transformers (4 or 5) and `config_from_hf` read the same.

    ValueError where the family has no key for a value (two window lengths, say).
    """
    c = config
    gemma = c.family in ("gemma2", "gemma3")
    data: dict[str, Any] = {
        "architectures": [f"{_CLASSES[c.family]}ForCausalLM"],
        "model_type": "gemma3_text" if c.family == "gemma3" else c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "hidden_activation" if gemma else "hidden_act": (
            "gelu_pytorch_tanh" if c.activation == "gelu_tanh" else "silu"
        ),
        "attention_bias": c.o_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.eos_ids[0] if len(c.eos_ids) == 1 else list(c.eos_ids) or None,
        "pad_token_id": c.pad_id,
    }
    if gemma:
        data["query_pre_attn_scalar"] = _whole(c.attention_scale**-2)
        data["attn_logit_softcapping"] = c.attention_softcap
        data["final_logit_softcapping"] = c.final_softcap
    data |= _windows_to_hf(c) | _ropes_to_hf(c)
    if config_from_hf(data) != config:
        raise ValueError(f"family: {c.family} cannot express this config in a config.json")
    return data


def _whole(value: float) -> int | float:
    """Undoes the rounding of a square root of a whole number."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value


def _windows_to_hf(c: DecoderConfig) -> dict[str, Any]:
    if c.family == "llama":
        return {}
    sliding = [layer.window is not None for layer in c.layers]
    window = next((layer.window for layer in c.layers if layer.window is not None), None)
    if c.family == "mistral":
        return {"sliding_window": window}
    data: dict[str, Any] = {"sliding_window": window}
    data["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
    if c.family in ("qwen2", "qwen3", "smollm3"):
        data["use_sliding_window"] = any(sliding)
    if c.family in ("qwen2", "qwen3"):
        data["max_window_layers"] = sliding.index(True) if any(sliding) else len(sliding)
    if c.family == "smollm3":
        data["no_rope_layers"] = [int(layer.rope is not None) for layer in c.layers]
    return data


def _ropes_to_hf(c: DecoderConfig) -> dict[str, Any]:
    full = [layer.rope for layer in c.layers if layer.window is None and layer.rope]
    sliding = [layer.rope for layer in c.layers if layer.window is not None and layer.rope]
    rope = (full or sliding or [RopeConfig()])[0]
    data: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": _scaling_to_hf(rope)}
    if c.family == "gemma3":
        data["rope_local_base_freq"] = sliding[0].theta if sliding else 10000.0
        if not full:
            data["rope_scaling"] = None
    return data


def _scaling_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    data: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind != "linear":
        data["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        data |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        data |= {n: getattr(rope, n) for n in names if getattr(rope, n) is not None}
        data["truncate"] = rope.truncate
    return data
