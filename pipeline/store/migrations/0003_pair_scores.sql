-- One row per scored pair. The pair worker may score a pair again after a restart, at another offset: the key
-- is the pair's own, the newest row wins. Scores in nats (means over compared positions), as the gate judged
-- them: multiples of 2^-30.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS pair_scores
(
    topic LowCardinality(String),
    part UInt32,
    off UInt64,
    pos UInt32,
    append_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    source_part UInt32,
    source_off UInt64,
    estimator LowCardinality(String),
    rollout LowCardinality(String),
    generation Nullable(Int32),
    -- The compared arm.
    arm LowCardinality(String),
    model_version LowCardinality(String),
    baseline_version LowCardinality(String),
    -- Version dimensions in which the halves differ: 1 model, 2 prompt, 4 data, 8 system.
    differs UInt8,
    node LowCardinality(String),
    baseline_node LowCardinality(String),
    request_type LowCardinality(Nullable(String)),
    input_tokens Int32 CODEC(T64, ZSTD(1)),
    signature String CODEC(ZSTD(1)),
    -- Empty where the halves carried none (an order key holds no NULL).
    pair_id String CODEC(ZSTD(1)),
    event_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    formed_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    first_offset UInt64,
    first_position UInt32,
    positions UInt32,
    agreed UInt32,
    first_difference Nullable(UInt32),
    ended_together Nullable(Bool),
    late Bool,
    kl_lower Float64,
    kl_lower_max Float64,
    kl_floor Float64,
    js_lower Float64,
    tv_lower Float64,
    cosine Float64,
    top1_agree Float64,
    control_kl_lower Nullable(Float64),
    blk_first UInt64 CODEC(Delta, ZSTD(1)),
    blk_last UInt64 CODEC(Delta, ZSTD(1)),
    blk_rows UInt32,
    blk_boot LowCardinality(String),
    day Date,
    INDEX event_range event_us TYPE minmax GRANULARITY 1,
    INDEX pair_bloom pair_id TYPE bloom_filter(0.01) GRANULARITY 4,
    INDEX signature_bloom signature TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = {replicated}ReplacingMergeTree(off)
PARTITION BY day
ORDER BY (source_part, signature, pair_id, arm, first_offset, first_position)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;

CREATE OR REPLACE VIEW v_pair_scores AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day, pair_id), nullIf(pair_id, '') AS pair_id
FROM pair_scores FINAL;
