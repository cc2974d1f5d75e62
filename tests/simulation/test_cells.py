"""The simulation's cells are the workers' cells: the same traffic through the real sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.policy_file import shipped_policy_text
from schemas.buckets import Cell, FinalBuckets
from schemas.pairs import PairBatch
from schemas.topics import Topic
from tests.simulation.answers import SECOND_US, START_US, halves, recorded_answers, request, spec
from tests.simulation.cells import node_names, pair_cells, request_cells
from tests.simulation.chain import Chain
from tests.simulation.scores import HEALTHY
from tests.simulation.traffic import REQUEST_TYPES, Pairs, arrivals, context_lengths, requests, seed

NODES = 5
Told = dict[tuple[int, str, str], tuple[int, object]]


def told(cells: dict[int, list[Cell]], measure: str, counter: str) -> Told:
    found = {
        (second, cell.dimension, cell.value): (cell.counters[counter], cell.measures[measure])
        for second, held in cells.items()
        for cell in held
    }
    assert len(found) == sum(map(len, cells.values())), "one cell each"
    return found


def published(finals: list[FinalBuckets], topic: str, arm: str) -> dict[int, list[Cell]]:
    return {
        second.second: content.cells
        for final in finals
        if final.topic == topic
        for second in final.seconds
        for content in second.contents
        if content.population is not None and content.population.arm == arm
    }


def test_pair_cells_are_those_of_the_pair_source(shared_dir: Path) -> None:
    draw = seed(1)
    n = 300
    answers = recorded_answers(shared_dir, HEALTHY)
    tokens = draw.choice(context_lengths(shared_dir, "code"), n)
    tokens[:8] = (512, 513, 2048, 2049, 4096, 4097, 8192, 8193)
    seconds, runs = arrivals(draw, n, 40.0), draw.choice(answers.runs, n)
    chain = Chain(spec(), {"shipped": shipped_policy_text()}, START_US)
    rows: list[PairBatch] = []
    for second in range(int(seconds[-1]) + 1):
        logits = [
            half
            for at in np.flatnonzero(seconds == second).tolist()
            for half in halves(
                answers, int(runs[at]), at_us=second * SECOND_US, node=at % NODES, tokens=int(tokens[at]),
                request_type=at % 2, number=at,
            )
        ]  # fmt: skip
        for flush in chain.append(START_US + second * SECOND_US + 500_000, logits=logits):
            rows += flush.pairs
    for flush in chain.close():
        rows += flush.pairs
    names = node_names("canary", NODES)

    def column(name: str) -> np.ndarray:
        return np.array([value for batch in rows for value in getattr(batch, name)], dtype=np.int64)

    def texts(name: str, values: tuple[str, ...]) -> np.ndarray:
        said = [batch.dictionary[code] for batch in rows for code in getattr(batch, name)]
        return np.array([values.index(text) for text in said], dtype=np.int64)

    pairs = Pairs(
        column("event_us") // SECOND_US,
        column("kl_lower"),
        texts("node", names),
        column("input_tokens"),
        texts("request_type", REQUEST_TYPES),
        np.full(n, -1, dtype=np.int64),
    )
    assert pairs.n == n
    ours = told(pair_cells(pairs, names), "kl_lower", "pairs")
    theirs = told(published(chain.finals, Topic.LOGITS.value, "canary"), "kl_lower", "pairs")
    assert ours == theirs
    assert len(ours) > 10 * len(set(seconds.tolist()))


def test_request_cells_are_those_of_the_measure_source(shared_dir: Path) -> None:
    made = requests(seed(2), shared_dir, 6, 40.0, trace="code", nodes=NODES)
    chain = Chain(spec(), {"shipped": shipped_policy_text()}, START_US)
    for second in range(int(made.second.max()) + 1):
        events = [
            request(
                "canary",
                # It ended in the middle of its second: the second is of the end.
                at_us=second * SECOND_US + 500_000 - int(made.ttft_us[at]),
                ttft_us=int(made.ttft_us[at]), node=int(made.node[at]), tokens=int(made.input_tokens[at]),
                request_type=int(made.request_type[at]), shadow=True, number=at,
            )
            for at in np.flatnonzero(made.second == second).tolist()
        ]  # fmt: skip
        chain.append(START_US + second * SECOND_US + 600_000, requests=events)
    chain.close()
    cells = {
        second + START_US // SECOND_US: held
        for second, held in request_cells(made, node_names("canary", NODES), "shadow").items()
    }
    ours = told(cells, "ttft_us", "requests")
    assert ours == told(published(chain.finals, Topic.REQUESTS.value, "canary"), "ttft_us", "requests")
    assert {dimension for _, dimension, _ in ours} >= {"stratum", "node_context", "traffic"}
