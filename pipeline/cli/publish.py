"""`klaxon publish TOPIC [FILE]`: JSON events, one a line, into a topic."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedIOBase, BufferedReader
from typing import Final

import click

from agents.publish import DeliveryError, KafkaRecordProducer
from pipeline.cli import options
from pipeline.cli.exits import CommandError, Exit
from pipeline.cli.gate_link import require_topics, signer_of_commands
from pipeline.cli.options import config_option, json_option
from pipeline.cli.playback import Due, Recorded, late, moved, records, schedule, value_of
from pipeline.cli.printing import counted
from pipeline.config import Config
from pipeline.workers.acl_table import Operation
from pipeline.workers.broker import BrokerAwayError, BrokerError, client_options
from pipeline.workers.stopping import leave, stopping_within, unless
from schemas.columns import Rejected
from schemas.errors import UnknownTopicError
from schemas.lines import READERS, event_time_us, key_of, read_line
from schemas.signing import Signer
from schemas.topics import CONTENT_TYPE, JSON, SOURCES, Topic, partition_of

SHOWN: Final = 20
"""Rejected lines that are shown one by one; all are counted."""
REASONS: Final = 100
"""Distinct reasons that are counted apart."""
CHUNK_BYTES: Final = 1 << 20
"""What is read of a stream at most before what was read is sent."""
TURN_US: Final = 20_000
"""Paced events due within one such turn are sent together."""
STOP_GRACE_S: Final = 10.0
"""Between being asked to stop and the end: what was sent may wait for its acknowledgement so long."""
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Tally:
    """What became of the lines."""

    name: str
    """The input, as errors name it."""
    lines: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    shown: list[dict[str, object]] = field(default_factory=list)
    late: int = 0
    opening: tuple[int, Rejected] | None = None
    """The first line, where it looks like the start of a JSON document of many lines; the next line tells."""

    def settle(self, text: bytes = b"") -> None:
        """Look at the line after the opening one, empty at the end of the input.

        Raises CommandError when both are parts of one document: every line would be an error of its own."""
        if self.opening is None:
            return
        if text and _json_fault(text) is not None:
            raise CommandError(
                f"{self.name}: this is one JSON document over many lines; one event a line is expected "
                "(`jq -c .` writes a document on one line, `jq -c '.[]'` the members of a list)",
                Exit.USAGE,
            )
        number, fault = self.opening
        self.opening = None
        self.reject(number, fault)

    def reject(self, number: int, fault: Rejected) -> None:
        """Count a line that is no event, and show the first few."""
        reason = f"{fault.field}: {fault.reason}"
        if reason not in self.rejected and len(self.rejected) >= REASONS:
            reason = "other"
        self.rejected[reason] += 1
        if len(self.shown) < SHOWN:
            self.shown.append({"line": number, "field": fault.field, "reason": fault.reason})
            click.echo(f"{self.name}:{number}: {fault.field}: {fault.reason}", err=True)


def _topic(_: click.Context, __: click.Parameter, value: str) -> Topic:
    writable = ", ".join(topic.value for topic in READERS)
    name = value if value.startswith("klaxon.") else f"klaxon.{value}"
    try:
        topic = Topic.named(name)
    except UnknownTopicError:
        raise click.BadParameter(f"unknown topic {value!r}; events go to {writable}") from None
    if topic not in READERS:
        raise click.BadParameter(f"{topic.value} is written by Klaxon itself; events go to {writable}")
    return topic


@click.command()
@click.argument("topic", callback=_topic)
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--shift-to-now", "shift", is_flag=True, help="Move recorded times so that events are judged.")
@click.option(
    "--speed",
    type=float,
    callback=options.speed,
    help="Send at the recorded pace, so many times faster; without it, all at once.",
)
@config_option
@json_option
def publish(
    config: Config, topic: Topic, file: BufferedIOBase, shift: bool, speed: float | None, as_json: bool
) -> int:
    """Send JSON events, one a line, keyed and partitioned as Klaxon needs.

    TOPIC: requests, logits, telemetry, feedback or commands (with or without "klaxon."). FILE: default is
    standard input. Lines that are no such event are named and left out; the exit code is then 2.

    With --shift-to-now alone, one constant is added so that the last event happens now. With --speed, every
    event happens when it is sent. Both read the whole input first.

    SIGTERM and SIGINT end the reading; what was read is sent, acknowledged and reported.

    \b
    Example: klaxon publish requests day.jsonl --shift-to-now --speed 10
    """
    tally = Tally(getattr(file, "name", "<stdin>"))
    try:
        stopped = asyncio.run(_run(config, topic, file, tally, shift, speed))
    except (BrokerAwayError, DeliveryError) as error:
        remedy = "; check kafka.bootstrap" if isinstance(error, BrokerAwayError) else ""
        done = counted(tally.accepted, "event")
        sent = f"; {done} acknowledged before" if tally.accepted else ""
        raise CommandError(f"{error}{remedy}{sent}", Exit.UNREACHABLE) from None
    except BrokerError as error:
        raise CommandError(str(error), Exit.USAGE) from None
    _report(topic, tally, config, as_json)
    code = Exit.USAGE if tally.rejected else Exit.OK
    if stopped:
        leave(code)
    return code


def _report(topic: Topic, tally: Tally, config: Config, as_json: bool) -> None:
    rejected = tally.rejected.total()
    if tally.late:
        click.echo(
            f"{counted(tally.late, 'event')} older than the lateness of {config.content.lateness_s} s: "
            "archived, not judged; --shift-to-now (with --speed for a long recording) moves such times",
            err=True,
        )
    if as_json:
        result = {
            "topic": topic.value,
            "accepted": tally.accepted,
            "rejected": rejected,
            "rejected_by_reason": dict(tally.rejected),
            "late": tally.late,
            "errors": tally.shown,
        }
        click.echo(json.dumps(result))
        return
    click.echo(f"accepted {tally.accepted}  rejected {rejected}")
    for reason, count in tally.rejected.most_common():
        click.echo(f"  {count:>6}  {reason}")


def _read(topic: Topic, lines: Iterable[bytes], tally: Tally) -> Iterator[Recorded]:
    """Accepted lines; the others are counted. Blank lines are nothing."""
    for raw in lines:
        tally.lines += 1
        text = (raw.removeprefix(_BOM) if tally.lines == 1 else raw).strip()
        if not text:
            continue
        tally.settle(text)
        event = read_line(topic, text)
        if isinstance(event, Rejected):
            if tally.lines == 1 and _opens_document(text):
                tally.opening = (1, event)
            else:
                tally.reject(tally.lines, event)
        else:
            yield Recorded(key_of(event), event_time_us(event), text)


def _json_fault(text: bytes) -> int | None:
    """Where a line stops being JSON, None for a JSON value."""
    line = text.decode(errors="replace")
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos - len(line)
    except (ValueError, RecursionError):  # a number of thousands of digits; nested too deep
        return None
    return None


def _opens_document(text: bytes) -> bool:
    """Whether a line is the start of a JSON object or list that it does not close."""
    return text[:1] in (b"{", b"[") and _json_fault(text) == 0


@dataclass(frozen=True, slots=True)
class _Sender:
    """Sends events of one topic and waits for the acknowledgements."""

    producer: KafkaRecordProducer
    topic: Topic
    partitions: int
    lateness_us: int
    tally: Tally
    signer: Signer | None = None
    """For commands: events are not signed."""

    async def send(self, due: Sequence[Due], start_us: int) -> None:
        """Send these now, in order within every partition."""
        lines: dict[int, list[Due]] = {}
        for one in due:
            lines.setdefault(partition_of(one.line.key.encode(), self.partitions), []).append(one)
        await asyncio.gather(*(self._send(partition, part) for partition, part in lines.items()))
        if self.topic in SOURCES:
            self.tally.late += late(due, start_us, self.lateness_us)

    async def _send(self, partition: int, due: Sequence[Due]) -> None:
        at = 0
        for events in records(self.topic, [moved(one) for one in due]):
            # A record of one event carries its key, exactly as a keyed record of any other producer.
            key = due[at].line.key.encode() if len(events) == 1 else None
            value, headers = value_of(events), [(CONTENT_TYPE, JSON.encode())]
            if self.signer is not None:
                headers.append(self.signer.header(self.topic.value, key, value))
            await self.producer.send(self.topic.value, partition, key, value, headers)
            self.tally.accepted += len(events)
            at += len(events)


async def _run(
    config: Config, topic: Topic, file: BufferedIOBase, tally: Tally, shift: bool, speed: float | None
) -> bool:
    """Send it all; True if it was asked to stop before the end."""
    with stopping_within(STOP_GRACE_S) as stop:
        await _send_all(config, topic, file, tally, shift, speed, stop)
    return stop.is_set()


async def _send_all(
    config: Config,
    topic: Topic,
    file: BufferedIOBase,
    tally: Tally,
    shift: bool,
    speed: float | None,
    stop: asyncio.Event,
) -> None:
    signer = signer_of_commands(config) if topic is Topic.COMMANDS else None
    role = "operator" if topic is Topic.COMMANDS else "publisher"
    asked = require_topics(config.kafka, [topic], role=role, to=[Operation.WRITE])
    counts = await unless(stop, asked)
    if counts is None:
        return
    producer = KafkaRecordProducer(
        config.kafka.bootstrap,
        client_id="klaxon-publish",
        idempotent=config.kafka.transactions,
        options=client_options(config.kafka),
    )
    await producer.start()
    try:
        lateness_us = config.content.lateness_s * 1_000_000
        sender = _Sender(producer, topic, counts[topic], lateness_us, tally, signer)
        if shift or speed is not None:
            lines = await _whole(file, stop)
            await _play(sender, list(_read(topic, lines, tally)), shift, speed, stop)
        else:
            await _stream(sender, file, stop)
        tally.settle()
    finally:
        await producer.stop()


async def _stream(sender: _Sender, file: BufferedIOBase, stop: asyncio.Event) -> None:
    """Send lines as they come, unmoved: of a live pipe, whatever there is; a line begun at a stop is not."""
    rest, read = b"", _Input(file)
    while True:
        data = await read.next(stop)
        if data is None:
            return
        *lines, rest = (rest + data).split(b"\n")
        if not data and rest:
            lines, rest = [rest], b""
        accepted = [Due(0, 0, line) for line in _read(sender.topic, lines, sender.tally)]
        if accepted:
            await sender.send(accepted, _now_us())
        if not data:
            return


class _Input:
    """What there is to read, one chunk ahead at most.

    In a thread that holds up nobody who wants to stop: a pipe may be silent for ever.
    """

    def __init__(self, file: BufferedIOBase) -> None:
        """Needs a running loop."""
        # Past the buffer and its lock: who ends while a thread holds that is aborted by the interpreter.
        self._read_some = file.raw.read if isinstance(file, BufferedReader) else file.read1
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        self._wanted = threading.Semaphore(1)
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def _read(self) -> None:
        data: bytes | OSError = b"more"
        while data and not isinstance(data, OSError):
            self._wanted.acquire()
            try:
                data = self._read_some(CHUNK_BYTES) or b""
            except OSError as error:
                data = error
            try:
                self._loop.call_soon_threadsafe(self._chunks.put_nowait, data)
            except RuntimeError:  # the loop is gone: nobody wants it any more
                return

    async def next(self, stop: asyncio.Event) -> bytes | None:
        """The next chunk, b"" at the end; None once asked to stop. Raises the OSError of the input."""
        data = await unless(stop, self._chunks.get())
        if isinstance(data, OSError):
            raise data
        self._wanted.release()
        return data


async def _whole(file: BufferedIOBase, stop: asyncio.Event) -> list[bytes]:
    """All lines; none if it is asked to stop meanwhile."""
    read, chunks = _Input(file), bytearray()
    while data := await read.next(stop):
        chunks += data
    if stop.is_set():
        return []
    *lines, rest = bytes(chunks).split(b"\n")
    return [*lines, rest] if rest else lines


async def _play(
    sender: _Sender, lines: list[Recorded], shift: bool, speed: float | None, stop: asyncio.Event
) -> None:
    """Send lines when they are due."""
    start_us = _now_us()
    due = schedule(lines, start_us, shift=shift, speed=speed)
    if due and speed is not None:
        click.echo(f"playing {counted(len(due), 'event')} over {due[-1].after_us / 1e6:.1f} s", err=True)
    if due and min(d.line.time_us + d.shift_us for d in due) < 0:
        raise CommandError(f"{sender.tally.name}: ts_us spans more than 56 years", Exit.USAGE)
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    at = 0
    while at < len(due) and not stop.is_set():
        elapsed_us = (loop.time() - start_s) * 1e6
        wait_us = due[at].after_us - elapsed_us
        if wait_us > 0:
            await unless(stop, asyncio.sleep(max(wait_us, TURN_US) / 1e6))
            continue
        end = at
        while end < len(due) and due[end].after_us <= elapsed_us:
            end += 1
        await sender.send(due[at:end], start_us)
        at = end


def _now_us() -> int:
    return time.time_ns() // 1_000
