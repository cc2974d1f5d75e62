"""`klaxon compare` on recorded answers and captured bodies: verdicts, contract, exit codes, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main

Response = dict[str, Any]


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    def run(*arguments: object) -> Run:
        monkeypatch.setattr("sys.argv", ["klaxon", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        code = exited.value.code
        assert isinstance(code, int)
        return Run(code, captured.out, captured.err)

    return run


def response(texts: Sequence[str], lists: Sequence[Sequence[tuple[str, float]]], **more: Any) -> Response:
    """A chat.completion with bytes."""

    def entry(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": value}

    content = [
        {**entry(text, dict(top).get(text, -9.5)), "top_logprobs": [entry(*pair) for pair in top]}
        for text, top in zip(texts, lists, strict=True)
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice], **more}


FINE = [("a", -0.100001), ("b", -2.500001)]
FAR = [("c", -0.100001), ("d", -2.500001)]


def write(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def six(lists: Sequence[tuple[str, float]], **more: Any) -> list[Response]:
    return [{"prompt_id": f"p{i}", "response": response(["a"], [lists]), **more} for i in range(6)]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("variant", "verdict", "code"),
    [("same_other_batch", "pass", 0), ("fp8_cal", "pass", 0), ("mismatch_x2", "trip", 1)],
)
def test_recorded_free_running_answers(
    compare: Callable[..., Run], shared_dir: Path, variant: str, verdict: str, code: int
) -> None:
    folder = shared_dir / "data" / "logits"
    run = compare(folder / "baseline.greedy.jsonl", folder / f"fr.greedy.{variant}.jsonl", "--json")
    assert (run.result["verdict"], run.code) == (verdict, code)
    assert run.result["pairs"] == len(run.result["per_pair"]) == 8
    assert run.result["skipped"] == {}
    assert run.result["eta"] == 1e-6


def as_response(line: str) -> Response:
    """A line of the recorded pairs, whose prompt_id repeats per mode."""
    record = json.loads(line)

    def entry(item: list[Any]) -> dict[str, Any]:
        return {"id": item[0], "token": item[1], "bytes": item[2], "logprob": item[3]}

    content = [
        {**entry(token), "top_logprobs": [entry(alternative) for alternative in token[4]]}
        for token in record["tokens"]
    ]
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": record["finish_reason"]}
    return {"prompt_id": f"{record['prompt_id']}-{record['mode']}", "choices": [choice]}


@pytest.mark.shared
@pytest.mark.parametrize(
    ("variant", "verdict", "code"),
    [("f16_concurrent4", "pass", 0), ("rope_base_10k", "not_enough_data", 4)],
)
def test_recorded_pairs_of_a_real_server(
    compare: Callable[..., Run], shared_dir: Path, tmp_path: Path, variant: str, verdict: str, code: int
) -> None:
    folder = shared_dir / "data" / "pairs"
    sides = [
        write(
            tmp_path / f"{name}.jsonl",
            [as_response(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()],
        )
        for name in ("f16", variant)
    ]
    run = compare(*sides, "--json")
    assert (run.result["verdict"], run.code) == (verdict, code)
    assert run.result["pairs"] == 9
    low, high = run.result["interval"]
    if verdict == "not_enough_data":
        assert low < 0.05 < high
        assert "holds the limit 0.05" in run.err


@pytest.mark.shared
@pytest.mark.parametrize(
    ("baseline", "canary", "pairs", "skipped"),
    [
        ("llama-server_f16", "llama-server_q8_0", 2, {"only_in_baseline": 7}),
        ("llama-server_f16", "llama-server_q4_0", 4, {"only_in_baseline": 5}),
        ("llama-server_f16", "llama-server_f16", 9, {}),
        (
            "llama-cpp-python_f16",
            "llama-cpp-python_q4_0",
            0,
            {"no_token_identity": 8, "only_in_baseline": 5},
        ),
        (
            "llama-server_f16",
            "llama-cpp-python_q4_0",
            0,
            {"no_token_identity": 4, "only_in_baseline": 5},
        ),
        ("vllm", "vllm", 8, {"engine_error": 6, "no_token_identity": 5, "other_choices": 2}),
    ],
)
def test_captured_bodies_of_every_engine(
    compare: Callable[..., Run],
    shared_dir: Path,
    baseline: str,
    canary: str,
    pairs: int,
    skipped: dict[str, int],
) -> None:
    folder = shared_dir / "data" / "sse"
    run = compare(folder / baseline, folder / canary, "--json")
    assert run.result["pairs"] == pairs
    assert run.result["skipped"] == skipped
    if baseline == canary:
        assert run.code == 0
        assert run.result["interval"] == [0.0, 0.0]
        assert run.result["mean"]["kl_lower"] == run.result["mean"]["tv_lower"] == 0.0
    else:
        assert run.code == 4
        assert run.result["interval"] is None


@pytest.mark.shared
def test_scored_prompts_in_forced_mode(compare: Callable[..., Run], shared_dir: Path, tmp_path: Path) -> None:
    """vLLM's prompt log-probabilities: 24 positions; free mode has one generated token without identity."""
    body = (shared_dir / "data" / "sse" / "vllm" / "completion_prompt_logprobs.json").read_bytes()
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "scored.json").write_bytes(body)
    run = compare(tmp_path / "a", tmp_path / "b", "--mode", "forced", "--json")
    (row,) = run.result["per_pair"]
    assert (row["positions"], row["first_difference"], row["kl_lower"]) == (24, None, 0.0)
    free = compare(tmp_path / "a", tmp_path / "b", "--json")
    assert free.result["skipped"] == {"no_token_identity": 1}


