"""The gateway's section of the configuration: what is read, and each mistake with place and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as under
from hypothesis import strategies as st
from msgspec.structs import replace

from agents.gateway.settings import GatewaySettings, faults
from pipeline.config import Config, ConfigError, load_config, load_gateway_config
from pipeline.gateway_config import variables

INFRA = Path(__file__).parents[3] / "infra" / "klaxon.yaml"

WHOLE = """\
gateway:
  rollout: chat
  port: 0
  pools:
  - arm: baseline
    kind: vllm
    model_version: v1
    engines:
    - {node: gpu-1, url: "http://gpu-1:8000"}
    - {node: gpu-2, url: "http://gpu-2:8000/prefix/"}
  - arm: canary
    kind: vllm
    model_version: v2
    hardware: h200
    engines:
    - node: gpu-3
      url: https://[::1]:8000
  mirror:
    rate: 0.5
    paths: {completions: false}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "klaxon.yaml"
    path.write_text(text)
    return str(path)


def mistake(folder: Path, text: str, environ: dict[str, str] | None = None) -> str:
    """What is said of this file, without its path."""
    path = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ or {})
    return str(caught.value).removeprefix(path)


def test_pools_and_nested_keys_come_from_the_file(tmp_path: Path) -> None:
    settings = load_config(written(tmp_path, WHOLE), {}).gateway
    assert [(pool.arm, [engine.node for engine in pool.engines]) for pool in settings.pools] == [
        ("baseline", ["gpu-1", "gpu-2"]),
        ("canary", ["gpu-3"]),
    ]
    assert settings.pools[1].hardware == "h200"
    assert settings.mirror.rate == 0.5
    assert (settings.mirror.paths.chat, settings.mirror.paths.completions) == (True, False)
    assert settings.mirror.paths.of("/v1/chat/completions")
    assert not settings.mirror.paths.of("/v1/completions")
    assert not settings.mirror.paths.of("/v1/models")


def test_a_file_without_the_section_configures_no_gateway(tmp_path: Path) -> None:
    path = written(tmp_path, "kafka: {partitions: 1}\n")
    assert load_config(path, {}).gateway == GatewaySettings() == Config().gateway


def test_scalars_have_variables_nested_ones_too(tmp_path: Path) -> None:
    environ = {
        "KLAXON_GATEWAY_PORT": "8443",
        "KLAXON_GATEWAY_MIRROR_RATE": "0.25",
        "KLAXON_GATEWAY_MIRROR_PATHS_CHAT": "false",
        "KLAXON_GATEWAY_HEADERS_SESSION": "x-chat",
        "KLAXON_GATEWAY_EMBEDDINGS_RATE": "1",
    }
    settings = load_config(written(tmp_path, WHOLE), environ).gateway
    assert (settings.port, settings.mirror.rate, settings.mirror.paths.chat) == (8443, 0.25, False)
    assert (settings.headers.session, settings.embeddings.rate) == ("x-chat", 1.0)
    assert settings.mirror.paths.completions is False, "the file's beside it"


def test_every_scalar_has_a_variable(tmp_path: Path) -> None:
    """Each set to its default, over a file that has all it needs: nothing changes."""
    path = written(tmp_path, WHOLE)
    before, defaults = load_config(path, {}).gateway, GatewaySettings()
    for keys, is_list in variables():
        value: object = defaults
        for key in keys:
            value = getattr(value, key)
        if is_list or value in (None, ""):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        environ = {"_".join(("KLAXON_GATEWAY", *keys)).upper(): text}
        after: object = load_config(path, environ).gateway
        for key in keys:
            after = getattr(after, key)
        assert after == value, environ
    assert load_config(path, {}).gateway == before


_KNOWN = sorted(
    {"arm", "kind", "engines", "node", "url", *(part for path, _ in variables() for part in path)}
)
_SCALARS = (
    st.none() | st.booleans() | st.integers(-1, 2**64) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["baseline", "canary", "vllm", "http://h:1", "a:b", "/v1", "v1"])
)  # fmt: skip
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_KNOWN) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
_POOLS = st.lists(
    st.fixed_dictionaries(
        {
            "arm": st.sampled_from(["baseline", "canary"]),
            "kind": st.just("vllm"),
            "model_version": st.text(max_size=2),
        },
        optional={"engines": _ANYTHING, "region": _SCALARS, "x": _SCALARS},
    ),
    max_size=3,
)


