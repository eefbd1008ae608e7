"""Router health is what is counted by hand, and alarms ring when and only when they should."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels import route
from moe_train.alarms import RouterWatch, gerrymander_index
from moe_train.cli import command
from moe_train.config import LogConfig
from moe_train.health import router_health
from moe_train.metrics import read_metrics
from moe_train.router import router_stats
from runs import run


def result_of(trainer, count, kept, dropped=None):
    """Return a real step's result with counts of our own, one layer twice."""
    result = trainer.step()
    count_LE, kept_LE = torch.tensor([count] * 2), torch.tensor([kept] * 2)
    return result._replace(
        count_LE=count_LE, kept_LE=kept_LE, share_LE=count_LE.double(),
        dropped_LK1=torch.tensor([dropped or [20, 0, 0]] * 2),
    )  # fmt: skip


def test_the_four_vectors_by_hand(tiny_config, trainer_of) -> None:
    result = result_of(trainer_of(tiny_config), [20, 10, 10, 0], [12, 10, 10, 0], [14, 4, 2])
    health = router_health(result, result.count_LE, ep=2)
    assert health["expert_requested"] == [2.0, 2.0]  # 20 over 10
    assert health["expert_kept"] == [1.5, 1.5]  # 12 over 8
    assert health["rank_requested"] == [1.5, 1.5]  # 30 over 20
    assert health["rank_kept"] == [1.375, 1.375]  # 22 over 16
    assert health["dropped"] == [0.2, 0.2]  # 8 of 40
    assert health["drops"] == [[0.7, 0.2, 0.1]] * 2
    assert health["never_selected"] == [1, 1]
    # 4 * (1/16 + 0 + 0 + 1/16); scores follow the load, so the usual loss says the same.
    assert health["distance"] == health["score"] == [0.5, 0.5]
    deficit = math.log(4) - (0.5 * math.log(2) + 0.5 * math.log(4))
    assert health["entropy_deficit"] == pytest.approx([deficit] * 2, rel=1e-5)


def test_an_even_load_is_healthy_in_every_number(tiny_config, trainer_of) -> None:
    result = result_of(trainer_of(tiny_config), [5] * 4, [5] * 4)
    health = router_health(result, result.count_LE, ep=4)
    for name in ("expert_requested", "expert_kept", "rank_requested", "rank_kept"):
        assert health[name] == [1.0, 1.0]
    for name in ("dropped", "entropy_deficit", "never_selected", "score", "distance"):
        assert health[name] == [0, 0]
    assert "drops" not in health


def test_an_expert_counts_as_never_selected_only_if_it_was_not_in_the_whole_window(
    tiny_config, trainer_of
) -> None:
    result = result_of(trainer_of(tiny_config), [20, 20, 0, 0], [20, 20, 0, 0])
    window_LE = torch.tensor([[20, 20, 1, 0], [40, 40, 0, 0]])
    assert router_health(result, window_LE, ep=1)["never_selected"] == [1, 2]


def test_drops_are_counted_by_expert_and_by_token(tiny_config) -> None:
    logits_TE = torch.tensor([[2.0, 1, 0], [2, 1, 0], [0, 1, 2], [0, 0, 0]])
    mask_T = torch.tensor([True, True, True, False])
    kept_TK = torch.tensor([[True, True], [False, False], [True, False], [False, False]])
    stats = router_stats(
        tiny_config.routing, logits_TE, route(logits_TE, 2, mask_T=mask_T), mask_T,
        kept_TK=kept_TK, load_E=torch.ones(3) / 3, tokens_per_sequence=4,
    )  # fmt: skip
    assert stats.count_E.tolist() == [2, 3, 1]
    assert stats.kept_E.tolist() == [1, 1, 1]
    assert stats.dropped_K1.tolist() == [1, 1, 1]  # the padded token is none of them
    none = router_stats(
        tiny_config.routing, logits_TE, route(logits_TE, 2, mask_T=mask_T), mask_T,
        kept_TK=None, load_E=torch.ones(3) / 3, tokens_per_sequence=4,
    )  # fmt: skip
    assert none.kept_E.tolist() == [2, 3, 1]
    assert none.dropped_K1.tolist() == [3, 0, 0]


