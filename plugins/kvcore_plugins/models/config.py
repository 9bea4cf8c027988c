"""The fields of a Hugging Face `config.json`, and a record of those that were read."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, cast

import attrs

from kvcore.errors import InputError, shorten
from kvcore.models.layers import MAX_WIDTH
from kvcore.models.spec import MAX_EXPERTS, MAX_LAYERS

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "max_position_embeddings": ("n_positions",),
    "sliding_window_pattern": ("_sliding_window_pattern",),
    "layer_types": ("layers_block_type",),
    "torch_dtype": ("dtype",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "top_k_experts"),
    "tie_word_embeddings": ("tie_embedding",),
    "head_dim": ("attention_head_dim",),
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts", "n_routed_experts"),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "rope_scaling": ("rope_parameters",),
}
"""Other names of fields, each of which means the same in every family."""

_MOST = {
    "num_hidden_layers": MAX_LAYERS,
    "n_routed_experts": MAX_EXPERTS,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
}

_BY_LAYER = {"head_dim", "v_head_dim", "num_attention_heads", "num_key_value_heads"}
"""Fields of attention that a layer may have of its own."""


_ALIKE = {"num_experts_per_tok", "num_shared_expert"}
"""Fields that may be a list with the same number for each layer."""


@attrs.frozen
class Config:
    """The fields of a config file; errors name file and field.

    Attributes:
        path: the file.
        fields: its fields, those of the language model.
        prefix: name of the object in the file that they are in, with a dot.
        defaults: values of fields that the makers' own configs leave out.
        names: names that the fields have in layers of one type, by their usual names.
        known: names of the fields that have been asked for.
    """

    path: Path
    fields: Mapping[str, Any]
    prefix: str = ""
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    names: Mapping[str, str] = attrs.field(factory=dict)
    known: set[str] = attrs.field(factory=set)

    def refuse(self, name: str, problem: str, *values: Any) -> NoReturn:
        """Raise InputError for a problem of the field `name`; each `{}` in it is a value."""
        if values:
            problem = problem.format(*(shorten(repr(value)) for value in values))
        msg = f"{self.path}: field '{self.prefix}{name}' {problem}"
        raise InputError(msg)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, under any of its names; null counts as left out."""
        own = self.names.get(name)
        keys = (*((own,) if own else ()), name, *ALIASES.get(name, ()))
        self.known.update(keys)
        values = (self.fields[key] for key in keys if self.fields.get(key) is not None)
        value = next(values, self.defaults.get(name, default))
        if name in _ALIKE and isinstance(value, list) and value:
            return value[0] if value == value[:1] * self.layers else value
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer field, from `least` up to the largest that a model may have."""
        value = self.get(name, default)
        if value is None:
            others = "".join(f" (and so is '{other}')" for other in ALIASES.get(name, ())[:1])
            self.refuse(name, f"is missing{others}")
        if type(value) is not int or value < least:
            self.refuse(name, f"must be an integer of at least {least}, not {{}}", value)
        greatest = _MOST.get(name, MAX_WIDTH)
        if value > greatest:
            self.refuse(name, f"must be at most {greatest:,}, not {{}}", value)
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that is true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false, not {}", value)
        return value

    def items(self, name: str) -> list[Any]:
        """Return a field that is a list; empty if left out."""
        value = self.get(name, [])
        if not isinstance(value, list):
            self.refuse(name, "must be a list, not {}", value)
        return value

    @property
    def layers(self) -> int:
        """Number of layers, which may be that of `layer_types` alone."""
        return self.count("num_hidden_layers", len(self.items("layer_types")) or None)

    def of_layers(self, name: str) -> list[Any]:
        """Return a field that is a list with an entry for each layer; empty if left out."""
        values, layers = self.items(name), self.layers
        if values and len(values) != layers:
            self.refuse(name, f"has {len(values)} entries for {layers} layers")
        return values

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a field that is an object; empty if left out."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "must be an object, not {}", value)
        return value

    def indices(self, name: str, listed: Any = None, first: int = 0) -> frozenset[int]:
        """Return a field, or its part `listed`, that lists layers, which count from `first`."""
        values = self.items(name) if listed is None else listed
        if not all(type(value) is int for value in values):
            self.refuse(name, "must list numbers of layers, not {}", values)
        self._check_layers(name, values, first)
        return frozenset(values)

    def _check_layers(self, name: str, indices: Iterable[int], first: int = 0) -> None:
        """Raise InputError for a number of a layer that there is not."""
        end = first + self.layers
        for index in indices:
            if not first <= index < end:
                self.refuse(name, f"has layer {{}} of {first} to {end - 1}", index)

    def having(self, fields: dict[str, Any]) -> Config:
        """Return the config with other values of `fields`. O(1): layers may have their own."""
        return attrs.evolve(self, fields=ChainMap(fields, cast("Any", self.fields)))

    def of_layer(self, index: int) -> Config:
        """Return the config with the fields that `per_layer_config` has for a layer. O(1)."""
        own = self._by_index.get(index, {})
        if not isinstance(own, dict) or own.keys() - _BY_LAYER:
            self.refuse("per_layer_config", "has {} for layer {}", own, index)
        return self.having(own) if own else self

    @cached_property
    def _by_index(self) -> dict[int, Any]:
        """Values of `per_layer_config` by numbers of layers, which may begin with zeros."""
        tables = self.table("per_layer_config")
        if not all(re.fullmatch("[0-9]{1,9}", key) for key in tables):
            self.refuse("per_layer_config", "must have numbers of layers as names")
        own = {int(key): table for key, table in tables.items()}
        if len(own) < len(tables):
            self.refuse("per_layer_config", "has two names of a layer, such as '1' and '01'")
        self._check_layers("per_layer_config", own)
        return own

    def by_layer(self, name: str, index: int) -> int:
        """Return an integer field that may be a list with an integer for each layer."""
        value = self.get(name)
        if isinstance(value, list) and value:
            own = self.of_layers(name)[index]
            return self.having({name: own}).count(name)
        return self.count(name)
