-- One row per request event (P1). event_us: completion, cut at append_us + 5 s.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS inference_log
(
    topic LowCardinality(String),
    part UInt32,
    off UInt64,
    pos UInt32,
    append_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    rollout LowCardinality(String),
    generation Nullable(Int32),
    arm LowCardinality(String),
    pair_id Nullable(String) CODEC(ZSTD(1)),
    signature String CODEC(ZSTD(1)),
    ts_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    duration_us Int64 CODEC(T64, ZSTD(1)),
    event_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    node LowCardinality(String),
    input_tokens Int32 CODEC(T64, ZSTD(1)),
    model_name LowCardinality(Nullable(String)),
    model_version LowCardinality(String),
    prompt_version LowCardinality(Nullable(String)),
    data_version LowCardinality(Nullable(String)),
    system_version LowCardinality(Nullable(String)),
    request_type LowCardinality(Nullable(String)),
    temperature Nullable(Float64),
    top_p Nullable(Float64),
    seed Nullable(Int64),
    max_tokens Nullable(Int32),
    engine LowCardinality(Nullable(String)),
    hardware LowCardinality(Nullable(String)),
    region LowCardinality(Nullable(String)),
    tenant LowCardinality(Nullable(String)),
    cached_tokens Nullable(Int32),
    shadow Bool,
    status UInt16,
    error LowCardinality(Nullable(String)),
    ttft_us Nullable(Int64),
    output_tokens Int32 CODEC(T64, ZSTD(1)),
    itl_us Nullable(Int64),
    finish_reason LowCardinality(Nullable(String)),
    stream Nullable(Bool),
    session Nullable(String) CODEC(ZSTD(1)),
    prompt_id Nullable(String) CODEC(ZSTD(1)),
    response_quality_score Nullable(Float64),
    similarity Nullable(Float64),
    scores Map(LowCardinality(String), Float64),
    steps Array(Tuple(name String, duration_us Int64, attempts UInt16, outcome Nullable(String))),
    embedding Array(Float64) CODEC(ZSTD(1)),
    consent_id Nullable(String) CODEC(ZSTD(1)),
    -- The encrypted text itself is not kept here: without a verified consent it may not be (C3).
    text_key_id LowCardinality(Nullable(String)),
    parse_depth Nullable(Int32),
    snapshot_id Nullable(String) CODEC(ZSTD(1)),
    blk_first UInt64 CODEC(Delta, ZSTD(1)),
    blk_last UInt64 CODEC(Delta, ZSTD(1)),
    blk_rows UInt32,
    blk_boot LowCardinality(String),
    day Date,
    INDEX event_range event_us TYPE minmax GRANULARITY 1,
    INDEX pair_bloom pair_id TYPE bloom_filter(0.01) GRANULARITY 4,
    INDEX signature_bloom signature TYPE bloom_filter(0.01) GRANULARITY 4
)
ENGINE = {replicated}ReplacingMergeTree(blk_last)
PARTITION BY day
ORDER BY (topic, part, off, pos)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;

CREATE OR REPLACE VIEW v_inference_log AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day), duration_us / 1000 AS latency_ms
FROM inference_log FINAL;