numbers = st.lists(st.floats(-2, 2), min_size=2, max_size=12)


@given(numbers, st.data())
def test_the_index_is_positive_only_where_the_score_falls_and_the_load_gets_worse(score, data):
    size = len(score)
    distance = data.draw(st.lists(st.floats(0, 3), min_size=size, max_size=size))
    half = size // 2
    fall = (sum(score[:half]) - sum(score[-half:])) / half
    rise = (sum(distance[-half:]) - sum(distance[:half])) / half
    index = gerrymander_index(score, distance)
    assert index == pytest.approx(max(0.0, min(fall, rise)), abs=1e-9)


@pytest.mark.parametrize(
    ("score", "distance", "index"),
    [
        ([0.5] * 4, [0.5] * 4, 0),  # nothing moves
        ([0.5, 0.4, 0.2, 0.1], [0.5, 0.4, 0.2, 0.1], 0),  # the loss works
        ([0.1, 0.2, 0.4, 0.5], [0.1, 0.2, 0.4, 0.5], 0),  # it fails, and says so
        ([0.5, 0.5, 0.1, 0.1], [0.3, 0.3, 0.3, 0.3], 0),  # the score falls alone
        ([0.2, 0.2, 0.1, 0.1], [0.3, 0.3, 0.9, 0.9], 0.1),
        ([0.9, 0.9, -0.1, -0.1], [0.3, 0.3, 0.5, 0.5], 0.2),
    ],
)
def test_the_index_of_constructed_cases(score, distance, index) -> None:
    assert gerrymander_index(score, distance) == pytest.approx(index)


def record(step: int, **changes) -> dict:
    return {
        "kind": "train", "step": step, "score": [0.1], "distance": [0.1],
        "expert_requested": [1.2], "never_selected": [0],
    } | changes  # fmt: skip


def watch(window: int = 10) -> RouterWatch:
    return RouterWatch(window, 0.05, top_k=2, num_experts=8)


def ringing(watcher: RouterWatch, records: list[dict]) -> list[list[str]]:
    return [
        [line.partition(":")[0] for line in watcher.look(record)["alarms"]] for record in records
    ]


def test_a_collapsed_router_rings_after_five_records_and_not_before() -> None:
    records = [record(s, expert_requested=[4.0]) for s in range(1, 9)]  # of at most 8 / 2
    rung = ringing(watch(), records)
    assert rung == [[]] * 4 + [["layer 0 collapse"]] * 4
    assert ringing(watch(), [record(s, expert_requested=[3.0]) for s in range(9)]) == [[]] * 9


def test_starving_experts_ring_after_five_records_in_a_row() -> None:
    records = [record(s, never_selected=[int(s != 3)]) for s in range(1, 10)]
    rung = ringing(watch(), records)
    assert rung == [[]] * 7 + [["layer 0 starved"]] * 2


def test_gerrymandering_rings_and_a_loss_that_works_does_not() -> None:
    bad = [record(s, score=[0.5 - s / 20], distance=[0.5 + s / 20]) for s in range(10)]
    good = [record(s, score=[0.5 - s / 20], distance=[0.5 - s / 20]) for s in range(10)]
    assert ringing(watch(), bad)[-1] == ["layer 0 gerrymander"]
    assert ringing(watch(), bad)[:-1] == [[]] * 9  # not before the window is full
    assert ringing(watch(), good) == [[]] * 10


def test_a_score_better_than_even_beside_an_uneven_load_rings() -> None:
    records = [record(s, score=[-0.01], distance=[0.4]) for s in range(10)]
    assert ringing(watch(), records)[-1] == ["layer 0 disagreement"]
    near = [record(s, score=[-0.01], distance=[0.04]) for s in range(10)]
    assert ringing(watch(), near) == [[]] * 10


