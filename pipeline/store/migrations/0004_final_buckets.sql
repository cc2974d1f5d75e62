-- Final buckets as they are on the log: one row per cell (entry = 'cell') and one per record for what it
-- declares closed (entry = 'statement', second = closed_through). Of two finals for one key the greater
-- source offset wins, as in the gate. Absent is -1 or '' here (an order key holds no NULL), NULL in the view.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS final_buckets
(
    topic LowCardinality(String),
    part UInt32,
    off UInt64,
    pos UInt32,
    append_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    entry Enum8('statement' = 0, 'cell' = 1),
    source_topic LowCardinality(String),
    source_part UInt32,
    gating_part UInt32,
    second DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    -- 'closed_from/part/parts' on statements, '' on cells: makes a statement's key unique.
    statement String,
    closed_from DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    closed_through DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    whole_from DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_off Int64,
    settings_hash LowCardinality(String),
    record_part UInt32,
    record_parts UInt32,
    rollout LowCardinality(String),
    generation Int32,
    arm LowCardinality(String),
    model_version LowCardinality(String),
    differs UInt8,
    dimension LowCardinality(String),
    value String,
    counters Map(LowCardinality(String), Int64),
    measures Map(LowCardinality(String), Tuple(count Int64, sum Int64, min Int64, max Int64,
        bins Array(Int32), counts Array(Int64))),
    worst Array(Tuple(score Int64, id String)),
    blk_first UInt64 CODEC(Delta, ZSTD(1)),
    blk_last UInt64 CODEC(Delta, ZSTD(1)),
    blk_rows UInt32,
    blk_boot LowCardinality(String),
    day Date,
    INDEX second_range second TYPE minmax GRANULARITY 1,
    INDEX rollout_set rollout TYPE set(64) GRANULARITY 4
)
ENGINE = {replicated}ReplacingMergeTree(source_off)
PARTITION BY day
ORDER BY (source_topic, source_part, gating_part, second, entry, statement,
    rollout, generation, arm, model_version, differs, dimension, value)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;

CREATE OR REPLACE VIEW v_final_buckets AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day, statement, rollout, generation, arm, model_version),
    nullIf(rollout, '') AS rollout,
    nullIf(generation, -1) AS generation,
    nullIf(arm, '') AS arm,
    nullIf(model_version, '') AS model_version
FROM final_buckets FINAL;
