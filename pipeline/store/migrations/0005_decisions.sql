-- One row per decision of the gate (X5): the directive it led to, its cause and inputs, every rule's
-- evaluation, and the record itself, byte for byte. Without a directive: rollout is the record's key.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS decisions
(
    topic LowCardinality(String),
    part UInt32,
    off UInt64,
    pos UInt32,
    append_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    kind LowCardinality(String),
    rollout LowCardinality(String),
    generation Nullable(Int32),
    epoch Nullable(Int64),
    ts_us Nullable(DateTime64(6, 'UTC')),
    lease_until_us Nullable(DateTime64(6, 'UTC')),
    dead_man_us Nullable(Int64),
    state LowCardinality(Nullable(String)),
    weights Map(LowCardinality(String), Float64),
    last_promoted Map(LowCardinality(String), Float64),
    ejected_nodes Array(String),
    excluded_segments Array(Tuple(dimension String, value String)),
    level Nullable(UInt8),
    fallback LowCardinality(Nullable(String)),
    policy_hash LowCardinality(Nullable(String)),
    rule LowCardinality(Nullable(String)),
    capability LowCardinality(Nullable(String)),
    metric LowCardinality(Nullable(String)),
    cause_value Nullable(Float64),
    bound Nullable(Float64),
    limit Nullable(Float64),
    window_us Nullable(Int64),
    samples Nullable(Int64),
    coverage Nullable(Float64),
    scope Nullable(String),
    located_dimension Nullable(String),
    located_value Nullable(String),
    share_of_excess Nullable(Float64),
    share_of_traffic Nullable(Float64),
    pair_ids Array(String),
    also Array(String),
    command_id Nullable(String),
    reason String,
    now_us DateTime64(6, 'UTC'),
    complete_through Nullable(DateTime64(6, 'UTC')),
    command_offset Int64,
    offsets Map(String, Int64),
    evaluations Array(Tuple(rule String, scope String, verdict String, metric String,
        value Nullable(Float64), limit Nullable(Float64), samples Int64, reason String)),
    record String CODEC(ZSTD(3)),
    blk_first UInt64 CODEC(Delta, ZSTD(1)),
    blk_last UInt64 CODEC(Delta, ZSTD(1)),
    blk_rows UInt32,
    blk_boot LowCardinality(String),
    day Date,
    INDEX now_range now_us TYPE minmax GRANULARITY 1
)
ENGINE = {replicated}ReplacingMergeTree(blk_last)
PARTITION BY day
ORDER BY (topic, part, off, pos)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;

CREATE OR REPLACE VIEW v_decisions AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day)
FROM decisions FINAL;
