"""The archive: records of one source partition become blocks, blocks become rows, exactly once.

The table is the checkpoint (reliability notes in docs/archive.md). What the worker shell does:

    archive = Archive(store, ArchiveSettings(...))          # blocks: connects; store.warm_up() was called before
    part = archive.open_partition(topic, partition)         # BLOCKING, in a thread, on assignment
        # seek the consumer to part.read_from if its next record lies beyond it (the table decides, the
        # Kafka commit is a hint; if records there are gone, go on with the first one there is)
    refused = part.add(SourceRecord(...), now_us)           # never blocks; skips offsets < part.read_from
        # refused: only what this worker must dead-letter itself (topics of which it is the only reader)
    block = part.take(now_us)                               # a due block or None; one block in flight per partition
    ok = archive.store_block(block, stop)                   # BLOCKING, in a thread: retries until stored;
                                                            # False only if `stop` (threading.Event) was set
    commit = part.stored(block)                             # offset to commit (next to read); None: nothing new
    part.full                                               # back-pressure: do not add before a block was stored
    part.gauges()                                           # name → int
    part.abandon()                                          # revoked: drop what is not stored

On revoke: set `stop`, abandon, forget the object; on assignment open a new one. `pipeline.workers` may not
import this package: the composition root passes the Archive in.
"""
