"""Pairing, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core import pairing
from pipeline.core.pairing import PairSource, prepare_together, settle_together
from pipeline.core.source import BYTES_AT_ONCE, ContentSettings, RecordMeta
from pipeline.core.table import CellTable
from schemas.codec import decode_logits
from schemas.topics import JSON, Topic
from tests.core import scenarios
from tests.core.scenarios import ANSWERS

S = 1_000_000
T = 1_700_000_000 * S
J = 3 * S
SETTINGS = ContentSettings(lateness_us=2 * S, join_timeout_us=J)
CAPPED = replace(SETTINGS, cells_per_bucket=20)
Together: TypeAlias = Callable[[Sequence[PairSource]], None]
VERSIONS = {"baseline": "m1", "canary": "m2", "control": "m1"}
CANARY = ("chat", 1, "canary", "m2", 1)
MISSING_CANARY = ("chat", 1, "canary", None, 0)


def half(arm: str, answer: int = 0, **fields: Any) -> dict[str, Any]:
    """One arm's answer, complete at T + 0.5 s."""
    tokens, ids, values = ANSWERS[answer]
    return {
        "v": 1, "rollout": "chat", "generation": 1, "arm": arm, "pair_id": "p", "signature": "0" * 32,
        "ts_us": T, "duration_us": 500_000, "node": f"{arm}-1", "input_tokens": 600,
        "model_version": VERSIONS[arm], "expected_arms": ["baseline", "canary"], "definition": "raw",
        "source": "generated", "tokens": tokens, "top_ids": ids, "top_logprobs": values, **fields,
    }  # fmt: skip


