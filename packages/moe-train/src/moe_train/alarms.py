"""What a router must not do unnoticed: gerrymander, contradict its score, collapse, starve experts.

The usual balance loss is ``1 + score`` with ``score = E * sum (f - 1/E)(P - 1/E)``: load times
scores, both as deviations from even. ``distance = E * sum (f - 1/E)^2`` is the load's own. A router
can lower the first by moving scores among tokens whose choice does not hang on them, as districts
are redrawn without moving a voter; the load stays, or gets worse. So the alarms watch both.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_IN_A_ROW = 5
"""Records in a row after which a collapse is no chance any more."""
_COLLAPSED = 0.9
"""Part of all tokens that one expert gets, from which on a layer counts as collapsed."""


def gerrymander_index(score: Sequence[float], distance: Sequence[float]) -> float:
    """Return by how much the score fell while the true distance rose.

    Both are averaged over the first and over the second half. The index is the smaller of the fall
    of the score and the rise of the distance, and 0 unless both are positive. So it is 0 where both
    fall (the loss works), where both rise (it fails, and says so), and where nothing moves.

    Args:
        score: The usual balance loss, less one, over time.
        distance: The squared distance of the load from even, at the same times.

    Examples:
        >>> gerrymander_index([0.5, 0.5, 0.2, 0.2], [0.5, 0.5, 0.9, 0.9])
        0.3
        >>> gerrymander_index([0.5, 0.5, 0.2, 0.2], [0.9, 0.9, 0.5, 0.5])
        0.0
    """
    if len(score) != len(distance):
        raise ValueError(f"score has {len(score)} values, distance has {len(distance)}")
    fall, rise = -_change(score), _change(distance)
    return round(max(0.0, min(fall, rise)), 12)


def _change(values: Sequence[float]) -> float:
    half = len(values) // 2
    if half == 0:
        return 0.0
    return sum(values[-half:]) / half - sum(values[:half]) / half


class RouterWatch:
    """Looks at the records of a run and says what is wrong with its routers.

    Its whole state are the last records, so a run that goes on reads it from its metrics.

    Args:
        window: Records that are looked back on.
        threshold: Least index of an alarm, as `LogConfig.gerrymander`.
        top_k: K.
        num_experts: E.
    """

    def __init__(self, window: int, threshold: float, top_k: int, num_experts: int):
        self.threshold, self.top_k, self.num_experts = threshold, top_k, num_experts
        self._past: deque[Mapping[str, Any]] = deque(maxlen=window)

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Look at the records that a run has left behind."""
        self._past.extend(r for r in records if r["kind"] == "train" and "distance" in r)

    def look(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Take one more record into account.

        Args:
            record: With what `router_health` says.

        Returns:
            ``gerrymander``: the index of each layer over the window, and ``alarms``: one line each.
        """
        if self._past and len(self._past[-1]["distance"]) != len(record["distance"]):
            self._past.clear()  # other layers than before
        self._past.append(record)
        layers = range(len(record["distance"]))
        index = [gerrymander_index(self._column("score", i), self._column("distance", i))
                 for i in layers]  # fmt: skip
        alarms = [line for i in layers for line in self._of_layer(i, index[i])]
        return {"gerrymander": [float(f"{x:.6g}") for x in index], "alarms": alarms}

    def _of_layer(self, layer: int, index: float) -> Iterable[str]:
        full = len(self._past) == self._past.maxlen
        score, distance = self._column("score", layer), self._column("distance", layer)
        if full and index >= self.threshold:
            yield (
                f"layer {layer} gerrymander: over {len(self._past)} records the balance score fell "
                f"and the load got worse, both by {index:.2f} or more"
            )
        recent = len(self._past) // 2 or 1
        far = sum(distance[-recent:]) / recent
        said = sum(score[-recent:]) / recent
        if full and said < 0 and far >= self.threshold:
            yield (
                f"layer {layer} disagreement: the balance loss says {1 + said:.2f}, better than "
                f"even, and the load is {far:.2f} from it"
            )
        yield from self._of_last(layer)

    def _of_last(self, layer: int) -> Iterable[str]:
        """Say what the last few records agree on."""
        if len(self._past) < min(_IN_A_ROW, self._past.maxlen or 0):
            return
        last = list(self._past)[-_IN_A_ROW:]
        if self.top_k == self.num_experts:
            return
        limit = _COLLAPSED * self.num_experts / self.top_k
        if all(r["expert_requested"][layer] >= limit for r in last):
            ratio = last[-1]["expert_requested"][layer]
            yield (
                f"layer {layer} collapse: one expert gets {ratio:.1f} times the mean, and with "
                f"{self.top_k} of {self.num_experts} experts a token at most "
                f"{self.num_experts / self.top_k:.1f} are possible"
            )
        starved = min(r["never_selected"][layer] for r in last)
        if starved:
            yield (
                f"layer {layer} starved: {starved} experts or more got no row in {len(last)} "
                "records in a row"
            )

    def _column(self, name: str, layer: int) -> list[float]:
        return [record[name][layer] for record in self._past]
