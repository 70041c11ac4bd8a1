"""The drafter's geometry, and its config.json in the layout that servers read (z-lab's DFlash layout)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import ConfigError
from trainer.taps import tap_layer_ids

FULL = "full_attention"
SLIDING = "sliding_attention"
ARCHITECTURE = "DFlashDraftModel"
DEFAULT_TAPS = 5


@dataclass(frozen=True)
class DrafterConfig:
    """What fixes every shape and mask of a drafter.

    `layer_types` has one of "full_attention", "sliding_attention" for each layer; `sliding_window` counts positions
    and includes the query's own; `causal` says whether sliding layers look only backwards inside a block (full layers
    never do). `rope_parameters` is Hugging Face's dict, with `rope_type` and `rope_theta`.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: Mapping[str, Any] = field(hash=False)
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    causal: bool

    def __post_init__(self) -> None:
        """Raises ConfigError, with the field's name, for a geometry that no drafter can have."""
        _require(self.block_size >= 2, "block_size", f"{self.block_size} leaves no slot to predict", "at least 2")
        _require(self.num_hidden_layers >= 1, "num_hidden_layers", f"{self.num_hidden_layers} layers", "at least 1")
        _require(self.head_dim % 2 == 0, "head_dim", f"{self.head_dim} is odd: RoPE turns pairs", "an even one")
        _require(
            self.num_key_value_heads >= 1 and self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"{self.num_attention_heads} query heads do not share {self.num_key_value_heads} key/value heads evenly",
            "a number that divides that of the query heads",
        )
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            "dflash_config.mask_token_id",
            f"{self.mask_token_id} is outside a vocabulary of {self.vocab_size}",
            f"a token from 0 to {self.vocab_size - 1} that no text has",
        )
        ids = self.target_layer_ids
        _require(
            len(ids) > 0 and all(0 <= i < self.num_target_layers for i in ids) and len(set(ids)) == len(ids),
            "dflash_config.target_layer_ids",
            f"{list(ids)} does not name different layers of a target of {self.num_target_layers}",
            f"different layers from 0 to {self.num_target_layers - 1}",
        )
        _require(
            len(self.layer_types) == self.num_hidden_layers and set(self.layer_types) <= {FULL, SLIDING},
            "layer_types",
            f"{list(self.layer_types)} does not name {FULL} or {SLIDING} for each of {self.num_hidden_layers} layers",
            "one kind for each layer",
        )
        if SLIDING in self.layer_types:
            _require(
                self.sliding_window is not None and self.sliding_window >= 1,
                "sliding_window",
                f"{self.sliding_window} cannot be the window of the sliding layers",
                "at least 1 token",
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The different layer types that occur, in a fixed order: one attention mask is built for each."""
        return tuple(kind for kind in (FULL, SLIDING) if kind in self.layer_types)

    @classmethod
    def from_target(
        cls,
        hf_config: Any,
        *,
        layers: int,
        block_size: int,
        mask_token_id: int,
        taps: int | None = None,
        target_layer_ids: Sequence[int] | None = None,
        sliding_window: int | None = None,
        full_layers: int | None = None,
        causal: bool = True,
        intermediate_size: int | None = None,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
    ) -> DrafterConfig:
        """A drafter with the target's width, vocabulary, head geometry and RoPE base.

        Only the RoPE base is taken from the target's RoPE: partial rotary, mRoPE and length scaling stay behind,
        since the drafter turns its whole head dimension.

        Args:
            hf_config: the target's Hugging Face config; of a vision-language model the text part is used.
            layers: drafter layers.
            block_size: W, anchor included.
            mask_token_id: a token of the target's vocabulary that stands for "to be predicted".
            taps: how many target layers are read, 5 if neither this nor `target_layer_ids` is given.
            target_layer_ids: the tapped layers themselves.
            sliding_window: makes layers sliding, all but the last `full_layers` (default 1).
            full_layers: trailing layers with full attention when there is a window.
            causal: whether sliding layers look only backwards inside a block.
            intermediate_size, num_attention_heads, num_key_value_heads, head_dim: where the drafter differs from the
                target (a mixture-of-experts target has no MLP width worth copying).

        Raises:
            ConfigError: both or contradicting choices, or a geometry that cannot be.
        """
        text = text_config(hf_config)
        target_layers = int(_need(text, "num_hidden_layers"))
        if target_layer_ids is None:
            ids = tap_layer_ids(target_layers, DEFAULT_TAPS if taps is None else taps)
        else:
            ids = list(target_layer_ids)
            if taps is not None and taps != len(ids):
                raise ConfigError(f"taps = {taps}, but target_layer_ids names {len(ids)} layers", "taps", "give one")
        if sliding_window is None and full_layers is not None and full_layers != layers:
            raise ConfigError(f"full_layers = {full_layers} without a sliding_window", "full_layers", "give both")
        full = layers if sliding_window is None else 1 if full_layers is None else full_layers
        if not 0 <= full <= layers:
            raise ConfigError(f"full_layers = {full} of {layers} layers", "full_layers")
        types = (SLIDING,) * (layers - full) + (FULL,) * full
        hidden = int(_need(text, "hidden_size"))
        heads = num_attention_heads or int(_need(text, "num_attention_heads"))
        own_dim = getattr(text, "head_dim", None) or hidden // int(_need(text, "num_attention_heads"))
        theta = rope_theta(text)
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate_size or int(_need(text, "intermediate_size")),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=head_dim or int(own_dim),
            vocab_size=int(_need(text, "vocab_size")),
            rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            max_position_embeddings=int(_need(text, "max_position_embeddings")),
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(ids),
            num_target_layers=target_layers,
            layer_types=types,
            sliding_window=sliding_window if SLIDING in types else None,
            causal=causal and SLIDING in types,
        )

    @property
    def mixed(self) -> bool:
        """Whether sliding layers look only backwards in their block and full layers do not: no one word says it."""
        return self.causal and FULL in self.layer_types

    def to_hf(self, *, by_layer: bool = False) -> dict[str, Any]:
        """The exported config.json. Both spellings of RoPE are written, and how sliding layers see their block.

        Args:
            by_layer: leave causality out where layers differ in it (`mixed`): servers that apply one word to every
                layer then take each kind's own default, which is sliding causal, full not.
        """
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        scaled = self.rope_parameters.get("rope_type", "default") != "default"
        out: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "auto_map": {"AutoModel": f"dflash.{ARCHITECTURE}"},
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": dict(self.rope_parameters),
            "rope_theta": self.rope_theta,
            "rope_scaling": ({k: v for k, v in self.rope_parameters.items() if k != "rope_theta"} if scaled else None),
            "layer_types": list(self.layer_types),
            "use_sliding_window": SLIDING in self.layer_types,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": dflash,
        }
        if SLIDING in self.layer_types and not (by_layer and self.mixed):
            # Servers take a missing value for causal. Both places are read, by different servers.
            dflash["causal"] = self.causal
            out["is_causal"] = self.causal
        return out

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Reads a drafter's config.json.

        Raises:
            ConfigError: another architecture, a missing or contradicting key; names the key.
        """
        if ARCHITECTURE not in (config.get("architectures") or []):
            raise ConfigError(
                f"not a DFlash drafter: its architecture is {config.get('architectures')}, not {ARCHITECTURE}",
                "config.json: architectures",
                "give the folder of a drafter, not of a target",
            )
        dflash = config.get("dflash_config")
        if not isinstance(dflash, Mapping):
            raise ConfigError("the drafter's config has no dflash_config", "config.json: dflash_config")
        layers = _whole(_key(config, "num_hidden_layers"), "num_hidden_layers")
        types = tuple(str(kind) for kind in _listed(config.get("layer_types") or [FULL] * layers, "layer_types"))
        sliding = SLIDING in types
        causal = dflash.get("causal", config.get("is_causal", True))
        if "is_causal" in config and bool(config["is_causal"]) != bool(causal):
            raise ConfigError(
                f"is_causal is {config['is_causal']}, dflash_config.causal is {causal}",
                "config.json",
                "make them agree",
            )
        if config.get("attention_bias"):
            raise ConfigError("a drafter with attention biases is not supported", "config.json: attention_bias")
        hidden, heads = (
            _whole(_key(config, "hidden_size"), "hidden_size"),
            _whole(_key(config, "num_attention_heads"), "num_attention_heads"),
        )
        rope = _rope_of(config)
        return cls(
            hidden_size=hidden,
            intermediate_size=_whole(_key(config, "intermediate_size"), "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_whole(config.get("num_key_value_heads") or heads, "num_key_value_heads"),
            head_dim=_whole(config.get("head_dim") or hidden // heads, "head_dim"),
            vocab_size=_whole(_key(config, "vocab_size"), "vocab_size"),
            rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=rope["rope_theta"],
            rope_parameters=rope,
            max_position_embeddings=_whole(_key(config, "max_position_embeddings"), "max_position_embeddings"),
            block_size=_whole(_key(config, "block_size"), "block_size"),
            mask_token_id=_whole(_key(dflash, "mask_token_id", "dflash_config."), "dflash_config.mask_token_id", 0),
            target_layer_ids=tuple(
                _whole(i, "dflash_config.target_layer_ids", 0)
                for i in _listed(_key(dflash, "target_layer_ids", "dflash_config."), "dflash_config.target_layer_ids")
            ),
            num_target_layers=_whole(_key(config, "num_target_layers"), "num_target_layers"),
            layer_types=types,
            sliding_window=(
                _whole(config["sliding_window"], "sliding_window") if sliding and config.get("sliding_window") else None
            ),
            causal=bool(causal) and sliding,
        )


def text_config(hf_config: Any) -> Any:
    """The language part of a Hugging Face config: itself for a text model, `text_config` of a vision-language one."""
    getter = getattr(hf_config, "get_text_config", None)
    return getter() if callable(getter) else getattr(hf_config, "text_config", hf_config)


def rope_theta(text: Any) -> float:
    """The RoPE base of a text config, in either spelling.

    Raises:
        ConfigError: it has none.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in parameters and isinstance(parameters.get(FULL), Mapping):
        parameters = parameters[FULL]  # targets with one RoPE for each kind of layer
    theta = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise ConfigError("the target's config names no RoPE base", "rope_theta")
    return float(theta)


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    new, old_scaling = _table(config, "rope_parameters"), _table(config, "rope_scaling")
    old_theta = config.get("rope_theta")
    if old_theta is not None:
        old_theta = _positive(old_theta, "rope_theta")
    if "rope_theta" in new:
        new["rope_theta"] = _positive(new["rope_theta"], "rope_parameters.rope_theta")
    if "rope_theta" in new and old_theta is not None and new["rope_theta"] != old_theta:
        raise ConfigError(
            f"rope_theta is {old_theta}, but rope_parameters says {new['rope_theta']}",
            "config.json: rope_theta",
            "correct the wrong one: servers read either",
        )
    rope = {**old_scaling, **new}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        if old_theta is None:
            raise ConfigError("the drafter's config names no RoPE base", "config.json: rope_theta")
        rope["rope_theta"] = old_theta
    return rope


def _require(holds: bool, key: str, message: str, fix: str) -> None:
    if not holds:
        raise ConfigError(f"{key}: {message}", key, fix)


def _need(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise ConfigError(f"the target's config has no {name}", name)
    return value


def _key(config: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if config.get(name) is None:
        raise ConfigError(f"the drafter's config has no {prefix}{name}", f"config.json: {prefix}{name}")
    return config[name]


def _whole(value: Any, key: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key} is {value!r}, no whole number of at least {least}", f"config.json: {key}")
    return value


def _positive(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{key} is {value!r}, no number above 0", f"config.json: {key}")
    return float(value)


def _listed(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key} is {value!r}, no list", f"config.json: {key}")
    return list(value)


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}, no object", f"config.json: {key}")
    return dict(value)
