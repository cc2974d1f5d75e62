"""infra/docker/Dockerfile, read without a Docker engine: all is locked, and nobody special runs it."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY

DOCKERFILE = REPOSITORY / "infra" / "docker" / "Dockerfile"
LOCKS = REPOSITORY / "infra" / "locks"


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continued lines joined, comments left out."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word]


def faults_of(text: str) -> list[str]:
    """What a reviewer would send back."""
    found, faults = instructions(text), []
    for word, rest in found:
        if word == "FROM" and not re.match(r"^[a-z./-]+:\d+\.\d+\.\d+\S*( AS \w+)?$", rest):
            faults.append(f"base image {rest} is not pinned to a full version")
        if word == "ADD":
            faults.append("ADD fetches and unpacks; COPY does neither")
        for command in re.findall(r"pip (?:install|wheel)[^&|;]*", rest) if word == "RUN" else ():
            if "--no-index" not in command and "--require-hashes -r" not in command:
                faults.append(f"{command.strip()!r} takes what no lock names")
        if word == "COPY" and not rest.startswith("--from="):
            faults += [
                f"{one} does not exist" for one in rest.split()[:-1] if not (REPOSITORY / one).exists()
            ]
    last = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    users = [rest for word, rest in found[last:] if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*", users[-1]):
        faults.append("the process does not run as a number other than 0")
    if any("SECRET" in rest or "PASSWORD" in rest for word, rest in found if word in ("ENV", "ARG")):
        faults.append("a secret would stay in the image")
    return faults


def test_the_image_is_locked_and_runs_as_nobody_special() -> None:
    assert faults_of(DOCKERFILE.read_text()) == []


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ("USER 10001", "USER root", "does not run as"),
        ("USER 10001", "USER 0", "does not run as"),
        ("USER 10001\n", "", "does not run as"),
        ("--require-hashes -r /tmp/runtime.txt", "-r /tmp/runtime.txt", "no lock names"),
        ("--require-hashes -r infra/locks/build.txt", "hatchling", "no lock names"),
        ("--no-index --no-deps /wheel", "/wheel", "no lock names"),
        ("python:3.13.9-slim-bookworm", "python:3", "not pinned"),
        ("COPY schemas schemas", "COPY schema schema", "does not exist"),
        ("ENV PYTHON", "ENV KLAXON_KAFKA_PASSWORD=x PYTHON", "a secret"),
    ],
)
def test_known_bad_images_are_sent_back(good: str, bad: str, told: str) -> None:
    text = DOCKERFILE.read_text()
    assert good in text
    assert any(told in fault for fault in faults_of(text.replace(good, bad)))


def test_the_image_installs_the_runtime_lock_and_all_that_the_package_holds() -> None:
    text = DOCKERFILE.read_text()
    assert "infra/locks/runtime.txt" in text
    packages = re.search(r"^packages = \[(.+)\]$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert packages is not None
    for package in re.findall(r'"(\w+)"', packages[1]):
        assert ("COPY", f"{package} {package}") in instructions(text)


def test_the_licence_is_the_one_that_the_package_names() -> None:
    assert 'license = "Apache-2.0"' in (REPOSITORY / "pyproject.toml").read_text()
    head = (REPOSITORY / "LICENSE").read_text().split()[:6]
    assert head == ["Apache", "License", "Version", "2.0,", "January", "2004"]
    assert ("COPY", "pyproject.toml README.md LICENSE ./") in instructions(DOCKERFILE.read_text())


def test_the_builder_sees_what_is_copied_and_nothing_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    first, *rest = [line for line in lines if not line.startswith("#")]
    assert first == "*"
    seen = {line[1:] for line in rest if line.startswith("!")}
    copied = {
        source
        for word, arguments in instructions(DOCKERFILE.read_text())
        if word == "COPY" and not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    }
    assert {source if source in seen else source.rpartition("/")[0] for source in copied} == seen


@pytest.mark.parametrize("lock", ["runtime.txt", "build.txt", "dev.txt"])
def test_every_locked_package_has_one_version_and_a_hash(lock: str) -> None:
    blocks = re.split(r"^(?=\S+==)", (LOCKS / lock).read_text(), flags=re.MULTILINE)[1:]
    assert len(blocks) >= 5
    for block in blocks:
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_what_the_image_holds_is_what_tests_run_with() -> None:
    dev = _versions("dev.txt")
    for lock in ("runtime.txt", "build.txt"):
        found = _versions(lock)
        assert {name: dev.get(name) for name in found} == found, lock


def _versions(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (LOCKS / lock).read_text(), flags=re.MULTILINE))