def test_a_watch_that_goes_on_from_records_says_what_one_that_saw_them_says() -> None:
    records = [
        record(s, score=[math.sin(s)], distance=[1 + math.cos(3 * s)], never_selected=[s % 7 > 0])
        for s in range(40)
    ]
    straight = watch()
    said = [straight.look(r) for r in records]
    for cut in (3, 17, 33):
        again = watch()
        again.resume([{"kind": "run", "step": 0}, *records[:cut], {"kind": "train", "step": 9}])
        assert [again.look(r) for r in records[cut:]] == said[cut:]


def test_a_run_records_health_for_each_layer_and_experts_only_if_asked(
    tmp_path, text_folder, monkeypatch, capsys
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    at_once = {"train__async-save": False}  # in the background, a save is safe some steps later
    brief = {"log__experts": False, "model__num-experts": 16}
    assert run(tmp_path / "a", text_folder, **brief, **at_once) == 0
    assert run(tmp_path / "b", text_folder, routing__forced="uniform", **at_once) == 0
    said = capsys.readouterr().out
    for folder in "ab":
        records = read_metrics(tmp_path / folder / "metrics.jsonl")
        [*train] = [r for r in records if r["kind"] == "train"]
        for r in train:
            for name in ("expert_requested", "rank_kept", "score", "distance", "gerrymander"):
                assert len(r[name]) == 2
            assert sum(r["parts"].values()) > 0
            assert set(r["parts"]) == {"data", "forward", "backward", "optimizer", "statistics"}
        # Step 3 is saved in the background: its record comes when it is committed.
        ages = [r["checkpoint_age_steps"] for r in train]
        assert ages[:3] == [1, 2, 3]
        assert all(age in (step, step - 3) for step, age in enumerate(ages[3:], start=4))
        assert ("load" in train[0]) == (folder == "b")
    assert all(r["labels"] == ["forced routing: uniform"] for r in records)
    assert train[-1]["expert_requested"] == [1.0, 1.0]
    result = json.loads((tmp_path / "b" / "result.json").read_text())
    assert result["labels"] == ["forced routing: uniform"]
    assert "labels" not in json.loads((tmp_path / "a" / "result.json").read_text())
    assert (
        "[forced routing: uniform]"
        in [line for line in said.splitlines() if "tokens/s" in line][-1]
    )
    assert "forced routing: uniform" in (tmp_path / "b" / "report.html").read_text()
    assert command(["eval", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == ["forced routing: uniform"]
    assert command(["eval", str(tmp_path / "b")]) == 0
    assert "; forced routing: uniform" in capsys.readouterr().out
    assert command(["generate", str(tmp_path / "b"), "--bytes", "2"]) == 0
    assert capsys.readouterr().err == "forced routing: uniform\n"


def test_a_run_whose_experts_starve_rings_once_records_it_always_and_reports_it(
    tmp_path, text_folder, monkeypatch, capsys
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (
        run(tmp_path / "a", text_folder, **{"model__num-experts": 256}) == 0
    )  # for 128 rows a step
    said = capsys.readouterr().out
    assert said.count("ALARM at step 5: layer 1 starved: ") == 1
    assert "ALARM at step 6: layer 1 starved" not in said
    records = read_metrics(tmp_path / "a" / "metrics.jsonl")
    rung = {r["step"]: len(r["alarms"]) for r in records if r["kind"] == "train"}
    assert rung == {1: 0, 2: 0, 3: 0, 4: 0, 5: 2, 6: 2}
    page = (tmp_path / "a" / "report.html").read_text()
    assert "(2 records, from step 5 to 6)" in page


def test_a_record_does_not_grow_with_experts_in_brief_mode(tiny_config, trainer_of) -> None:
    sizes = []
    for experts in (4, 64):
        model = replace(tiny_config.model, num_experts=experts)
        config = replace(tiny_config, model=model, log=LogConfig(experts=False))
        result = trainer_of(config).step()
        sizes.append(len(json.dumps(router_health(result, result.count_LE, ep=1))))
    assert abs(sizes[1] - sizes[0]) < 60  # digits, not entries
