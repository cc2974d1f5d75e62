"""Every metric that a Klaxon process exposes: name, type, unit, meaning, labels, which process has it.

Values come from the gauges that the process also logs (`: gauges {…}`): integers by name, grouped by the
thing they belong to. A metric says which thing and which name; units become Prometheus's own here (`_us` →
seconds). Nothing is counted for Prometheus alone, and nothing is done per event for it.

**Labels are bounded.** `topic`, `outcome`, `reason`, `kind`, `what`: closed lists. `partition`: the topic's.
`gating_partition`: 4. `rollout`: at most MOST_ROLLOUTS per gating partition, those that began last; how many
are left out is a metric. No label holds what an event says; a roll-out's name is its operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, get_args

from schemas.columns import RejectKind
from schemas.control import DecisionKind

MOST_ROLLOUTS: Final = 64
"""Roll-outs of one gating partition that have metrics of their own."""

Gauges = Mapping[str, Mapping[str, int]]
"""Thing → name → value: what a process says of itself."""


class Thing(StrEnum):
    """What gauges belong to, and how it is written as their key."""

    PROCESS = "process"
    SOURCE = "source"
    """`klaxon.logits/3`: a partition that is read."""
    GATING = "gating"
    """`gating/1`: a gating partition."""
    ROLLOUT = "rollout"
    """`rollout/NAME`, at the gate."""
    ARCHIVE = "archive"
    ROUTER = "router"
    NOTIFY = "notify"
    GATEWAY = "gateway"
    USERS_REQUESTS = "gateway_requests"
    """By outcome."""
    REQUEST_NOTES = "gateway_notes"
    """By kind."""
    ROUTED = "gateway_routed"
    """By reason."""
    MIRRORS = "gateway_mirrors"
    """By outcome."""
    NOT_MIRRORED = "gateway_not_mirrored"
    """By reason."""
    NO_LOGITS = "gateway_no_logits"
    """By reason."""
    TEXTS = "gateway_texts"
    """By outcome."""
    UNPUBLISHED = "gateway_dropped"
    """By reason."""
    COUNTED = "counted"
    """`counted/klaxon.logits`: events by what they counted as."""
    DEAD_LETTERS = "dead_letters"
    """`dead_letters/klaxon.logits`: by reason."""
    DECISIONS = "decisions"
    """By kind."""
    REFUSED = "refused"
    """`refused/command`, `refused/directive`: by reason."""


LABELS: Final[Mapping[Thing, tuple[str, ...]]] = {
    Thing.PROCESS: (),
    Thing.SOURCE: ("topic", "partition"),
    Thing.GATING: ("gating_partition",),
    Thing.ROLLOUT: ("rollout",),
    Thing.ARCHIVE: (),
    Thing.ROUTER: (),
    Thing.NOTIFY: (),
    Thing.GATEWAY: (),
    Thing.USERS_REQUESTS: ("outcome",),
    Thing.REQUEST_NOTES: ("kind",),
    Thing.ROUTED: ("reason",),
    Thing.MIRRORS: ("outcome",),
    Thing.NOT_MIRRORED: ("reason",),
    Thing.NO_LOGITS: ("reason",),
    Thing.TEXTS: ("outcome",),
    Thing.UNPUBLISHED: ("reason",),
    Thing.COUNTED: ("topic", "outcome"),
    Thing.DEAD_LETTERS: ("topic", "reason"),
    Thing.DECISIONS: ("kind",),
    Thing.REFUSED: ("what", "reason"),
}
"""Of a thing's metrics. Where the last one is a closed list below, the gauges' names are its values."""

CLOSED: Final[Mapping[Thing, tuple[str, ...]]] = {
    Thing.USERS_REQUESTS: (
        "answered", "client_gone", "cut", "engine_away", "engine_silent", "no_route", "full", "stopped",
        "not_found", "wrong_method", "too_large", "bad_request", "defect",
    ),
    Thing.REQUEST_NOTES: ("not_understood", "retried", "hung_up", "asked_plain", "unmeasured"),
    Thing.ROUTED: ("weights", "no_directive", "excluded", "unknown_version", "no_node"),
    Thing.MIRRORS: (
        "mirrored", "answered", "failed", "timed_out", "queue_full", "overdue", "unscorable", "stopped",
    ),
    Thing.NOT_MIRRORED: ("path", "not_sampled", "no_pair", "signature_cap", "budget"),
    Thing.NO_LOGITS: ("no_answer", "no_positions", "no_token_identity", "not_mirrored"),
    Thing.TEXTS: (
        "sealed", "no_key", "key_expired", "absent", "malformed", "no_subject", "expired", "too_long",
        "unknown_key", "wrong_signature",
    ),
    Thing.UNPUBLISHED: ("queue_full", "invalid", "too_large", "undeliverable", "closed"),
    Thing.COUNTED: (
        "requests", "events", "errors", "no_token", "late", "duplicate", "uncounted", "cut", "dropped",
        "pairs", "renormalised", "excess_left_out", "unmatched.duplicate", "unmatched.late",
        "unmatched.ambiguous",
        "unmatched.no_baseline", "unmatched.no_canary", "unmatched.no_control",
        "unmatched.definition_mismatch", "unmatched.identity_mismatch", "unmatched.forced_mismatch",
        "unmatched.no_position",
    ),
    Thing.DEAD_LETTERS: get_args(RejectKind),
    Thing.DECISIONS: get_args(DecisionKind),
    Thing.REFUSED: (
        "rule", "tombstone", "malformed", "replayed", "expired", "too_many", "unsigned", "unknown_key",
        "not_for_this_use", "outside_validity", "wrong_signature",
    ),
}  # fmt: skip
"""The values of a label that the gauges' names stand for; any other name counts as `other`."""