def prompt_logprobs(tokens: Sequence[int]) -> list[Any]:
    return [
        None,
        *({str(t): {"logprob": -0.100001, "rank": 1}, "99": {"logprob": -3.0, "rank": 2}} for t in tokens),
    ]


def with_ids(tokens: Sequence[int]) -> Response:
    content = [
        {"id": t, "token": "", "logprob": -0.100001, "top_logprobs": [{"id": t, "logprob": -0.100001}]}
        for t in tokens
    ]
    return {"choices": [{"logprobs": {"content": content}}]}


@pytest.mark.parametrize(
    ("prompt", "positions", "skipped"),
    [
        ([1, 2, 3, 7, 8, 9], 3, {}),
        ([1, 2, 3, 7, 8], 2, {}),  # scored without the end-of-text token
        ([1, 2, 3, 7, 5, 9], 0, {"forced_mismatch": 1}),
        ([7], 0, {"forced_mismatch": 1}),
    ],
)
def test_a_canary_that_scored_the_baselines_answer(
    compare: Callable[..., Run], tmp_path: Path, prompt: list[int], positions: int, skipped: dict[str, int]
) -> None:
    scored = {"choices": [{"prompt_logprobs": prompt_logprobs(prompt)}]}
    left = write(tmp_path / "b.jsonl", [{"prompt_id": "x", "response": with_ids([7, 8, 9])}])
    right = write(tmp_path / "c.jsonl", [{"prompt_id": "x", "source": "forced", "response": scored}])
    run = compare(left, right, "--json")
    assert (run.result["positions"], run.result["skipped"]) == (positions, skipped)


