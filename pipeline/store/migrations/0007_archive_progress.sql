-- How far a partition was read where nothing was left to store (ticks, refused events): spares reading them
-- again after a restart. Written only after every earlier block of the partition is stored.
CREATE TABLE IF NOT EXISTS archive_progress
(
    topic LowCardinality(String),
    part UInt32,
    upto UInt64
)
ENGINE = {replicated}ReplacingMergeTree(upto)
ORDER BY (topic, part)
SETTINGS non_replicated_deduplication_window = 10000,
    replicated_deduplication_window = 10000,
    replicated_deduplication_window_seconds = 86400;