OTHER: Final = "other"

Unit = Literal["seconds", "bytes", "records", "ratio", "info", ""]
Convert = Callable[[int, int], float | None]
"""(value, now_us) → the metric's value; None: there is none."""


def as_it_is(value: int, _now_us: int) -> float:
    """Counts and bytes."""
    return float(value)


def not_negative(value: int, _now_us: int) -> float | None:
    """−1 is none."""
    return None if value < 0 else float(value)


def seconds(value: int, _now_us: int) -> float:
    """Of microseconds."""
    return value / 1_000_000


def age_of_second(value: int, now_us: int) -> float | None:
    """Since the end of a second that is counted from the epoch; −1 is none yet."""
    return None if value < 0 else max(0.0, now_us / 1_000_000 - (value + 1))


def millionths(value: int, _now_us: int) -> float:
    """Shares."""
    return value / 1_000_000


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: Unit
    meaning: str
    processes: tuple[str, ...]
    thing: Thing
    gauge: str = ""
    """Name among the thing's gauges (of a histogram: among the timings); "" where every name is one, and
    stands in the last label."""
    convert: Convert = as_it_is

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels, in order."""
        return LABELS[self.thing]


SOURCES: Final = ("measure", "pair")
WORKERS: Final = ("measure", "pair", "gate", "archive")
ALL: Final = (*WORKERS, "router", "notify", "gateway")


def _gauge(name: str, unit: Unit, gauge: str, convert: Convert = as_it_is, *, meaning: str) -> Metric:
    return Metric(name, "gauge", unit, meaning, (), Thing.PROCESS, gauge, convert)


def _counter(name: str, gauge: str, *, meaning: str) -> Metric:
    return Metric(name, "counter", "", meaning, (), Thing.PROCESS, gauge)


def _timing(name: str, gauge: str, *, meaning: str) -> Metric:
    return Metric(name, "histogram", "seconds", meaning, (), Thing.PROCESS, gauge)


def _of(processes: tuple[str, ...], thing: Thing, *rows: Metric) -> Iterator[Metric]:
    """The rows, as these processes' metrics of this thing."""
    return (replace(row, processes=processes, thing=thing) for row in rows)


