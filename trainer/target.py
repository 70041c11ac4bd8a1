"""The target: a frozen Hugging Face causal LM whose inner layers the drafter reads.

Training needs only `features`: no head is applied (its logits would be thrown away), and layers above the last tapped
one are not run. `step` is the cached forward that speculative decoding and plain decoding share.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.drafter_config import FULL, text_config
from trainer.errors import ConfigError, TrainerError
from trainer.loading import Progress, told
from trainer.target_files import TARGET_NEXT, find_embeddings, read_config, text_part, weight_files


class _LastTapReached(Exception):
    """Leaves the target's forward early; never seen outside `Target.features`."""


class Target:
    """A loaded target. Built by `load_target`.

    Attributes:
        config: Hugging Face config of the text model.
        hidden_size, num_layers, vocab_size: H, n, V.
        embed_weight, head_weight: [V, H]; the same tensor if the target ties them.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, embed_weight: Tensor, head_weight: Tensor) -> None:
        self.decoder = decoder
        self.layers = layers
        self.config: Any = text_config(decoder.config)
        self.embed_weight = embed_weight.detach()
        self.head_weight = head_weight.detach()
        self.num_layers = len(layers)
        self.vocab_size, self.hidden_size = self.head_weight.shape
        # transformers renamed the argument of the cached keys and values; the wrong name would be ignored silently.
        names = inspect.signature(decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            self.croppable = not getattr(self.config, "sliding_window", None)
        else:
            # A window has forgotten what a crop would need, and a recurrent state cannot be run backwards.
            self.croppable = all(kind == FULL for kind in kinds)

    @property
    def device(self) -> torch.device:
        """Where inputs are expected."""
        return self.embed_weight.device

    @torch.no_grad()
    def features(self, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Outputs of the tapped decoder layers.

        Args:
            input_ids: [B, S], padded on the right; the target is causal, so padding reaches no real position.
            layer_ids: ids of layers, 0-based, in the order wanted.

        Returns:
            [B, S, k*H] in the target's dtype, concatenated on the last axis.

        Raises:
            ConfigError: an id that the target does not have.
        """
        with _Taps(self, layer_ids, stop=True) as taps:
            with contextlib.suppress(_LastTapReached):
                self.decoder(input_ids=input_ids, use_cache=False)
            return taps.joined()

    def new_cache(self) -> Any:
        """An empty cache for `step`."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    @torch.no_grad()
    def step(self, input_ids: Tensor, cache: Any, layer_ids: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """One cached forward over [B, T] new tokens.

        Returns:
            hidden [B, T, H], ready for the head; and the tapped features [B, T, k*H], None without `layer_ids`.
        """
        with _Taps(self, layer_ids, stop=False) as taps:
            out = self.decoder(input_ids=input_ids, use_cache=True, **{self._cache_argument: cache})
            return out.last_hidden_state, taps.joined() if layer_ids else None

    def most_likely(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...] int64. Scaling or soft-capping of logits, if the target has it, does not change it."""
        return torch.nn.functional.linear(hidden, self.head_weight).argmax(dim=-1)

    def snapshot(self, cache: Any) -> Any:
        """What `rewind` may need to return to this point; None where the cache can simply be cropped."""
        return None if self.croppable else copy.deepcopy(cache)

    def rewind(self, cache: Any, snapshot: Any, tokens: Tensor, kept: int) -> Any:
        """The cache as if only the first `kept` of the last step's [1, T] tokens had been seen.

        Targets with recurrent or windowed layers go back to the snapshot and see the kept tokens again.

        Raises:
            TrainerError: transformers left another length than asked for.
        """
        surplus = tokens.shape[1] - kept
        if surplus == 0:
            return cache
        if snapshot is not None:
            self.step(tokens[:, :kept], snapshot)
            return snapshot
        before = cache.get_seq_length()
        cache.crop(-surplus)  # the only form that old and new transformers both take: tokens to remove, negative
        if cache.get_seq_length() != before - surplus:
            raise TrainerError(
                f"the target's cache holds {cache.get_seq_length()} tokens after a crop to {before - surplus}",
                "transformers' DynamicCache.crop",
                "use a supported version of transformers",
            )
        return cache


