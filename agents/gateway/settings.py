"""Section `gateway` of the configuration: what may stand there, and what of it contradicts itself.

Secrets are paths of files; nothing here reads them. docs/gateway-configuration.md tells every key to people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from schemas.events import MAX_TOP, Arm, Definition, Name, Text
from schemas.versions import version_keys

EngineKind = Literal["vllm", "llama.cpp", "llama-cpp-python", "sglang", "tgi"]
Precision = Annotated[int, Meta(ge=1, le=17)] | Literal["f16", "f32", "f64"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

Rate = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Header = Annotated[str, Meta(pattern="^[a-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
"""A header's name in lower case; names are compared without regard to case."""
_OURS_ALONE: Final = frozenset(
    {"authorization", "cookie", "proxy-authorization", "host", "content-type", "content-length",
     "transfer-encoding", "connection", "accept", "accept-encoding"}
)  # fmt: skip
"""Headers that carry secrets or mean something else: no label is read from them."""


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: a node, as events, directives and telemetry name it, and where it answers."""

    node: Name
    """Events, directives and telemetry name the engine so; no two engines share one."""
    url: str
    """`http://host:port` or https, perhaps with a path before `/v1`."""


class PoolSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one arm. What is stated here stands in every event of the arm."""

    arm: Arm
    """`baseline`, `canary` or `control`: one pool of each at most, the baseline's always."""
    kind: EngineKind
    """`vllm`, `llama.cpp` (llama-server), `llama-cpp-python`, `sglang` or `tgi`."""
    model_version: Name
    """As in the roll-out's spec, like the three versions below."""
    prompt_version: Text | None = None
    """Stated here it wins over the request's header."""
    data_version: Text | None = None
    """Stated here it wins over the request's header."""
    system_version: Text | None = None
    """Stated here it wins over the request's header."""
    model_name: Name | None = None
    """Sent to the engines in place of the client's `model`; absent: the client's own."""
    hardware: Text | None = None
    """The label `hardware` of the arm's events."""
    region: Text | None = None
    """The label `region` of the arm's events."""
    engines: Annotated[tuple[EngineSettings, ...], Meta(min_length=1, max_length=1024)]
    """A list of `node` and `url`."""
    mirror_authorization_file: str | None = None
    """File with the `Authorization` header of copies sent to this pool; absent: they carry none."""
    definition: Definition | None = None
    """What the engines' log-probabilities are: `raw`, `temperature` or `processed`; absent: what the kind
    answers, as its facts say."""
    kv_type: Annotated[str, Meta(pattern="^[!-~]{1,64}$")] | None = None
    """Type of their KV cache, such as `fp8` or `q8_0`, where engines do not say it; it stands in events."""
    deterministic: bool | None = None
    """Whether they answer alike whatever else is in the batch, for engines that do not say it."""
    precision: Precision | None = None
    """Decimal digits of their log-probabilities, or `f16`, `f32`, `f64`; absent: as many as they send."""


class MirrorPaths(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which requests are copied at all."""

    chat: bool = True
    """`/v1/chat/completions`."""
    completions: bool = True
    """`/v1/completions`."""

    def of(self, path: str) -> bool:
        """Whether requests of this path are mirrored."""
        return (path == CHAT and self.chat) or (path == COMPLETIONS and self.completions)


class MirrorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies for the other arms: how many, and what they may cost."""

    rate: Rate = 0.05
    """Share of requests that are mirrored; 0: none."""
    arms: Annotated[tuple[Arm, ...], Meta(max_length=3)] = ("baseline", "canary", "control")
    """Arms that may be sent copies."""
    tokens_per_s: Annotated[int, Meta(ge=1, le=10_000_000)] = 2_000
    """Input and output tokens of all copies together, on average; a second's worth may be spent at once."""
    per_signature_per_minute: Annotated[int, Meta(ge=1, le=1_000)] = 4
    """Of equal requests (one prompt signature), how many are mirrored in any 60 s."""
    paths: MirrorPaths = MirrorPaths()
    queue: Annotated[int, Meta(ge=1, le=100_000)] = 256
    """Mirrored requests that may wait; a further one is dropped and counted."""
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] = 32
    """Copies on their way at once."""
    timeout_s: Seconds = 60.0
    """A copy that is not answered whole after this is given up; at most `content.join_timeout_s`, after which
    it would find no pair any more."""
    forced: bool = False
    """Let the other arms score the baseline's answer in place of writing their own, where their engine and
    the baseline's can; a request that the canary answers is copied as without."""


class HeaderSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request headers that labels are read from, by their names in lower case."""

    session: Header = "x-session-id"
    """A session stays on one version; without it the body's `user` does, then the request's own id."""
    tenant: Header = "x-klaxon-tenant"
    """The label `tenant`."""
    prompt_version: Header = "x-klaxon-prompt-version"
    """The label `prompt_version`, where the pool states none."""
    data_version: Header = "x-klaxon-data-version"
    """The label `data_version`, where the pool states none."""
    system_version: Header = "x-klaxon-system-version"
    """The label `system_version`, where the pool states none."""
    prompt_id: Header = "x-klaxon-prompt-id"
    """The label `prompt_id`."""
    snapshot_id: Header = "x-klaxon-snapshot-id"
    """The label `snapshot_id`: of what was retrieved for the prompt."""
    consent: Header = "x-klaxon-consent"
    """The signed consent without which no text leaves the process."""


class PrivacySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of what leaves the process. `klaxon keys create` makes them (docs/security.md)."""

    signature_key_file: str | None = None
    """Key of prompt signatures, equal on all gateways of a roll-out; absent: `klaxon gateway` refuses."""
    pseudonym_key_file: str | None = None
    """Key of token ids' pseudonyms, equal on all gateways; absent: `klaxon gateway` refuses."""
    text_key_file: str | None = None
    """Key that consented text is encrypted with; absent: no text leaves, consented or not."""
    consent_trust_file: str | None = None
    """Public keys of who may sign consent; absent: nobody, so no text leaves."""


class EmbeddingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Embeddings of mirrored answers; without `url` off."""

    url: str | None = None
    """Where `/v1/embeddings` is: `http://host:port` or https. Answers are sent there."""
    model: Name | None = None
    """The model's name there; needed with `url`."""
    authorization_file: str | None = None
    """File with the `Authorization` header; absent: none is sent."""
    trusted: bool = False
    """The endpoint is inside your own trust boundary, like the engines: answers are sent there without
    consent. Otherwise only those of consented requests are."""
    rate: Rate = 0.1
    """Share of mirrored pairs that get embeddings."""
    timeout_s: Seconds = 10.0
    """An embedding that takes longer is left out."""
    concurrency: Annotated[int, Meta(ge=1, le=1_000)] = 4
    """Requests for embeddings on their way at once; 256 more may wait, what does not fit is left out."""


class SpanSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry spans; without `endpoint` off."""

    endpoint: str | None = None
    """OTLP over HTTP: `http://host:4318/v1/traces` or https."""
    service_name: Name = "klaxon-gateway"
    """`service.name` of the spans."""
    rate: Rate = 1.0
    """Share of requests whose spans are exported, where no parent says."""


class GatewaySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section. Without `pools` nothing is configured: every command but `klaxon gateway` accepts that."""

    listen: Name = "127.0.0.1"
    """Address to listen on. The gateway asks nobody for a login; engines still do."""
    port: Port = 8080
    """0: any free one, named in the log."""
    rollout: Annotated[str, Meta(max_length=256)] = ""
    """Name of the roll-out whose directives are obeyed."""
    name: Name = "gateway-1"
    """Who reports on `klaxon.applied`: another one for every gateway."""
    directive_file: str | None = None
    """A file by which `klaxon rollout abort --router FILE` takes the canary out here without Kafka."""
    fallback: Annotated[str, Meta(max_length=256)] = ""
    """The version that gets everything while no directive is known, by its name there; "": the baseline's."""
    pools: tuple[PoolSettings, ...] = ()
    """A pool of engines for each arm."""
    mirror: MirrorSettings = MirrorSettings()
    headers: HeaderSettings = HeaderSettings()
    privacy: PrivacySettings = PrivacySettings()
    embeddings: EmbeddingSettings = EmbeddingSettings()
    spans: SpanSettings = SpanSettings()
    top: Annotated[int, Meta(ge=1, le=MAX_TOP)] = 5
    """Candidates a position that are captured."""
    load_factor: Annotated[float, Meta(ge=1, le=100)] = 1.25
    """A session leaves its engine while that has this many times the pool's mean of requests in flight."""
    ca_file: str | None = None
    """Authorities that may certify engines, PEM; absent: the system's."""
    connect_timeout_s: Seconds = 5.0
    """To reach an engine; then others of the baseline are tried, until 1.5 times as much is over. One that
    was not reached is tried last for 5 s."""
    first_byte_timeout_s: Seconds = 600.0
    """From the request to the first byte of the answer's head."""
    idle_timeout_s: Seconds = 300.0
    """Between two reads of an answer."""
    drain_s: Seconds = 30.0
    """At the end: how long requests on their way may take to finish."""
    body_bytes: Annotated[int, Meta(ge=1_024, le=1 << 30)] = 16 << 20
    """Of a request; a larger one is refused with 413."""
    body_timeout_s: Seconds = 60.0
    """How long a request's body may take to come; then it is refused with 400."""
    bodies_bytes: Annotated[int, Meta(ge=1_024, le=1 << 40)] = 512 << 20
    """Of the bodies of all requests together, those without a stated length as `body_bytes`; a request over
    it is refused with 503."""
    capture_bytes: Annotated[int, Meta(ge=1_024, le=1 << 30)] = 16 << 20
    """Of an answer that is captured; a longer one reaches the user whole and is not."""
    connections: Annotated[int, Meta(ge=1, le=100_000)] = 1_000
    """Users' connections to engines, all together; further requests wait for one. Copies have their own."""
    producer_queue_events: Annotated[int, Meta(ge=100, le=10_000_000)] = 20_000
    """Events that wait for Kafka; further ones are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What contradicts itself, and where: keys and positions below the section."""

    path: tuple[str | int, ...]
    message: str