METRICS: Final = (
    *_of(
        ALL, Thing.PROCESS,
        _gauge("klaxon_resident_bytes", "bytes", "rss_bytes",
            meaning="Memory of this process that is in RAM."),
        _gauge("klaxon_start_time_seconds", "seconds", "started_us", seconds,
            meaning="When this process began, since the epoch: it changes at a restart."),
        _gauge("klaxon_ready", "", "ready",
            meaning="1 when /readyz says so: joined, caught up, seats held."),
        _counter("klaxon_batches_left_out_total", "batches_left_out",
            meaning="Batches left out, because they unpack to more than 64 MiB or hold more than 500,000 "
            "records or one of more than 512 headers; one that is met again counts again."),
    ),
    *_of(
        WORKERS, Thing.PROCESS,
        _gauge("klaxon_assigned_partitions", "", "assigned_partitions",
            meaning="Partitions the consumer group gave to this process; 0: it is idle."),
        _counter("klaxon_records_read_total", "reads",
            meaning="Records taken from Kafka."),
        _counter("klaxon_commits_total", "commits",
            meaning="Offset commits that the group accepted."),
        _counter("klaxon_commits_refused_total", "commits_refused",
            meaning="Offset commits that came to nothing: the group had rebalanced."),
        _counter("klaxon_recovered_records_total", "recovered",
            meaning="Records that Faust left out and that were read again."),
    ),
    *_of(
        WORKERS, Thing.DEAD_LETTERS,
        _counter("klaxon_dead_letters_total", "",
            meaning="Events and records that could not be read, by topic and reason."),
    ),
    *_of(
        ("measure", "pair", "gate"), Thing.SOURCE,
        _gauge("klaxon_lag_records", "records", "lag_records",
            meaning="Offsets between the next one to process and the partition's end (commits trail on "
            "purpose and are no lag)."),
    ),
    *_of(
        SOURCES, Thing.SOURCE,
        _gauge("klaxon_log_age_seconds", "seconds", "log_age_us", seconds,
            meaning="Age of the newest record processed: how far behind the log's end this worker is."),
        _gauge("klaxon_evidence_age_seconds", "seconds", "evidence_age_us", seconds,
            meaning="Since the newest event (ticks are none) of the partition; before the first: since this "
            "worker took it."),
        _gauge("klaxon_open_seconds", "seconds", "open_seconds",
            meaning="Seconds that are open: events may still enter them."),
        _gauge("klaxon_held_cells", "", "cells",
            meaning="Cells of open seconds; content.cells_per_bucket bounds each second's."),
        _counter("klaxon_capped_cells_total", "capped",
            meaning="Rows of evidence that found no cell of their own, because their second was full."),
        _gauge("klaxon_drop_reports", "", "reports",
            meaning="Producers' reports of drops that are remembered."),
        _gauge("klaxon_index_entries", "", "index_entries",
            meaning="Entries of the index from offset to log time."),
        _gauge("klaxon_waiting_finals", "", "finals_waiting",
            meaning="Statements of closed seconds that wait for the next flush."),
        _counter("klaxon_offset_holes_total", "holes",
            meaning="Gaps in the offsets that held no record."),
    ),
    *_of(
        SOURCES, Thing.COUNTED,
        _counter("klaxon_counted_total", "",
            meaning="Events and pairs by what they counted as; unmatched.* and dropped lower coverage. What "
            "a restart reads again counts again."),
    ),
    *_of(
        SOURCES, Thing.PROCESS,
        _timing("klaxon_flush_seconds", "flush",
            meaning="From the beginning of a flush until all of it is acknowledged."),
    ),
    *_of(
        ("measure",), Thing.SOURCE,
        _gauge("klaxon_waiting_events", "", "events_waiting",
            meaning="Events read and not counted yet."),
        _gauge("klaxon_event_keys", "", "event_keys",
            meaning="Keys of counted events, held to drop duplicates."),
    ),
    *_of(
        ("pair",), Thing.SOURCE,
        _gauge("klaxon_waiting_halves", "", "open_groups",
            meaning="Groups of halves (a pair id, or a signature) that wait for the rest."),
        _gauge("klaxon_remembered_groups", "", "remembered_groups",
            meaning="Groups that are done and remembered, to know what comes late."),
        _gauge("klaxon_oldest_wait_seconds", "seconds", "oldest_wait_us", seconds,
            meaning="How long the oldest group waits, in log time."),
        _gauge("klaxon_waiting_bytes", "bytes", "waiting_bytes",
            meaning="What waiting halves hold."),
        _gauge("klaxon_unscored_pairs", "", "pairs_waiting",
            meaning="Pairs formed and not scored yet."),
        _gauge("klaxon_unsent_pairs", "", "pair_rows",
            meaning="Pairs scored and not sent to klaxon.pairs yet."),
    ),
    *_of(
        ("gate",), Thing.GATING,
        _gauge("klaxon_seat_taken", "", "taken",
            meaning="1 when this gate process has fenced its predecessors and rebuilt the seat; 0 while it "
            "does."),
        _counter("klaxon_writers_fenced_total", "fenced",
            meaning="Transactions refused because another gate process had taken over; this process ends "
            "then."),
        _gauge("klaxon_rollouts", "", "rollouts",
            meaning="Roll-outs of the gating partition, retired ones included."),
        _gauge("klaxon_unlisted_rollouts", "", "unlisted_rollouts",
            meaning="Roll-outs beyond the bound, without metrics of their own."),
        _gauge("klaxon_complete_age_seconds", "seconds", "complete_through", age_of_second,
            meaning="Since the end of the newest second that every source has closed; over "
            "gate.blind_after_s no lease is renewed."),
        _gauge("klaxon_folded_age_seconds", "seconds", "folded_through", age_of_second,
            meaning="Since the end of the newest second that was judged."),
        _gauge("klaxon_unknown_seconds", "seconds", "unknown_seconds",
            meaning="Of the last 300 complete seconds, those that at least one source did not state."),
        _gauge("klaxon_waiting_seconds", "seconds", "waiting_seconds",
            meaning="Closed seconds, summed over sources, that wait for other sources."),
        _counter("klaxon_dropped_seconds_total", "dropped_seconds",
            meaning="Seconds let go of because they waited too long for other sources."),
        _gauge("klaxon_fresh_cells", "", "fresh_cells",
            meaning="Cells of open seconds."),
        _gauge("klaxon_scopes", "", "scopes",
            meaning="Scopes (roll-out, node, segment …) that rules hold windows of; at most 16,384 a rule."),
        _counter("klaxon_scopes_left_out_total", "scopes_left_out",
            meaning="Seconds of scopes that found no room among them: judged as part of greater ones only."),
        _gauge("klaxon_bets", "", "bets",
            meaning="Scopes that rules of `evidence: anytime` bet on, until their generation ends; at most "
            "4,096 a rule."),
        _counter("klaxon_bets_left_out_total", "bets_left_out",
            meaning="Seconds of scopes that found no room among them: judged as part of greater ones only."),
        _counter("klaxon_evidence_begun_anew_total", "evidence_begun_anew",
            meaning="Rules whose evidence a new owner did not find on klaxon.state: it begins anew, and "
            "so does their test for a pass."),
        _counter("klaxon_conflicting_finals_total", "conflicting_finals",
            meaning="Statements about one second that contradict each other."),
        _counter("klaxon_foreign_settings_total", "foreign_settings",
            meaning="Statements made with other content settings."),
        _counter("klaxon_stale_cells_total", "stale_cells",
            meaning="Fresh cells of a worker that had lost its partition."),
        _counter("klaxon_stray_records_total", "stray_records",
            meaning="Bucket records of another gating partition or an unknown source."),
        _counter("klaxon_foreign_directives_total", "foreign_directives",
            meaning="Records on the control topic that no gate wrote."),
        _counter("klaxon_orphan_states_total", "orphan_states",
            meaning="Memories of roll-outs that are not on klaxon.rollouts."),
        _counter("klaxon_commands_repeated_total", "commands_repeated",
            meaning="Commands that came twice and were obeyed once."),
        _gauge("klaxon_signing_key_valid_seconds", "seconds", "signing_key_valid_s", not_negative,
            meaning="Until readers no longer believe the key that this gate signs with; absent without end."),
        _gauge("klaxon_version_mismatches", "", "version_mismatches",
            meaning="Pairs and requests in evidence whose versions are not those under test."),
    ),
    *_of(
        ("gate",), Thing.DECISIONS,
        _counter("klaxon_decisions_total", "",
            meaning="Decisions by kind; `trip` are the cuts."),
    ),
    *_of(
        ("gate",), Thing.PROCESS,
        _timing("klaxon_decision_seconds", "decision",
            meaning="From the oldest record that was not judged yet to the committed decision."),
        _timing("klaxon_transaction_seconds", "transaction",
            meaning="A transaction: directive, decision and memory together."),
    ),
    *_of(
        ("gate",), Thing.ROLLOUT,
        _gauge("klaxon_rollout_tripped", "", "tripped",
            meaning="1 when the roll-out is cut: its canary gets nothing."),
        _gauge("klaxon_rollout_paused", "", "paused",
            meaning="1 when an operator must resume it."),
        _gauge("klaxon_rollout_left_out", "", "left_out",
            meaning="Ejected nodes and excluded segments: they get no canary in this generation."),
        _gauge("klaxon_rollout_blind", "", "blind",
            meaning="1 when its lease is not renewed, because the gate does not see."),
        _gauge("klaxon_rollout_canary_ratio", "ratio", "canary_millionths", millionths,
            meaning="The canary's share of traffic."),
        _gauge("klaxon_rollout_coverage_ratio", "ratio", "coverage_millionths", millionths,
            meaning="Scored pairs ÷ expected ones, over the policy's window; absent while none is expected, "
            "and once the roll-out is tripped or promoted."),
        _gauge("klaxon_rollout_expected_pairs", "", "expected_pairs",
            meaning="Pairs expected in that window."),
    ),
    *_of(
        ("gate", "router"), Thing.REFUSED,
        _counter("klaxon_refused_total", "",
            meaning="Commands (gate) and directives (router) that were not obeyed, by reason."),
    ),
    *_of(
        ("archive",), Thing.SOURCE,
        _gauge("klaxon_archive_lag_records", "records", "lag_records",
            meaning="Offsets that are not in ClickHouse yet."),
        _gauge("klaxon_archive_behind_seconds", "seconds", "behind_us", seconds,
            meaning="Age of the oldest record that is not in ClickHouse."),
        _gauge("klaxon_retention_left_seconds", "seconds", "retention_left_us", seconds,
            meaning="Until the broker may delete that record; absent where it keeps everything."),
        _gauge("klaxon_retention_at_risk", "", "retention_at_risk",
            meaning="1 when less than half of the retention is left, or records are gone unread."),
        _gauge("klaxon_deleted_records", "records", "deleted_records",
            meaning="Offsets that the broker deleted before they were archived."),
        _counter("klaxon_archived_rows_total", "stored_rows",
            meaning="Rows stored."),
        _counter("klaxon_archived_blocks_total", "stored_blocks",
            meaning="Blocks stored."),
        _counter("klaxon_archive_read_total", "read",
            meaning="Records read, ticks included."),
        _counter("klaxon_archive_ticks_total", "ticks",
            meaning="Ticks among them."),
        _counter("klaxon_archive_events_total", "events",
            meaning="Events in them."),
        _counter("klaxon_archive_skipped_total", "skipped",
            meaning="Records that were stored already."),
        _counter("klaxon_archive_rejected_total", "rejected",
            meaning="Events that cannot be read, whoever dead-letters them."),
        _gauge("klaxon_archive_open_rows", "", "open_rows",
            meaning="Rows of the block being filled."),
        _gauge("klaxon_archive_sealed_blocks", "", "sealed_blocks",
            meaning="Blocks that wait to be inserted."),
    ),
    *_of(
        ("archive",), Thing.ARCHIVE,
        _counter("klaxon_insert_retries_total", "retries",
            meaning="Inserts tried again."),
        _counter("klaxon_repaired_rows_total", "repaired_rows",
            meaning="Rows that a verification found missing and inserted."),
    ),
    *_of(
        ("router", "gateway"), Thing.ROUTER,
        _gauge("klaxon_router_rollouts", "", "rollouts",
            meaning="Roll-outs this router knows."),
        _gauge("klaxon_router_expired_leases", "", "expired_leases",
            meaning="Roll-outs whose lease is over: nothing may rise."),
        _gauge("klaxon_router_dead_man", "", "dead_man",
            meaning="Roll-outs back at their last promoted split, because the gate is silent."),
        _gauge("klaxon_router_aborted", "", "aborted",
            meaning="Roll-outs that this machine's directive file aborts."),
        _gauge("klaxon_router_directive_age_seconds", "seconds", "directive_age_us", seconds,
            meaning="Since the gate's newest directive; absent before the first."),
        _counter("klaxon_router_changes_total", "changes",
            meaning="Changes of what this router does."),
    ),
    # The gateway's stand in docs/gateway.md, too: `python -m tests.docs.gateway --write`.
    *_of(
        ("gateway",), Thing.GATEWAY,
        _gauge("klaxon_gateway_under_way", "", "under_way",
            meaning="Users' requests that are being answered."),
        _gauge("klaxon_gateway_bodies_coming", "", "bodies_coming",
            meaning="Users' requests whose bodies are still coming."),
        _gauge("klaxon_gateway_bodies_bytes", "bytes", "bodies_bytes",
            meaning="Kept for the bodies of users' requests."),
        _gauge("klaxon_gateway_mirrors_waiting", "", "mirrors_waiting",
            meaning="Mirrored requests whose copies wait for their turn."),
        _gauge("klaxon_gateway_mirrors_waiting_bytes", "bytes", "mirrors_waiting_bytes",
            meaning="Bodies of these."),
        _gauge("klaxon_gateway_mirrors_running", "", "mirrors_running",
            meaning="Copies on their way."),
        _gauge("klaxon_gateway_mirror_tokens_left", "", "mirror_tokens_left",
            meaning="Of this second's budget for copies; below 0: owed."),
        _gauge("klaxon_gateway_mirror_signatures", "", "mirror_signatures",
            meaning="Signatures of which copies were made in the last minute."),
        _counter("klaxon_gateway_mirror_signatures_forgotten_total", "mirror_signatures_forgotten",
            meaning="Signatures forgotten before their minute was over: too many are held."),
        _counter("klaxon_gateway_mirrored_total", "mirrored",
            meaning="Requests that were to be mirrored."),
        _gauge("klaxon_gateway_token_estimate_models", "", "token_estimate_models",
            meaning="Models whose requests' tokens can be estimated."),
        _gauge("klaxon_gateway_unknown_versions", "", "unknown_versions",
            meaning="Versions of the directive that no pool has: they get nothing."),
        _gauge("klaxon_gateway_exclusions_not_understood", "", "excluded_segments_not_understood",
            meaning="Excluded segments of the directive that say nothing to this gateway."),
        _gauge("klaxon_gateway_ejections_ignored", "", "ejections_ignored",
            meaning="1 while every engine of the baseline is ejected, and answers all the same."),
        _gauge("klaxon_gateway_engines", "", "engines",
            meaning="Engines configured."),
        _gauge("klaxon_gateway_engines_known", "", "engines_known",
            meaning="Engines that said what they are."),
        _gauge("klaxon_gateway_engines_lost", "", "engines_lost",
            meaning="Engines that no connection comes about to."),
        _gauge("klaxon_gateway_engines_avoided", "", "engines_avoided",
            meaning="Engines that users' requests try last: no connection came about in the last 5 s."),
        _counter("klaxon_gateway_engine_loads_total", "engine_loads",
            meaning="Times that an engine was found newly loaded."),
        _gauge("klaxon_gateway_engine_differences", "", "engine_differences",
            meaning="Things in which engines differ that should not."),
        _gauge("klaxon_gateway_signature_key_valid_seconds", "seconds", "signature_key_valid_s",
            meaning="Until the key of prompt signatures should be replaced; 0: past, and used all the same."),
        _gauge("klaxon_gateway_pseudonym_key_valid_seconds", "seconds", "pseudonym_key_valid_s",
            meaning="Until the key of pseudonyms should be replaced; 0: past, and used all the same."),
        _gauge("klaxon_gateway_text_key_valid_seconds", "seconds", "text_key_valid_s",
            meaning="Until no text is encrypted with its key any more (C1); 0: past, so no text leaves."),
        _gauge("klaxon_gateway_embeddings_waited_for", "", "embeddings_waited_for",
            meaning="Request events that wait for their embedding."),
        _gauge("klaxon_gateway_embeddings_waiting", "", "embeddings_waiting",
            meaning="Texts that wait for their turn at the endpoint."),
        _gauge("klaxon_gateway_embeddings_under_way", "", "embeddings_under_way",
            meaning="Texts that the endpoint has been asked for."),
        _counter("klaxon_gateway_embeddings_total", "embeddings_made",
            meaning="Embeddings that came."),
        _counter("klaxon_gateway_embeddings_full_total", "embeddings_full",
            meaning="Embeddings left out: too many texts waited."),
        _counter("klaxon_gateway_embeddings_timed_out_total", "embeddings_timed_out",
            meaning="Embeddings left out: none came in gateway.embeddings.timeout_s."),
        _counter("klaxon_gateway_embeddings_failed_total", "embeddings_failed",
            meaning="Embeddings left out: the endpoint was away, or answered none."),
        _counter("klaxon_gateway_spans_total", "spans_exported",
            meaning="Spans that the collector has."),
        _counter("klaxon_gateway_spans_lost_total", "spans_lost",
            meaning="Spans that the collector did not take: away, slow, or it refused them."),
        _gauge("klaxon_gateway_events_queued", "", "queued_events",
            meaning="Events that wait for Kafka."),
        _gauge("klaxon_gateway_events_queued_bytes", "bytes", "queued_bytes",
            meaning="Of these."),
        _counter("klaxon_gateway_events_total", "events_accepted",
            meaning="Events taken for Kafka."),
        _counter("klaxon_gateway_events_acknowledged_total", "events_acknowledged",
            meaning="Events that Kafka has."),
        _counter("klaxon_gateway_events_shortened_total", "events_cut",
            meaning="Logit events that lost positions at their end to fit into a record."),
        _counter("klaxon_gateway_drops_reported_total", "drops_reported",
            meaning="Pairs lost because a mirrored request was dropped, and reported as such."),
        _counter("klaxon_gateway_send_retries_total", "send_retries",
            meaning="Batches sent again."),
    ),
    *_of(
        ("gateway",), Thing.USERS_REQUESTS,
        _counter("klaxon_gateway_requests_total", "",
            meaning="Users' requests by what became of them; `answered`: whole, whatever the engine said."),
    ),
    *_of(
        ("gateway",), Thing.REQUEST_NOTES,
        _counter("klaxon_gateway_notes_total", "",
            meaning="What happened on requests' way besides."),
    ),
    *_of(
        ("gateway",), Thing.ROUTED,
        _counter("klaxon_gateway_routed_total", "",
            meaning="Routing decisions by what decided."),
    ),
    *_of(
        ("gateway",), Thing.MIRRORS,
        _counter("klaxon_gateway_mirrors_total", "",
            meaning="`mirrored`: requests to be mirrored; `answered`, `failed`, `timed_out`: copies made; "
            "the rest: requests dropped before their copies were made, and reported."),
    ),
    *_of(
        ("gateway",), Thing.NOT_MIRRORED,
        _counter("klaxon_gateway_not_mirrored_total", "",
            meaning="Requests that were not to be mirrored, by reason."),
    ),
    *_of(
        ("gateway",), Thing.NO_LOGITS,
        _counter("klaxon_gateway_answers_without_logits_total", "",
            meaning="Answers of mirrored requests of which there is no logit event, by reason."),
    ),
    *_of(
        ("gateway",), Thing.TEXTS,
        _counter("klaxon_gateway_texts_total", "",
            meaning="Texts sealed, and texts that stayed, by reason: absent is no consent at all."),
    ),
    *_of(
        ("gateway",), Thing.UNPUBLISHED,
        _counter("klaxon_gateway_events_dropped_total", "",
            meaning="Events that never reached Kafka, by reason."),
    ),
    *_of(
        ("notify",), Thing.NOTIFY,
        _counter("klaxon_notifications_delivered_total", "delivered",
            meaning="Notifications that the receiver has taken."),
        _counter("klaxon_notifications_retried_total", "retried",
            meaning="Attempts that are made again."),
        _counter("klaxon_notifications_refused_total", "refused",
            meaning="Notifications that the receiver refused for good: nobody was told."),
        _counter("klaxon_notifications_given_up_total", "given_up",
            meaning="Notifications that waited for notify.give_up_s: nobody was told."),
        _gauge("klaxon_notification_wait_seconds", "seconds", "wait_us", seconds,
            meaning="Since the notification that is under way was first tried; 0 when none is."),
    ),
)  # fmt: skip

LOG_ONLY: Final[Mapping[Thing, frozenset[str]]] = {
    Thing.ARCHIVE: frozenset({"lag_records", "behind_us", "retention_at_risk"}),
}
"""Gauges that are logged and no metrics: sums and maxima, which a query makes of the partitions'."""


def metrics_of(process: str) -> tuple[Metric, ...]:
    """What this kind of process exposes."""
    return tuple(metric for metric in METRICS if process in metric.processes)
