"""The load of experts, as pictures and in words."""

import math

import numpy as np

from moe_train.report.heat_map import draw_legend, draw_load, draw_load_over_time
from moe_train.report.run_data import Array, RunData

_HEAT_BUCKETS = 48
_MAPS = 6  # layers whose load is drawn over time


def _final_load(run: RunData) -> Array | None:
    """Return the mean load of the last tenth of the records, [layers, experts]."""
    _, load_BLE = run.per_layer("load", 10)
    return load_BLE[-1] if load_BLE.ndim == 3 and load_BLE.size else None


def draw_loads(run: RunData) -> list[tuple[str, str]]:
    """Return titled drawings: all layers at the end, the legend, then layers over time."""
    final = _final_load(run)
    if final is None:
        return []
    steps, load_BLE = run.per_layer("load", _HEAT_BUCKETS)
    experts = final.shape[1]
    drawings = [
        ("At the end, all layers", draw_load(final, "Load of experts at the end")),
        ("", draw_legend(experts)),
    ]
    last = float(run.steps()[-1])
    for i in _layers_to_show(final):
        title = f"Layer {i}"
        drawings.append((title, draw_load_over_time(steps, load_BLE[:, i], title, last)))
    return drawings


def _layers_to_show(load_LE: Array) -> list[int]:
    """Choose the first and the last layer and the least even of the others."""
    layers = len(load_LE)
    if layers <= _MAPS:
        return list(range(layers))
    spread = np.nan_to_num(load_LE, nan=math.inf).max(axis=1)
    spread[[0, -1]] = -math.inf
    return sorted([0, layers - 1, *np.argsort(-spread, kind="stable")[: _MAPS - 2].tolist()])


def load_note(run: RunData) -> str:
    """Say in words how even the load was at the end."""
    final = _final_load(run)
    if final is None:
        return "No loads were recorded."
    layers, experts = final.shape
    starved = int((final * experts < 0.1).sum())
    note = f"Share of routed tokens; an even share is 1/{experts} = {100 / experts:.3g} %. "
    note += (
        f"{starved} of {layers * experts} experts got less than a tenth of it"
        if starved
        else "No expert got less than a tenth of it"
    )
    note += " in the last tenth of the steps."
    if layers > _MAPS:
        note += f" Over time: the first and last of {layers} layers and the {_MAPS - 2} least even."
    return note
