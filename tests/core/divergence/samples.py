"""Lists and columns for the divergence tests, written out plainly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.core.divergence.lists import TopLists
from schemas.columns import NOT_LISTED, LogitColumns

Entry = tuple[int, float]
"""Token and log-probability."""


def top_lists(
    lists: Sequence[Sequence[Entry]], caps: Sequence[float | None] | None = None, k: int = 0
) -> TopLists:
    """T lists as matrices, padded to the longest (or to k). `caps`: logarithms; None: smallest listed."""
    rows = max(k, *(len(entries) for entries in lists))
    ids = np.full((rows, len(lists)), NOT_LISTED, dtype=np.int64)
    logprobs = np.full((rows, len(lists)), -np.inf)
    cap = np.empty(len(lists))
    for column, entries in enumerate(lists):
        listed = [(token, value) for token, value in entries if value > -9999.0]
        for row, (token, value) in enumerate(listed):
            ids[row, column], logprobs[row, column] = token, value
        given = caps[column] if caps else None
        cap[column] = min(value for _, value in listed) if given is None else given
    return TopLists(ids, logprobs, cap)


def logit_columns(
    answers: Sequence[tuple[Sequence[int], Sequence[Sequence[Entry]]]],
    *,
    eta: float = 1e-6,
    definition: int = 0,
    source: int = 0,
    kind: int = 0,
    identity: int = 0,
    ended: Sequence[int] | None = None,
) -> LogitColumns:
    """One record of answers (emitted tokens, one list per position), padded as the codecs do."""
    n = len(answers)
    ks = [max([len(entries) for entries in lists], default=0) for _, lists in answers]
    lengths = [len(tokens) for tokens, _ in answers]
    ids: list[int] = []
    values: list[float] = []
    for (_, lists), k in zip(answers, ks, strict=True):
        for entries in lists:
            padded = [*entries, *[(NOT_LISTED, -np.inf)] * (k - len(entries))]
            ids += [token for token, _ in padded]
            values += [value for _, value in padded]
    return columns_of(
        np.array([token for tokens, _ in answers for token in tokens], dtype=np.int64),
        np.array(ids, dtype=np.int64),
        np.array(values, dtype=np.float64),
        lengths,
        ks,
        eta=eta,
        codes={"definition": definition, "source": source, "kind": kind, "identity": identity},
        ended=ended or [-1] * n,
    )


def columns_of(
    tokens: np.ndarray,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    lengths: Sequence[int],
    ks: Sequence[int],
    *,
    eta: float,
    codes: dict[str, int],
    ended: Sequence[int],
) -> LogitColumns:
    """Columns around flat arrays; everything that scoring does not read is zero."""
    n = len(lengths)

    def starts(sizes: Sequence[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def zeros(dtype: type) -> np.ndarray:
        return np.zeros(n, dtype=dtype)

    return LogitColumns(
        n=n,
        signature=np.zeros((n, 16), np.uint8),
        pair_id=np.zeros((n, 16), np.uint8),
        has_pair_id=zeros(np.bool_),
        arm=zeros(np.uint8),
        generation=zeros(np.int32),
        ts_us=zeros(np.int64),
        duration_us=zeros(np.int64),
        input_tokens=zeros(np.int32),
        cached_tokens=zeros(np.int32),
        temperature=zeros(np.float64),
        top_p=zeros(np.float64),
        max_tokens=zeros(np.int32),
        seed=zeros(np.int64),
        has_seed=zeros(np.bool_),
        labels={},
        expected_arms=zeros(np.uint8),
        definition=np.full(n, codes.get("definition", 0), np.uint8),
        source=np.full(n, codes.get("source", 0), np.uint8),
        kind=np.full(n, codes.get("kind", 0), np.uint8),
        eta=np.full(n, eta),
        identity=np.full(n, codes.get("identity", 0), np.uint8),
        ended=np.array(ended, dtype=np.int8),
        offsets=starts(lengths),
        k=np.array(ks, dtype=np.uint8),
        entry_offsets=starts([length * k for length, k in zip(lengths, ks, strict=True)]),
        tokens=tokens,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def recorded(
    shared_dir: Path, variant: str, answers: str = "greedy", k: int = 5
) -> tuple[LogitColumns, LogitColumns]:
    """Baseline (k entries) and teacher-forced canary of a recorded variant, float32."""
    folder = shared_dir / "data" / "logits"
    base = np.load(folder / f"base.{answers}.npz")
    canary = np.load(folder / f"tf.{answers}.{variant}.npz")
    lengths = np.diff(base["offset"]).tolist()

    def columns(ids: np.ndarray, logprobs: np.ndarray, source: int) -> LogitColumns:
        return columns_of(
            base["tok"].astype(np.int32),
            ids.reshape(-1).astype(np.int32),
            logprobs.reshape(-1).astype(np.float32),
            lengths,
            [ids.shape[1]] * len(lengths),
            eta=1e-6,
            codes={"source": source},
            ended=[-1] * len(lengths),
        )

    return (
        columns(base["top_ids"][:, :k], base["top_lp"][:, :k], 0),
        columns(canary["top_ids"], canary["top_lp"], 1),
    )
