-- One row per node event. memory_*: sums over the node's GPUs; fragmentation, engine and fingerprint fields flat.
-- topic, part, off, pos: where the event stands in the log; unique. blk_*: the block it was stored with;
-- the table is its own checkpoint (docs/archive.md). day: UTC day of append_us, constant per block.
CREATE TABLE IF NOT EXISTS node_telemetry
(
    topic LowCardinality(String),
    part UInt32,
    off UInt64,
    pos UInt32,
    append_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    node LowCardinality(String),
    ts_us DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    memory_used_bytes Nullable(UInt64),
    memory_total_bytes Nullable(UInt64),
    gpus Array(Tuple(index UInt16, memory_used_bytes Nullable(UInt64), memory_total_bytes Nullable(UInt64),
        sm_utilisation Nullable(Float64), nvlink_rx_bytes_s Nullable(UInt64), nvlink_tx_bytes_s Nullable(UInt64),
        power_w Nullable(Float64), ecc_errors Nullable(UInt64), xid Nullable(UInt16))),
    engine LowCardinality(Nullable(String)),
    kv_usage Nullable(Float64),
    kv_blocks_used Nullable(UInt64),
    kv_blocks_total Nullable(UInt64),
    kv_block_tokens Nullable(UInt64),
    kv_tokens_held Nullable(UInt64),
    kv_largest_free_run Nullable(UInt64),
    running Nullable(UInt64),
    waiting Nullable(UInt64),
    preemptions Nullable(UInt64),
    stalled Nullable(Bool),
    oom_errors Nullable(UInt64),
    internal Nullable(Float64),
    external Nullable(Float64),
    method LowCardinality(Nullable(String)),
    weights LowCardinality(Nullable(String)),
    tokenizer LowCardinality(Nullable(String)),
    libraries Map(LowCardinality(String), String),
    driver LowCardinality(Nullable(String)),
    blk_first UInt64 CODEC(Delta, ZSTD(1)),
    blk_last UInt64 CODEC(Delta, ZSTD(1)),
    blk_rows UInt32,
    blk_boot LowCardinality(String),
    day Date,
    INDEX ts_range ts_us TYPE minmax GRANULARITY 1,
    INDEX node_set node TYPE set(256) GRANULARITY 4
)
ENGINE = {replicated}ReplacingMergeTree(blk_last)
PARTITION BY day
ORDER BY (topic, part, off, pos)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;

CREATE OR REPLACE VIEW v_node_telemetry AS
SELECT * EXCEPT (blk_first, blk_last, blk_rows, blk_boot, day)
FROM node_telemetry FINAL;