def test_forced_records_are_compared_everywhere_and_modes_override(
    compare: Callable[..., Run], tmp_path: Path
) -> None:
    answers = [{"prompt_id": i, **response(["a", "b"], [FINE, FINE])} for i in range(6)]
    other = response(["b", "b"], [FINE, FINE])
    left = write(tmp_path / "b.jsonl", answers)
    same = write(tmp_path / "c.jsonl", [{"source": "forced", **answer} for answer in answers])
    for mode in ("auto", "free", "forced"):
        run = compare(left, same, "--mode", mode, "--json")
        assert (run.code, run.result["positions"], run.result["skipped"]) == (0, 12, {})
    # Without its last token (the end of the text) an answer may be forced; with another token it was not.
    short = write(tmp_path / "d.jsonl", [{**a, **response(["a"], [FINE])} for a in answers])
    assert compare(left, short, "--mode", "forced", "--json").result["positions"] == 6
    free = write(tmp_path / "e.jsonl", [{**answer, "source": "forced", **other} for answer in answers])
    for mode, positions, mismatches in (("auto", 0, 6), ("free", 6, 0), ("forced", 0, 6)):
        run = compare(left, free, "--mode", mode, "--json")
        assert run.result["positions"] == positions
        assert run.result["skipped"].get("forced_mismatch", 0) == mismatches
        assert run.code == (0 if mode == "free" else 4)
    assert "6 of 6 pairs could not be forced: CANARY did not score BASELINE's tokens" in run.err


def test_pairs_that_happen_to_agree_do_not_pass_for_those_that_could_not_be_forced(
    compare: Callable[..., Run], tmp_path: Path
) -> None:
    answers = [{"prompt_id": i, **response(["a"], [FINE])} for i in range(7)]
    left = write(tmp_path / "b.jsonl", answers)
    right = write(tmp_path / "c.jsonl", [*answers[:6], {"prompt_id": 6, **response(["b"], [FINE])}])
    run = compare(left, right, "--mode", "forced")
    assert run.code == 4
    assert "1 of 7 pairs could not be forced" in run.err
    assert compare(left, right, "--mode", "free").code == 0


