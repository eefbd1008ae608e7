"""Read a configuration: the defaults of its dataclasses, a preset, TOML files, then dotted flags.

A configuration is a tree of frozen, keyword-only dataclasses. Its leaves are int, float, bool,
str, Path, Literal, a tuple of those, or any of them ``| None``. One name serves everywhere: the
field ``lr`` of the field ``optimizer`` is ``optimizer.lr`` in messages, ``[optimizer] lr`` in
TOML and ``--optimizer.lr`` on the command line.

Nothing is validated before all sources are merged, so a flag can repair a file.

Read in this order: `values` (what a leaf may hold), `tree` (leaves by dotted name), `flags`,
`load` (the sources in their order), `explain` (what the docstrings say of each leaf).
"""

from moe_train.load_config.load import (
    Layer,
    Loaded,
    load_config,
    load_with_sources,
    preset_names,
    read_preset_tree,
    read_tree,
)
from moe_train.load_config.tree import diff_configs, from_dict, to_dict, to_toml
from moe_train.load_config.values import ConfigError

__all__ = [
    "ConfigError",
    "Layer",
    "Loaded",
    "diff_configs",
    "from_dict",
    "load_config",
    "load_with_sources",
    "preset_names",
    "read_preset_tree",
    "read_tree",
    "to_dict",
    "to_toml",
]