class _Taps:
    """Forward hooks on the tapped layers, removed on leaving, whatever happened."""

    def __init__(self, target: Target, layer_ids: Sequence[int], stop: bool) -> None:
        wrong = [i for i in layer_ids if not 0 <= i < target.num_layers]
        if wrong or (stop and not layer_ids):
            raise ConfigError(
                f"the target has layers 0..{target.num_layers - 1}, tapped are {list(layer_ids)}", "target_layer_ids"
            )
        self._target, self._ids, self._stop = target, list(layer_ids), stop
        self._seen: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Taps:
        for i in set(self._ids):
            self._handles.append(self._target.layers[i].register_forward_hook(self._hook(i)))
        return self

    def _hook(self, layer_id: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output
            if self._stop and layer_id == max(self._ids):
                raise _LastTapReached

        return keep

    def joined(self) -> Tensor:
        return torch.cat([self._seen[i] for i in self._ids], dim=-1)

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen = {}


def usable_device(device: torch.device | str) -> None:
    """
    Raises:
        ConfigError: no name of a device, or one that this machine (or this torch) does not have.
    """
    fix = "cpu, or a GPU of this machine such as cuda:0"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{str(device)!r} is no device", "device", fix) from None
    if wanted.type == "cpu":
        return
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type != "cuda" or (wanted.index or 0) >= there:
        raise ConfigError(f"{device} is asked for, {there} GPUs can be used here", "device", fix)


def load_target(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str, progress: Progress | None = None
) -> Target:
    """Loads the language part of a Hugging Face folder, frozen, in evaluation mode.

    Of a vision-language model the vision tower is dropped. With `accelerate` installed the weights go straight to a
    GPU; without it they pass through host memory.

    Args:
        progress: told how many of the weights are there, about once a second.

    Raises:
        ConfigError: no such folder or device, an unknown architecture, weights that are missing or do not fit.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    usable_device(device)
    # A config.json that contradicts itself has an exception of its own, which is none of the usual ones.
    refusals = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)
    config = read_config(Path(path))
    weight_files(Path(path))  # names what is missing better than transformers does
    # Code that a model folder brings along is never run; left open, transformers would ask at the keyboard.
    closed: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    options = {**closed, "dtype": dtype, "output_loading_info": True}
    if torch.device(device).type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        options["device_map"] = {"": device}
    name = config.get("model_type")
    try:
        hf_config = transformers.AutoConfig.from_pretrained(path, **closed)
        known = type(hf_config) in transformers.AutoModelForCausalLM._model_mapping
        auto: Any = transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText
        with told(progress):
            model, info = auto.from_pretrained(path, **options)
    except refusals as error:
        raise ConfigError(f"the target of type {name!r} cannot be loaded: {error}", str(path), TARGET_NEXT) from error
    absent = sorted(info.get("missing_keys", []))
    if absent:
        # transformers fills these with random numbers and carries on.
        raise ConfigError(f"the target lacks {len(absent)} weights, first {absent[0]}", str(path), TARGET_NEXT)
    model.requires_grad_(False).eval()
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"{type(model).__name__} has no output head", str(path), TARGET_NEXT)
    depth = int(text_config(model.config).num_hidden_layers)
    decoder, layers = _find_decoder(model, depth, str(path))
    decoder.to(device)
    embedding = model.get_input_embeddings()
    return Target(decoder, layers, embedding.weight, head.weight.to(device))


def _find_decoder(model: nn.Module, depth: int, where: str) -> tuple[Any, nn.ModuleList]:
    """The innermost module that holds both the token embedding and all `depth` decoder layers."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    found = None
    for _, module in model.named_modules():  # from the outside inwards
        layers = next((m for m in module.children() if isinstance(m, nn.ModuleList) and len(m) == depth), None)
        if layers is not None and any(m is embedding for m in module.modules()):
            found = module, layers
    if found is not None:
        return found
    raise ConfigError(
        f"{type(model).__name__} has no module with its embedding and {depth} layers",
        where,
        "this target is not supported",
    )


def load_embed_and_head(path: str | Path, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Reads the target's embedding and head, and nothing else of its weights: all that a drafter process needs.

    The tensors are found by the ends of their names and their shape, since a vision-language target keeps them
    deeper. A target that ties them has one tensor, returned twice.

    Returns:
        embed [V, H] and head [V, H], without gradients.

    Raises:
        ConfigError: no safetensors weights, or no such tensor in them.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(path)
    config = read_config(folder)
    where = weight_files(folder)

    def read(name: str) -> Tensor:
        try:
            with safe_open(str(where[name]), framework="pt", device=str(device)) as opened:
                tensor = opened.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"{name} cannot be read: {error}", str(where[name]), TARGET_NEXT) from error
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{name} is {tensor.dtype}, packed by a quantisation",
                str(where[name]),
                "give a target whose embedding and head are not quantised",
            )
        return tensor.to(dtype)

    embed_name, head_name = find_embeddings(where, config, folder)
    embed = read(embed_name)
    head = embed if head_name == embed_name else read(head_name)
    hidden = text_part(config).get("hidden_size")
    for name, tensor in ((embed_name, embed), (head_name, head)):
        if tensor.dim() != 2 or (hidden is not None and tensor.shape[1] != hidden):
            raise ConfigError(f"{name} is {list(tensor.shape)}, not [vocabulary, {hidden}]", str(folder), TARGET_NEXT)
    return embed, head