def test_a_file_gets_whole_lines_without_trailing_blanks(
    compare: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a-prompt-whose-id-alone-is-wider-than-a-terminal-" * 3
    answers = [{"prompt_id": f"{long}{i}", **response(["a"], [FINE])} for i in range(6)]
    path = write(tmp_path / "b.jsonl", answers)
    texts = set()
    for columns in ("40", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        texts.add(compare(path, path, "--per-pair").out)
    (text,) = texts
    assert f"{long}0" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "least KL(baseline‖canary) that fits both lists, nats: judged\n" in text


def test_pairs_by_order_without_prompt_ids(compare: Callable[..., Run], tmp_path: Path) -> None:
    left = write(tmp_path / "b.jsonl", [response(["a"], [FINE])] * 6)
    right = write(tmp_path / "c.jsonl", [response(["a"], [FINE])] * 7)
    run = compare(left, right, "--json")
    assert run.code == 0
    assert (run.result["pairs"], run.result["skipped"]) == (6, {"only_in_canary": 1})


def test_pairs_by_prompt_id_whatever_the_order(compare: Callable[..., Run], tmp_path: Path) -> None:
    records = [
        {"prompt_id": f"p{i}", "response": response([t], [[(t, -0.200001)]])} for i, t in enumerate("abcdef")
    ]
    run = compare(write(tmp_path / "b.jsonl", records), write(tmp_path / "c.jsonl", records[::-1]), "--json")
    assert run.result["mean"]["kl_lower"] == 0.0
    assert [row["prompt_id"] for row in run.result["per_pair"]] == [f"p{i}" for i in range(6)]


def test_the_json_result_has_the_promised_shape(compare: Callable[..., Run], tmp_path: Path) -> None:
    run = compare(write(tmp_path / "b.jsonl", six(FINE)), write(tmp_path / "c.jsonl", six(FAR)), "--json")
    assert run.code == 1
    assert {"pairs", "positions", "mean", "interval", "verdict", "skipped", "per_pair"} <= run.result.keys()
    assert list(run.result["mean"]) == [
        "kl_lower",
        "kl_floor",
        "js_lower",
        "tv_lower",
        "cosine",
        "top1_agree",
        "behaviour_offset",
        "entropy_lower_p",
        "entropy_lower_q",
        "delta_p",
        "over_limit",
    ]
    assert {"prompt_id", "positions", "first_difference", "kl_lower"} <= run.result["per_pair"][0].keys()
    assert "one-shot" in run.result["note"]
    assert run.out.count("\n") == 1


@pytest.mark.parametrize(
    ("limit", "verdict", "code"), [("0.05", "trip", 1), ("50", "pass", 0), ("0", "trip", 1)]
)
def test_limit(compare: Callable[..., Run], tmp_path: Path, limit: str, verdict: str, code: int) -> None:
    left, right = write(tmp_path / "b.jsonl", six(FINE)), write(tmp_path / "c.jsonl", six(FAR))
    run = compare(left, right, "--limit", limit, "--json")
    assert (run.result["verdict"], run.code) == (verdict, code)


def test_four_pairs_are_not_enough(compare: Callable[..., Run], tmp_path: Path) -> None:
    left = write(tmp_path / "b.jsonl", six(FINE)[:4])
    run = compare(left, left, "--json")
    assert (run.code, run.result["interval"], run.result["verdict"]) == (4, None, "not_enough_data")
    assert "4 comparable pairs; an interval needs at least 5" in run.err


def test_no_answers_at_all(compare: Callable[..., Run], tmp_path: Path) -> None:
    empty = write(tmp_path / "e.jsonl", [])
    run = compare(empty, empty, "--json")
    assert run.code == 4
    assert run.result["mean"]["kl_lower"] is None
    assert compare(empty, empty).code == 4


@pytest.mark.parametrize(("digits", "eta"), [(6, 1e-6), (5, 5e-5), (4, 5e-5), (3, 5e-4), (2, 5e-4)])
def test_resolution_follows_the_coarser_side(
    compare: Callable[..., Run], tmp_path: Path, digits: int, eta: float
) -> None:
    fine = write(tmp_path / "f.jsonl", six([("a", -0.123456789), ("b", -2.5)]))
    coarse = write(tmp_path / "c.jsonl", six([("a", round(-0.123456789, digits)), ("b", -2.5)]))
    assert compare(fine, coarse, "--json").result["eta"] == eta
    assert compare(coarse, fine, "--json").result["eta"] == eta
    assert compare(fine, fine, "--json").result["eta"] == 1e-6


def test_other_definitions_are_not_compared(compare: Callable[..., Run], tmp_path: Path) -> None:
    left = write(tmp_path / "b.jsonl", six(FINE))
    right = write(tmp_path / "c.jsonl", six(FINE, definition="temperature"))
    run = compare(left, right, "--json")
    assert (run.code, run.result["skipped"]) == (4, {"definition_mismatch": 6})


def test_ids_on_one_side_and_bytes_on_the_other(compare: Callable[..., Run], tmp_path: Path) -> None:
    left = write(tmp_path / "b.jsonl", [with_ids([1, 2])])
    right = write(tmp_path / "c.jsonl", [response(["a"], [FINE])])
    assert compare(left, right, "--json").result["skipped"] == {"identity_mismatch": 1}


def test_the_table_for_people(compare: Callable[..., Run], tmp_path: Path) -> None:
    left, right = write(tmp_path / "b.jsonl", six(FINE)), write(tmp_path / "c.jsonl", six(FAR))
    run = compare(left, right, "--per-pair")
    assert run.code == 1
    for text in ("p0", "kl_lower", "trip · 6 pairs, 6 positions · limit 0.05", "one-shot"):
        assert text in run.out


MISTAKES = [
    ('{"prompt_id": 1, "choices": []}\n{"prompt_id": 2,\n', ":2: not JSON"),
    ("[1]\n", ":1: not an object"),
    ('\n{"prompt_id": 1}\n', ":2: no `choices`"),
    ('{"prompt_id": [1], "choices": []}\n', ":1: prompt_id"),
    ('{"prompt_id": 1, "response": 3}\n', ":1: response"),
    ('{"source": "guessed", "choices": []}\n', ":1: source is 'guessed'; expected one of generated, forced"),
    ('{"definition": 3, "choices": []}\n', ":1: definition"),
    (
        '{"prompt_id": 1, "choices": []}\n{"prompt_id": 1, "choices": []}\n',
        ":2: prompt_id '1' stands on line 1",
    ),
    ('{"prompt_id": 1, "choices": []}\n{"choices": []}\n', ":2: no prompt_id here"),
    ('{"choices": []}\n{"prompt_id": 1, "choices": []}\n', ":2: a prompt_id here"),
    ('{"choices": [{"logprobs": 5}]}\n', ":1: choices[0].logprobs: Expected `object | null`"),
    ('{"choices": ' + "9" * 5000 + "}\n", ":1: a number of thousands of digits"),
    ("[" * 100_000 + "\n", ":1: not JSON: nested too deep"),
    ("\udcff\n", ":1: not "),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_bad_lines_name_file_and_line(
    compare: Callable[..., Run], tmp_path: Path, text: str, message: str
) -> None:
    bad, good = tmp_path / "bad.jsonl", write(tmp_path / "good.jsonl", six(FINE))
    bad.write_bytes(text.encode("utf-8", errors="surrogateescape"))
    for sides in ((bad, good), (good, bad)):
        run = compare(*sides, "--json")
        assert run.code == 2
        assert f"{bad}{message}" in run.err
        assert "Traceback" not in run.err
        assert set(json.loads(run.out)) == {"error", "remedy"}


def test_bad_folders(compare: Callable[..., Run], tmp_path: Path) -> None:
    folder = tmp_path / "bodies"
    folder.mkdir()
    assert "no NAME.sse or NAME.json" in compare(folder, folder).err
    (folder / "x.sse").write_text('data: {"choices": []}\n\ndata: {"choices": [}\n\n')
    run = compare(folder, folder)
    assert (run.code, f"{folder / 'x.sse'}:3: not JSON" in run.err) == (2, True)
    (folder / "x.json").write_text("{}")
    (folder / "x.sse").write_text("data: [DONE]\n\n")
    assert "has the same name" in compare(folder, folder).err


def test_files_beside_the_bodies_are_ignored(compare: Callable[..., Run], tmp_path: Path) -> None:
    for name in ("x.meta.json", "x.request.json", "x.txt", "x.csv"):
        (tmp_path / name).write_text("no body")
    (tmp_path / "x.json").write_text(json.dumps({"choices": [{"message": {"content": "hi"}}]}))
    run = compare(tmp_path, tmp_path, "--json")
    assert (run.code, run.result["skipped"]) == (4, {"no_logprobs": 2})


@pytest.mark.parametrize(
    "arguments",
    [("missing.jsonl", "missing.jsonl"), ("--limit", "nan"), ("--limit", "-1"), ("--mode", "half"), ()],
)
def test_wrong_usage(compare: Callable[..., Run], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    good = write(tmp_path / "good.jsonl", six(FINE))
    run = compare(*arguments, *([good, good] if "--" in "".join(arguments) else []))
    assert run.code == 2
    assert "Traceback" not in run.err


def test_names_that_are_no_text_end_nothing(tmp_path: Path) -> None:
    """Half a character in a prompt_id, and in a body's text: printed as the escape it came as."""
    lines = [{**response(["a"], [FINE]), "prompt_id": f"\ud800{number}"} for number in range(6)]
    lines[0]["choices"][0]["message"] = {"content": "\udcff"}
    lines[0]["usage"] = {"completion_tokens": 9}
    side = str(write(tmp_path / "odd.jsonl", lines))
    command = [sys.executable, "-c", "from pipeline.cli.main import main; main()", "compare", side, side]
    done = subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    result = json.loads(done.stdout)
    assert result["skipped"] == {"logprobs_incomplete": 2}
    assert [row["prompt_id"] for row in result["per_pair"]] == [f"\ud800{number}" for number in range(1, 6)]
    done = subprocess.run([*command, "--per-pair"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert b"\\ud8005" in done.stdout