@under(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_ANYTHING | st.fixed_dictionaries({"pools": _POOLS | _ANYTHING}, optional={"mirror": _ANYTHING}))
def test_whatever_stands_there_is_refused_with_its_place_or_right(tmp_path: Path, content: object) -> None:
    path = written(tmp_path, yaml.safe_dump({"gateway": content}))
    told = ""
    try:
        load_config(path, {"KLAXON_GATEWAY_MIRROR_RATE": "0.5"})
    except ConfigError as error:
        told = str(error)
    assert not told or told.startswith(f"{path}:")


def test_no_two_keys_share_a_variable() -> None:
    names = ["_".join(path) for path, _ in variables()]
    assert len(names) == len(set(names)) > 40
    assert [path for path, is_list in variables() if is_list] == [("pools",), ("mirror", "arms")]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (
            {"KLAXON_GATEWAY_MIRROR_RATE": "1.01"},
            "variable KLAXON_GATEWAY_MIRROR_RATE: Expected `float` <= 1.0",
        ),
        ({"KLAXON_GATEWAY_MIRROR_RATE": "much"}, "variable KLAXON_GATEWAY_MIRROR_RATE: Expected `float`"),
        ({"KLAXON_GATEWAY_MIRROR_RAT": "1"}, "did you mean 'KLAXON_GATEWAY_MIRROR_RATE'?"),
        ({"KLAXON_GATEWAY_POOLS": "[]"}, "a list stands in the file only, as gateway.pools"),
        ({"KLAXON_GATEWAY_MIRROR": "{}"}, "unknown variable KLAXON_GATEWAY_MIRROR;"),
        ({"KLAXON_GATEWAY_ROLLOUT": ""}, "variable KLAXON_GATEWAY_ROLLOUT: missing; name the roll-out"),
        (
            {"KLAXON_GATEWAY_EMBEDDINGS_URL": "ftp://h"},
            "variable KLAXON_GATEWAY_EMBEDDINGS_URL: no address: http://host:port",
        ),
    ],
)
def test_a_mistaken_variable_is_named(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    assert told in mistake(tmp_path, WHOLE, environ)


def test_a_variable_inside_what_is_no_mapping_tells_the_file_s_mistake(tmp_path: Path) -> None:
    text = WHOLE.replace("  mirror:\n    rate: 0.5\n    paths: {completions: false}\n", "  mirror: 3\n")
    told = mistake(tmp_path, text, {"KLAXON_GATEWAY_MIRROR_RATE": "1"})
    assert told == ":18: gateway.mirror: Expected `object`, got `int`"


URL = ":17: gateway.pools[1].engines[0].url: "
POOLS = WHOLE[WHOLE.index("  pools:") : WHOLE.index("  mirror")]

MISTAKES = {
    "unknown key": ("  port: 0", "  prot: 0", ":3: unknown key gateway.prot; did you mean 'port'?"),
    "unknown key of a pool": (
        "    hardware: h200", "    hardwear: h200",
        ":14: unknown key gateway.pools[1].hardwear; did you mean 'hardware'?",
    ),
    "unknown key of an engine": (
        "      url: https", "      uri: https",
        ":17: unknown key gateway.pools[1].engines[0].uri; did you mean 'url'?",
    ),
    "unknown key of the mirror": (
        "    rate", "    rte", ":19: unknown key gateway.mirror.rte; did you mean 'rate'?",
    ),
    "unknown path": (
        "completions: false", "completion: false",
        ":20: unknown key gateway.mirror.paths.completion; did you mean 'completions'?",
    ),
    "no baseline": (
        "arm: baseline", "arm: control",
        ":4: gateway.pools: no pool of the arm baseline; add one: it is what users are answered by when in",
    ),
    "no pools": (POOLS, "", ":1: gateway.pools: missing; name the engines of each arm, in the file that"),
    "two pools of an arm": (
        "arm: canary", "arm: baseline",
        ":11: gateway.pools[1].arm: a second pool of the arm baseline; put its engines into",
    ),
    "unknown arm": ("arm: canary", "arm: canaries", ":11: gateway.pools[1].arm: Invalid enum value"),
    "unknown kind": ("kind: vllm", "kind: ollama", ":6: gateway.pools[0].kind: Invalid enum value 'ollama'"),
    "version missing": (
        "    model_version: v2\n", "", ":11: gateway.pools[1]: Object missing required field `model_version`",
    ),
    "no engines": (
        "    engines:\n    - node: gpu-3\n      url: https://[::1]:8000\n", "    engines: []\n",
        ":15: gateway.pools[1].engines: Expected `array` of length >= 1",
    ),
    "equal versions": (
        "model_version: v2", "model_version: v1",
        ":13: gateway.pools[1].model_version: baseline and canary are both 'v1'; directives weigh",
    ),
    "duplicate node": (
        "node: gpu-3", "node: gpu-1",
        ":16: gateway.pools[1].engines[0].node: a second engine named 'gpu-1'; give each its own name",
    ),
    "duplicate url": (
        '"http://gpu-2:8000/prefix/"', '"http://GPU-1:8000/"',
        ":10: gateway.pools[0].engines[1].url: a second engine at this address; each has its own",
    ),
    "url with the paths' beginning": (
        '"http://gpu-2:8000/prefix/"', '"http://gpu-2:8000/v1/"',
        ":10: gateway.pools[0].engines[1].url: it ends in /v1, which every request's path begins with",
    ),
    "no url": ("https://[::1]:8000", "gpu-3", URL + "no address: http://host:port"),
    "no host": ("https://[::1]:8000", "https://:8000", URL + "no address"),
    "half an address": ("https://[::1]:8000", '"https://[::1"', URL + "no address"),
    "another scheme": ("https://[::1]:8000", "grpc://h:1", URL + "no address"),
    "port too great": ("[::1]:8000", "h:65536", URL + "no address"),
    "port nought": ("[::1]:8000", "h:0", URL + "no address"),
    "a space": ("https://[::1]:8000", '"http://h/ x"', URL + "no address"),
    "a query": ("[::1]:8000", "h/?key=hunter2", URL + "an address ends with its path"),
    "a password": (
        "[::1]:8000", "me:hunter2@h", URL + "an address holds no user or password; put",
    ),
    "rate over 1": ("rate: 0.5", "rate: 1.001", ":19: gateway.mirror.rate: Expected `float` <= 1.0"),
    "rate below 0": ("rate: 0.5", "rate: -0.001", ":19: gateway.mirror.rate: Expected `float` >= 0.0"),
    "rate no number": ("rate: 0.5", "rate: .nan", ":19: gateway.mirror.rate: Expected `float` >= 0.0"),
    "no roll-out": ("  rollout: chat\n", "", ":1: gateway.rollout: missing; name the roll-out"),
    "unknown fallback": (
        "  port: 0", "  fallback: v3", ":3: gateway.fallback: no pool has the version 'v3'; name 'v1' or",
    ),
    "an arm twice": (
        "    rate: 0.5", "    arms: [canary, canary]", ":19: gateway.mirror.arms: an arm stands twice",
    ),
    "a header of secrets": (
        "  port: 0", "  headers: {tenant: authorization}", ":3: gateway.headers.tenant: authorization is no",
    ),
    "one header twice": (
        "  port: 0", "  headers: {tenant: x-session-id}",
        ":3: gateway.headers.tenant: x-session-id is headers.session already",
    ),
    "a header in capitals": ("  port: 0", "  headers: {tenant: X-Org}", ":3: gateway.headers.tenant: "),
    "embeddings without a model": (
        "  port: 0", "  embeddings: {url: 'http://e:1'}", ":3: gateway.embeddings.model: missing; emb",
    ),
    "spans to no address": (
        "  port: 0", "  spans: {endpoint: 'otel:4318'}", ":3: gateway.spans.endpoint: no address",
    ),
    "no list of pools": (
        POOLS, "  pools: {arm: baseline}\n",
        ":4: gateway.pools: Expected `array`, got `object`",
    ),
    "copies that outlive pairs": (
        "    rate: 0.5", "    timeout_s: 60.001",
        ":19: gateway.mirror.timeout_s: after 60.001 s a copy finds no pair any more: content.",
    ),
    "text for a number": ("port: 0", "port: eighty", ":3: gateway.port: Expected `int`, got `str`"),
    "a port too great": ("port: 0", "port: 65536", ":3: gateway.port: Expected `int` <= 65535"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_file_line_and_remedy(tmp_path: Path, name: str) -> None:
    old, new, told = MISTAKES[name]
    assert WHOLE.count(old) >= 1
    said = mistake(tmp_path, WHOLE.replace(old, new, 1))
    assert said.startswith(told), said
    assert "hunter2" not in said


def test_what_is_right_has_no_fault(tmp_path: Path) -> None:
    """The control: without it every file could be refused."""
    settings = load_config(written(tmp_path, WHOLE), {}).gateway
    assert list(faults(settings)) == []
    for arms in [(), ("canary",), ("baseline", "canary", "control")]:
        mirror = replace(settings.mirror, arms=arms)
        assert list(faults(replace(settings, mirror=mirror, fallback="v2"))) == []


def test_versions_that_differ_elsewhere_than_in_the_model_are_two(tmp_path: Path) -> None:
    text = WHOLE.replace("v2", "v1\n    prompt_version: p2").replace("port: 0", "fallback: v1/none")
    assert load_config(written(tmp_path, text), {}).gateway.pools[1].prompt_version == "p2"
    told = mistake(tmp_path, text.replace("fallback: v1/none", "fallback: v1"))
    assert "name 'v1/none' or 'v1/p2'" in told


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """The file with the keys that a gateway needs."""
    for name in ("signatures", "pseudonyms"):
        (tmp_path / name).write_text("content")
    return WHOLE + (
        f"  privacy:\n    signature_key_file: {tmp_path}/signatures\n"
        f"    pseudonym_key_file: {tmp_path}/pseudonyms\n"
    )


def gateway_mistake(folder: Path, text: str) -> str:
    path = written(folder, text)
    load_config(path, {})  # other processes read the same file on other machines
    with pytest.raises(ConfigError) as caught:
        load_gateway_config(path, {})
    return str(caught.value).removeprefix(path).replace(str(folder), "")


def test_files_are_needed_by_the_gateway_alone(tmp_path: Path, keys: str) -> None:
    assert load_gateway_config(written(tmp_path, keys), {}).gateway.rollout == "chat"
    assert gateway_mistake(tmp_path, WHOLE) == (
        ":1: gateway.privacy.signature_key_file: missing; `klaxon keys create` makes one"
    )
    with pytest.raises(ConfigError, match=r"^configuration: gateway\.pools: missing; .* --config"):
        load_gateway_config(None, {})


@pytest.mark.parametrize(
    ("key", "content", "told"),
    [
        ("text_key_file", None, "/x cannot be read: No such file or directory; `klaxon keys create`"),
        ("text_key_file", "", "/x is empty; `klaxon keys create` makes one"),
        ("consent_trust_file", None, "/x cannot be read: No such file or directory; `klaxon keys"),
    ],
)  # fmt: skip
def test_a_key_file_that_is_missing_is_named(
    tmp_path: Path, keys: str, key: str, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "x").write_text(content)
    said = gateway_mistake(tmp_path, keys + f"    {key}: {tmp_path}/x\n")
    assert said.startswith(f":24: gateway.privacy.{key}: {told}")


@pytest.mark.parametrize("content", [None, "", "Bearer a\nBearer b\n"])
def test_a_credential_s_file_that_is_none_is_named_without_its_content(
    tmp_path: Path, keys: str, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "x").write_text(content)
    pool = keys.replace("hardware: h200", f"mirror_authorization_file: {tmp_path}/x")
    embeddings = keys + (
        f"  embeddings:\n    url: http://e:1\n    model: e\n    authorization_file: {tmp_path}/x\n"
    )
    for text, place in (
        (pool, ":14: gateway.pools[1].mirror_authorization_file: /x "),
        (embeddings, ":27: gateway.embeddings.authorization_file: /x "),
    ):
        said = gateway_mistake(tmp_path, text)
        assert said.startswith(place)
        assert "Bearer" not in said


def test_an_authority_s_file_that_is_none_is_named(tmp_path: Path, keys: str) -> None:
    (tmp_path / "x").write_text("no certificate")
    text = keys.replace("  port: 0", f"  ca_file: {tmp_path}/x")
    assert gateway_mistake(tmp_path, text).startswith(":3: gateway.ca_file: /x")


def test_what_the_shipped_file_shows_is_right_and_everything_it_names_is_known(tmp_path: Path) -> None:
    """The section stands there as a comment: without it nothing is configured."""
    text = INFRA.read_text()
    assert "gateway" not in (yaml.safe_load(text) or {})
    start = text.index("# gateway:")
    shown = re.match(r"(?:#.*\n)+", text[start:])
    assert shown is not None
    section = re.sub(r"(?m)^# ?", "", shown[0])
    assert list(yaml.safe_load(section)) == ["gateway"]
    settings = load_config(written(tmp_path, section), {}).gateway
    assert {pool.arm for pool in settings.pools} == {"baseline", "canary", "control"}