class Log:
    """Appends records to a source and reads back what it says."""

    def __init__(self, waiting_bytes: int = 1 << 28) -> None:
        self.offset = 0
        self.source = PairSource(Topic.LOGITS, 0, SETTINGS, waiting_bytes=waiting_bytes)
        self.pairs: list[Any] = []

    def append(self, at_us: int, *halves: dict[str, Any], size_bytes: int = 100) -> None:
        """One record; without halves a tick."""
        decoded = decode_logits(msgspec.json.encode(list(halves)), JSON) if halves else None
        self.source.read(RecordMeta(self.offset, at_us, size_bytes), decoded)
        self.offset += 1

    def finals(self) -> Any:
        """Close everything; second (from T on) → population → cell. Keeps the pair batches in `pairs`."""
        self.append(T + 60 * S)
        flush = self.source.take_flush()
        self.pairs += flush.pairs
        contents, _ = scenarios.assemble(scenarios.finals_of(flush))
        return {second - T // S: held for second, held in contents.items()}

    def counters(self) -> Any:
        """(second, population) → counters of the cell `all`."""
        return {
            (second, population): cells["all", ""]["counters"]
            for second, held in self.finals().items()
            for population, cells in held.items()
        }


def test_both_halves_make_a_pair_in_the_second_of_the_later_completion() -> None:
    log = Log()
    log.append(T + S, half("baseline"))
    log.append(T + 2 * S, half("canary", 1, ts_us=T + S, node="c7"))
    held = log.finals()
    cells = held[1][CANARY]
    assert list(cells) == [
        ("all", ""), ("node", "c7"), ("context", ">512"), ("request_type", "unknown"),
        ("hardware", "unknown"), ("sampling", "unknown"), ("region", "unknown"), ("node_context", "c7|>512"),
    ]  # fmt: skip
    assert cells["all", ""]["counters"] == {"pairs": 1}
    (batch,) = log.pairs
    assert batch.kl_lower == [cells["all", ""]["measures"]["kl_lower"]["sum"]]
    assert (batch.first_offset, batch.first_position) == ([0], [0])
    assert (batch.event_us, batch.formed_us, batch.late) == ([T + S + 500_000], [T + 2 * S], [False])
    assert batch.dictionary[batch.model_version[0]] == "m2"
    assert batch.dictionary[batch.baseline_version[0]] == "m1"
    assert cells["all", ""]["worst"] == [(batch.kl_lower[0], batch.pair_id[0])]


@pytest.mark.parametrize(("waiting", "has_fresh"), [(0.0, True), (0.9, True), (1.0, False), (9.0, False)])
def test_a_second_that_what_waits_will_close_has_no_fresh_cells(waiting: float, has_fresh: bool) -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary"))
    assert log.source.take_flush(waiting=waiting).fresh, "log time was not seen to move"
    log.append(T + 2 * S + 1, half("baseline", pair_id="q"), half("canary", pair_id="q"))
    assert bool(log.source.take_flush(waiting=waiting).fresh) == has_fresh
    if not has_fresh:
        assert log.source.take_flush(waiting=waiting).fresh, "log time stands still: what waits does not come"
    assert log.counters() == {(0, CANARY): {"pairs": 2}}


@pytest.mark.parametrize("delay_us", [J, J + 1])
def test_a_half_waits_exactly_j(delay_us: int) -> None:
    log = Log()
    log.append(T + S, half("baseline", ts_us=T + 4 * S))
    log.append(T + S + delay_us, half("canary", ts_us=T + 4 * S))
    if delay_us == J:
        assert log.counters() == {(4, CANARY): {"pairs": 1}}
    else:
        late = ("chat", 1, "canary", "m2", 0)
        assert log.counters() == {
            (4, MISSING_CANARY): {"unmatched.no_canary": 1},
            (4, late): {"unmatched.late": 1},
        }


def test_what_stays_unmatched_counts_at_its_deadline_even_over_a_gap_in_the_log() -> None:
    log = Log()
    log.append(T + S, half("canary"))
    log.append(T + 50 * S)
    assert log.counters() == {(4, ("chat", 1, "canary", "m2", 0)): {"unmatched.no_baseline": 1}}


def test_each_expected_comparison_is_scored_or_counted_once() -> None:
    log = Log()
    arms = ["baseline", "canary", "control"]
    log.append(T + S, half("baseline", expected_arms=arms), half("control", expected_arms=arms))
    assert log.counters() == {
        (0, ("chat", 1, "control", "m1", 0)): {"pairs": 1},
        (4, MISSING_CANARY): {"unmatched.no_canary": 1},
    }


def test_canary_and_control_of_one_prompt_leave_their_difference() -> None:
    arms = ["baseline", "canary", "control"]
    for order in (("canary", "control"), ("control", "canary")):
        log = Log()
        log.append(T + S, half("baseline", expected_arms=arms))
        for arm in order:
            log.append(T + S, half(arm, 1 if arm == "canary" else 0, expected_arms=arms))
        cell = log.finals()[0][CANARY]["all", ""]
        excess = cell["measures"]["excess"]["sum"] - round(0.1 * 2**30)
        assert excess == cell["measures"]["kl_lower"]["sum"]
        (batch,) = log.pairs
        known = batch.control_kl_lower[batch.arm.index(1)]
        assert known == (None if order[0] == "canary" else 0)


def test_a_control_that_does_not_reproduce_the_baseline_is_left_out() -> None:
    log = Log()
    arms = ["baseline", "canary", "control"]
    log.append(T + S, *(half(arm, 2 if arm == "control" else 0, expected_arms=arms) for arm in arms))
    cell = log.finals()[0][CANARY]["all", ""]
    assert cell["counters"] == {"pairs": 1, "excess_left_out": 1}
    assert "excess" not in cell["measures"]


def test_sent_again_adds_nothing() -> None:
    log = Log()
    batch = (half("baseline"), half("canary"))
    for at_us in (T + S, T + 2 * S, T + 8 * S, T + 14 * S):
        log.append(at_us, *batch)
    counters = log.counters()
    assert counters.pop((0, CANARY)) == {"pairs": 1}
    assert {tuple(each.items()) for each in counters.values()} == {(("unmatched.duplicate", 1),)}
    assert len(counters) == 6


def test_a_key_is_forgotten_after_twice_j_of_silence() -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary"))
    log.append(T + 7 * S + 1, half("baseline"), half("canary"))
    assert log.counters() == {(0, CANARY): {"pairs": 1}, (7, CANARY): {"unmatched.late": 1}}


def test_a_pair_whose_second_is_closed_is_late_archived_and_not_judged() -> None:
    log = Log()
    log.append(T + S, half("baseline"))
    log.append(T + 3 * S + 1, half("canary", 1))
    assert log.counters() == {(3, CANARY): {"unmatched.late": 1}}
    (batch,) = log.pairs
    assert batch.late == [True]
    assert batch.kl_lower[0] > 0


def test_halves_without_pair_id_pair_at_their_deadline_if_nothing_else_comes() -> None:
    log = Log()
    log.append(T + S, half("baseline", pair_id=None), half("canary", pair_id=None))
    assert log.counters() == {(4, CANARY): {"pairs": 1}}
    (batch,) = log.pairs
    assert (batch.pair_id, batch.formed_us) == ([None], [T + 4 * S])


def test_two_halves_of_one_arm_without_pair_id_are_ambiguous() -> None:
    log = Log()
    first = half("baseline", pair_id=None)
    log.append(T + S, first, first, half("canary", pair_id=None))
    log.append(T + 2 * S, half("canary", pair_id=None, ts_us=T + 1))
    assert log.counters() == {
        (1, ("chat", 1, "baseline", "m1", 0)): {"unmatched.duplicate": 1},
        (4, ("chat", 1, "canary", "m2", 0)): {"unmatched.ambiguous": 2},
    }


def test_a_half_with_a_pair_id_never_joins_one_without() -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary", pair_id=None))
    assert log.counters() == {
        (4, MISSING_CANARY): {"unmatched.no_canary": 1},
        (4, ("chat", 1, "canary", "m2", 0)): {"unmatched.no_baseline": 1},
    }


def test_bytes_of_further_records_end_the_wait() -> None:
    log = Log(waiting_bytes=10_000)
    log.append(T + S, half("baseline", ts_us=T + S))
    log.append(T + S, size_bytes=10_000)
    log.append(T + S, size_bytes=1)
    log.append(T + S, half("canary", ts_us=T + S))
    assert log.counters() == {
        (1, MISSING_CANARY): {"unmatched.no_canary": 1},
        (1, ("chat", 1, "canary", "m2", 0)): {"unmatched.late": 1},
    }


@pytest.mark.parametrize(("room", "differs", "counter"), [(0, 1, "pairs"), (-1, 0, "unmatched.late")])
def test_a_record_counts_with_what_it_takes_in_memory(room: int, differs: int, counter: str) -> None:
    two_records = 2 * (100 + 8_192) + 3 * 1_536
    log = Log(waiting_bytes=two_records + room)
    log.append(T + S, half("baseline", ts_us=T + S))
    others = [half("canary", ts_us=T + S, pair_id=f"p{number}", rollout="other") for number in range(2)]
    log.append(T + S, *others)
    log.append(T + S, half("canary", ts_us=T + S))
    counted = log.counters()
    assert counted[1, ("chat", 1, "canary", "m2", differs)] == {counter: 1}, counted


def test_another_definition_is_not_compared() -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary", definition="processed"))
    assert log.counters() == {(1, CANARY): {"unmatched.definition_mismatch": 1}}
    assert log.pairs == []


def test_a_wrong_claim_of_forced_tokens_is_counted_and_not_compared() -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary", 2, source="forced"))
    assert log.counters() == {(1, CANARY): {"unmatched.forced_mismatch": 1}}
    assert log.pairs == []


def test_logits_without_normaliser_stand_apart() -> None:
    log = Log()
    log.append(T + S, half("baseline", kind="logits"), half("canary", 1, kind="logits"))
    cell = log.finals()[0][CANARY]["all", ""]
    assert cell["counters"] == {"renormalised": 1}
    assert list(cell["measures"]) == ["kl_renormalised"]
    assert log.pairs[0].estimator.endswith("renormalised")


def test_a_generation_that_one_half_does_not_say_is_the_others() -> None:
    log = Log()
    canary = half("canary")
    del canary["generation"]
    log.append(T + S, half("baseline", generation=7), canary)
    assert list(log.counters()) == [(0, ("chat", 7, "canary", "m2", 1))]


def test_what_closes_between_two_flushes_is_one_statement() -> None:
    log = Log()
    log.append(T + S, half("baseline"), half("canary"))
    log.append(T + 5 * S, half("baseline", pair_id="q", ts_us=T + 4 * S))
    for at_us in (T + 8 * S, T + 20 * S, T + 20 * S + 1):
        log.append(at_us)
    finals = scenarios.finals_of(log.source.take_flush())
    assert {(f.closed_from, f.closed_through, f.offset, f.parts) for f in finals} == {(0, T // S + 17, 4, 1)}
    assert [f.gating_partition for f in finals] == [0, 1, 2, 3]
    said, _ = scenarios.assemble(finals)
    assert {second - T // S for second in said} == {0, 8}
    assert log.source.take_flush().finals == []


def test_nothing_is_held_once_time_has_passed() -> None:
    log = Log()
    for n in range(40):
        log.append(T + n * S, half("baseline", pair_id=f"{n}"), half("canary", pair_id=None))
        assert log.source.gauges()["open_groups"] <= 10
    log.append(T + 100 * S)
    log.source.take_flush()
    gauges = log.source.gauges()
    gauges.pop("index_entries")
    assert set(gauges.values()) == {0}
    assert log.source._formed == {}


def test_what_waits_for_a_flush_is_bounded_by_bytes() -> None:
    for size_bytes, waiting in ((BYTES_AT_ONCE // 2 - 50_000, 1), (BYTES_AT_ONCE // 2, 0)):
        log = Log()
        log.append(T, half("baseline"), size_bytes=size_bytes)
        log.append(T, half("canary"), size_bytes=size_bytes)
        assert log.source.gauges()["pairs_waiting"] == waiting


def test_scored_pairs_leave_now_and_then_and_hold_back_the_commit() -> None:
    source = PairSource(Topic.LOGITS, 0, SETTINGS, rows_every_us=250_000)
    left: list[tuple[int, int, int | None]] = []
    # From a minute on there is something to commit.
    for offset, after_us in enumerate((0, 60 * S, 60 * S + 100_000, 60 * S + 249_999, 60 * S + 250_000)):
        ids = {"pair_id": str(offset), "ts_us": T + after_us - S}
        halves = [half("baseline", **ids), half("canary", **ids)]
        decoded = decode_logits(msgspec.json.encode(halves), JSON)
        source.read(RecordMeta(offset, T + after_us, 100), decoded)
        flush = source.take_flush()
        waiting = source.gauges()["pair_rows"]
        left.append((sum(len(batch.arm) for batch in flush.pairs), waiting, flush.commit))
    assert left == [(1, 0, None), (1, 0, 0), (0, 1, None), (0, 2, None), (3, 0, None)]


def test_so_many_scored_pairs_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "ROWS_AT_ONCE", 2)
    source = PairSource(Topic.LOGITS, 0, SETTINGS, rows_every_us=250_000)
    left = []
    for offset in range(4):
        halves = [half(arm, pair_id=str(offset)) for arm in ("baseline", "canary")]
        source.read(RecordMeta(offset, T, 100), decode_logits(msgspec.json.encode(halves), JSON))
        left.append(sum(len(batch.arm) for batch in source.take_flush().pairs))
    assert left == [1, 0, 2, 0]


def flushes(partitions: list[list[dict[str, Any]]], together: Together | None = None) -> list[Any]:
    """What sources say that read a record in turn and are flushed now and then; cells as bytes."""
    table = CellTable() if together is not None else None
    sources = [PairSource(Topic.LOGITS, number, CAPPED, table=table) for number in range(len(partitions))]
    said: list[Any] = []
    for turn, records in enumerate(zip_longest(*partitions)):
        for source, record in zip(sources, records, strict=True):
            if record is not None:
                scenarios.feed(source, Topic.LOGITS, record)
        if turn % 3 == 0:
            if together is not None:
                together(sources)
            for source in sources:
                flush = source.take_flush()
                rows = [(batch.estimator, *row) for batch in flush.pairs for row in pair_rows(batch)]
                said.append((flush.finals, flush.fresh, flush.commit, rows))
    return said


def pair_rows(batch: Any) -> list[tuple[Any, ...]]:
    """A batch's rows, with texts for indices into its dictionary."""
    texts = ("rollout", "model_version", "baseline_version", "node", "baseline_node", "request_type")
    columns = []
    for name in batch.__struct_fields__:
        values = getattr(batch, name)
        if name in texts:
            values = [None if code is None else batch.dictionary[code] for code in values]
        if isinstance(values, list) and name != "dictionary":
            columns.append(values)
    return list(zip(*columns, strict=True))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_sources_that_are_settled_together_say_what_they_say_alone(seed: int) -> None:
    partitions = scenarios.make_log(seed, Topic.LOGITS, scenarios.Shape(seconds=20), CAPPED, partitions=3)
    alone = flushes(partitions)
    assert any(rows for *_, rows in alone)
    for at_once in (1, 7, pairing.TOGETHER):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairing, "TOGETHER", at_once)
            assert flushes(partitions, settle_together) == alone
            assert flushes(partitions, prepare_together) == alone


def test_what_is_read_after_sources_were_prepared_is_in_their_next_flush() -> None:
    """It may close seconds: a commit must not pass what was not said."""
    source = PairSource(Topic.LOGITS, 0, SETTINGS)
    for offset, arm in enumerate(("baseline", "canary")):
        source.read(RecordMeta(offset, T, 100), decode_logits(msgspec.json.encode(half(arm)), JSON))
    prepare_together([source])
    source.read(RecordMeta(2, T + 3600 * S, 0), None)
    flush = source.take_flush()
    assert len(flush.fresh) == 1
    contents, _ = scenarios.assemble(scenarios.finals_of(flush))
    assert any(contents.values())


def test_a_source_that_is_dropped_gives_back_its_cells_and_no_other_loses_any() -> None:
    table = CellTable()
    dropped, kept = (PairSource(Topic.LOGITS, number, SETTINGS, table=table) for number in range(2))
    alone = PairSource(Topic.LOGITS, 1, SETTINGS)
    for source in (dropped, kept, alone):
        for offset, arm in enumerate(("baseline", "canary")):
            source.read(RecordMeta(offset, T, 100), decode_logits(msgspec.json.encode(half(arm)), JSON))
    prepare_together([dropped, kept])
    dropped.give_back()
    assert kept.take_flush() == alone.take_flush()
    for source in (kept, alone):
        source.read(RecordMeta(2, T + 60 * S, 0), None)
    assert kept.take_flush() == alone.take_flush()
    assert table.taken == 0


def test_sources_that_share_no_table_are_not_settled_together() -> None:
    sources = [PairSource(Topic.LOGITS, number, SETTINGS) for number in range(2)]
    for source in sources:
        for offset, arm in enumerate(("baseline", "canary")):
            source.read(RecordMeta(offset, T, 100), decode_logits(msgspec.json.encode(half(arm)), JSON))
    with pytest.raises(ValueError, match="share one table"):
        settle_together(sources)


def test_nor_where_there_is_nothing_to_count_but_something_to_close_or_show() -> None:
    for ends in (True, False):
        sources = [PairSource(Topic.LOGITS, number, SETTINGS) for number in range(2)]
        for source in sources:
            for offset, arm in enumerate(("baseline", "canary")):
                source.read(RecordMeta(offset, T, 100), decode_logits(msgspec.json.encode(half(arm)), JSON))
            settle_together([source])
            if ends:
                source.read(RecordMeta(2, T + 60 * S, 0), None)
        with pytest.raises(ValueError, match="share one table"):
            prepare_together(sources)
