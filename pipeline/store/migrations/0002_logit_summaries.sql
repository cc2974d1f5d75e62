-- One row per logit event: what it says of itself, no token lists.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS logit_summaries
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
    expected_arms Array(LowCardinality(String)),
    definition LowCardinality(String),
    source LowCardinality(String),
    kind LowCardinality(String),
    -- Resolution of the log-probabilities on the wire, in nats.
    eta Float64,
    identity LowCardinality(String),
    ended Nullable(Bool),
    positions UInt32 CODEC(T64, ZSTD(1)),
    k UInt8,
    -- Positions whose emitted token is on its own list, and the sum of its log-probability there (nats):
    -- exp(-emitted_logprob_sum / emitted_listed) is the perplexity of what was generated (A2).
    emitted_listed UInt32 CODEC(T64, ZSTD(1)),
    emitted_logprob_sum Nullable(Float64),
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

CREATE OR REPLACE VIEW v_logit_summaries AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day)
FROM logit_summaries FINAL;