def faults(settings: GatewaySettings) -> Iterator[Fault]:
    """Everything that fits its type and yet cannot be, pools first."""
    yield from _pool_faults(settings)
    if not settings.rollout:
        yield Fault(("rollout",), "missing; name the roll-out whose directives this gateway obeys")
    yield from _header_faults(settings.headers)
    if settings.embeddings.url is not None:
        yield from _url_faults(("embeddings", "url"), settings.embeddings.url)
        if settings.embeddings.model is None:
            yield Fault(("embeddings", "model"), "missing; embeddings.url needs the model's name there")
    if settings.spans.endpoint is not None:
        yield from _url_faults(("spans", "endpoint"), settings.spans.endpoint)
    if len(set(settings.mirror.arms)) < len(settings.mirror.arms):
        yield Fault(("mirror", "arms"), "an arm stands twice; name each once")


def _pool_faults(settings: GatewaySettings) -> Iterator[Fault]:
    pools = settings.pools
    first: dict[str, int] = {}
    for at, pool in enumerate(pools):
        if first.setdefault(pool.arm, at) != at:
            yield Fault(
                ("pools", at, "arm"),
                f"a second pool of the arm {pool.arm}; put its engines into the first one's list",
            )
    if not pools:
        yield Fault(
            ("pools",),
            "missing; name the engines of each arm, in the file that --config or KLAXON_CONFIG names "
            "(docs/gateway.md has an example)",
        )
    elif "baseline" not in first:
        yield Fault(
            ("pools",),
            "no pool of the arm baseline; add one: it is what users are answered by when in doubt",
        )
    yield from _engine_faults(pools)
    by_arm = {pool.arm: pool for pool in pools}
    if "baseline" not in by_arm:
        return
    keys = version_keys(by_arm)
    if keys["baseline"] == keys.get("canary"):
        yield Fault(
            ("pools", first["canary"], "model_version"),
            f"baseline and canary are both {keys['canary']!r}; directives weigh versions, so state what "
            "differs: model_version, prompt_version, data_version or system_version",
        )
    if settings.fallback and settings.fallback not in (keys["baseline"], keys.get("canary")):
        known = " or ".join(repr(keys[arm]) for arm in ("baseline", "canary") if arm in keys)
        yield Fault(("fallback",), f"no pool has the version {settings.fallback!r}; name {known}")


def _engine_faults(pools: tuple[PoolSettings, ...]) -> Iterator[Fault]:
    nodes: set[str] = set()
    urls: set[str] = set()
    for at, pool in enumerate(pools):
        for number, engine in enumerate(pool.engines):
            path = ("pools", at, "engines", number)
            if engine.node in nodes:
                yield Fault((*path, "node"), f"a second engine named {engine.node!r}; give each its own name")
            nodes.add(engine.node)
            yield from _url_faults((*path, "url"), engine.url)
            address = engine.url.rstrip("/").lower()
            if address.endswith("/v1"):
                yield Fault(
                    (*path, "url"), "it ends in /v1, which every request's path begins with; leave it out"
                )
            if address in urls:
                yield Fault((*path, "url"), "a second engine at this address; each has its own")
            urls.add(address)


def _header_faults(headers: HeaderSettings) -> Iterator[Fault]:
    used: dict[str, str] = {}
    for label in headers.__struct_fields__:
        name: str = getattr(headers, label)
        if name in _OURS_ALONE:
            yield Fault(("headers", label), f"{name} is no label; name a header of your own")
        if used.setdefault(name, label) != label:
            yield Fault(("headers", label), f"{name} is headers.{used[name]} already; name another header")


def _url_faults(path: tuple[str | int, ...], url: str) -> Iterator[Fault]:
    """An address is quoted nowhere: it may hold a password by mistake."""
    expected = "http://host:port or https://host:port is expected, perhaps with a path"
    try:
        parts = urlsplit(url)
        host = parts.hostname
        whole = parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        host, whole = None, False
    if not whole or not host or parts.scheme not in ("http", "https"):
        yield Fault(path, f"no address: {expected}")
    elif "@" in parts.netloc:
        yield Fault(path, "an address holds no user or password; put the credential into a file of its own")
    elif "?" in url or "#" in url:
        yield Fault(path, f"an address ends with its path: {expected}")
