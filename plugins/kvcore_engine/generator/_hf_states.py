"""Layers of Hugging Face models that keep a state: Mamba, Mamba 2, gated delta nets.

transformers computes them for rows of equal length, with a cache that holds the states of the
rows. A step has sequences of many lengths in one row. So such a layer is called once for all
sequences with a single new token, and once for each other one, and its states come from blocks
and go back to them (`StepStates`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from transformers import Cache, cache_utils

from kvcore import InputError

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel
    from transformers.cache_utils import LinearAttentionLayer

    from kvcore_engine.groups import StepStates


@attrs.frozen(eq=False)
class StateLayer:
    """A module that keeps a state: the inputs of a convolution, and a recurrent state.

    Attributes:
        module: the module.
        conv, recurrent: states after one token, `[1, ...]`, whose shapes and dtypes count.
        continues: whether it reads its recurrent state when it computes several tokens. Mamba 1
            of transformers 5.24 does not: it gets them one by one.
    """

    module: Module
    conv: Tensor
    recurrent: Tensor
    continues: bool

    @classmethod
    @torch.no_grad()
    def from_module(cls, module: Module, width: int) -> StateLayer:
        """Return the layer of a module that takes tokens of `width` numbers; it is tried."""
        weight = next(module.parameters())
        tokens = torch.linspace(-1, 1, 2 * width, device=weight.device, dtype=weight.dtype)
        tokens = tokens.view(1, 2, width)
        first = cls(module, tokens, tokens, continues=True)
        _, states = first._advance(tokens[:, :1], cache_utils.LinearAttentionLayer())
        ends = []
        for scale in (0, 1):
            layer = cache_utils.LinearAttentionLayer()
            layer.update_conv_state(states.conv_states[0])
            layer.update_recurrent_state(torch.full_like(states.recurrent_states[0], scale))
            ends.append(first._advance(tokens, layer)[1].recurrent_states[0])
        continues = not torch.equal(*ends)
        return cls(module, states.conv_states[0], states.recurrent_states[0], continues)

    @property
    def numbers(self) -> int:
        """Numbers of the state of a sequence."""
        return prod(self.conv.shape) + prod(self.recurrent.shape)

    def run(self, tokens: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute new tokens, `[rows, tokens, width]`, from states `[rows, numbers]` on.

        Returns the output and the new states. `states` is None where a sequence begins.
        """
        layer = cache_utils.LinearAttentionLayer()
        steps: tuple[Tensor, ...] = (tokens,)
        if states is not None:
            cut = prod(self.conv.shape)
            conv = states[:, :cut].reshape(-1, *self.conv.shape[1:])
            recurrent = states[:, cut:].reshape(-1, *self.recurrent.shape[1:])
            layer.update_conv_state(conv.to(self.conv))
            layer.update_recurrent_state(recurrent.to(self.recurrent))
            if not self.continues:
                steps = torch.split(tokens, 1, 1)
        out = torch.cat([self._advance(step, layer)[0] for step in steps], 1)
        kept = layer.conv_states[0], layer.recurrent_states[0]
        wide = torch.promote_types(self.conv.dtype, torch.float32)
        return out, torch.cat([part.flatten(1).to(wide) for part in kept], 1)

    def _advance(
        self, tokens: Tensor, layer: LinearAttentionLayer
    ) -> tuple[Tensor, LinearAttentionLayer]:
        """Compute tokens as transformers does; `layer` then has the states after them."""
        # The module looks its layer up by number.
        cache = Cache(layers=[layer] * (self.module.layer_idx + 1))  # type: ignore[operator]
        out: Tensor = _own_forward(self.module)(tokens, cache)
        return out, layer


def state_layers(model: PreTrainedModel, kinds: list[str]) -> list[StateLayer]:
    """Return the layers of a model that keep a state, in order; `kinds` has its layers.

    Raises:
        InputError: transformers computes them in another way.
    """
    wanted = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
    layers_by_index = {
        module.layer_idx: module
        for module in model.modules()
        if getattr(module, "layer_idx", None) in wanted and hasattr(module, "conv1d")
    }
    width = model.config.get_text_config(decoder=True).hidden_size
    try:
        return [StateLayer.from_module(layers_by_index[index], width) for index in wanted]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        msg = (
            f"{type(model).__name__} cannot go through a paged cache: its layers of "
            f"'linear_attention' keep no convolution beside one recurrent state ({error!r})"
        )
        raise InputError(msg) from error


def pass_through_blocks(layers: list[StateLayer]) -> None:
    """Make the modules of `layers` take their states from the step of an `AttentionCache`."""
    for index, layer in enumerate(layers):
        layer.module.forward = partial(_forward, index, layer)


def _forward(
    index: int, layer: StateLayer, hidden_states: Tensor, cache: Any = None, **options: Any
) -> Tensor:
    """Compute the layer; `index` counts the layers with a state. Called by the model.

    Raises:
        InputError: the step has no states.
    """
    if not hasattr(cache, "states"):
        out: Tensor = _own_forward(layer.module)(hidden_states, cache, **options)
        return out
    if cache.states is None:
        msg = (
            f"{type(layer.module).__name__} keeps states, which only cache groups have room "
            "for: run the model with a GroupedCache"
        )
        raise InputError(msg)
    rows = _recur(index, layer, cache.pack(hidden_states), cache.states)
    spread: Tensor = cache.spread(rows, *hidden_states.shape[:2])
    return spread


@torch.no_grad()
def _recur(index: int, layer: StateLayer, hidden: Tensor, states: StepStates) -> Tensor:
    """Return a layer's output for the new tokens of a step, `[tokens, width]`.

    States come from the blocks of the step, and go back to them.
    """
    parts = list(torch.split(hidden, list(states.lengths)))
    for sequences in states.rounds:
        rows = torch.stack([parts[sequence] for sequence in sequences])
        before = None
        if states.begins[sequences[0]]:
            before = states.read(index, sequences, layer.numbers)
        out, after = layer.run(rows, before)
        states.write(index, sequences, after)
        for sequence, row in zip(sequences, out, strict=True):
            parts[sequence] = row
    return torch.cat(parts)


def _own_forward(module: Module) -> Callable[..., Any]:
    """Return the `forward` of the class of a module, which `pass_through_blocks` replaces."""
    return partial(type(module).forward, module)
