"""Verification: what is accepted, what is emitted, and that it follows the target's distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from page4.kernels.draft_sampling import DraftDistributions, sample_drafts_reference
from page4.kernels.errors import InputError
from page4.kernels.mtp_verify import kept_tokens, verify_greedy_reference, verify_reference
from page4.kernels.philox import Purpose, random_words
from page4.kernels.sampling_params import SamplingParams
from page4.kernels.token_weights import row_totals

from .sampling_cases import draw_step, follows, probabilities


def verify_one(target: list[int], drafts: list[int]) -> tuple[int, list[int]]:
    accepted, emitted = verify_greedy_reference(
        torch.tensor([target]), torch.tensor([drafts], dtype=torch.int64).view(1, len(drafts))
    )
    return int(accepted), emitted[0].tolist()


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_every_accept_count(num_drafts: int) -> None:
    target = list(range(10, 11 + num_drafts))
    for expected in range(num_drafts + 1):
        drafts = target[:num_drafts]
        if expected < num_drafts:
            drafts[expected] = 99  # the first wrong draft; those after it are right again
        accepted, emitted = verify_one(target, drafts)
        assert accepted == expected
        assert emitted == target[: expected + 1] + [-1] * (num_drafts - expected)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_missing_draft_ends_the_prefix(position: int) -> None:
    drafts = [5, 6, 7]
    drafts[position] = -1
    accepted, emitted = verify_one([5, 6, 7, 8], drafts)
    assert accepted == position
    assert emitted[: position + 1] == [5, 6, 7][: position + 1]


def test_a_missing_draft_never_equals_a_missing_target() -> None:
    assert verify_one([-1, -1], [-1]) == (0, [-1, -1])


def test_all_accepted_emits_the_bonus_token() -> None:
    assert verify_one([1, 2, 3, 4], [1, 2, 3]) == (3, [1, 2, 3, 4])


def test_the_first_draft_is_verified() -> None:
    assert verify_one([1, 2, 3, 4], [9, 2, 3]) == (0, [1, -1, -1, -1])


def test_without_drafts_one_token_is_emitted() -> None:
    assert verify_one([7], []) == (0, [7])


def test_requests_are_independent() -> None:
    torch.manual_seed(0)
    target, drafts = torch.randint(0, 2, (500, 5)), torch.randint(-1, 2, (500, 4))
    accepted, emitted = verify_greedy_reference(target, drafts)
    for row in range(500):
        count = 0
        while count < 4 and drafts[row, count] == target[row, count]:
            count += 1
        assert accepted[row] == count
        assert emitted[row].tolist() == target[row, : count + 1].tolist() + [-1] * (4 - count)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="target_tokens"):
        verify_greedy_reference(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64))


DRAWS = 100_000
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.02},
]


def rows_of(num_drafts: int, vocabulary: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target ``[K + 1, V]`` and a draft ``[K, V]`` that is wrong but not hopeless."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(num_drafts + 1, vocabulary, generator=generator)
    return target, target[:num_drafts] + torch.randn(num_drafts, vocabulary, generator=generator)


def many(temperature: float, draft_temperature: float, seeds: bool = True, **filters: Any) -> SamplingParams:
    return SamplingParams.of(
        [temperature] * DRAWS,
        draft_temperature=[draft_temperature] * DRAWS,
        seed=list(range(DRAWS)) if seeds else [3] * DRAWS,
        **{name: [value] * DRAWS for name, value in filters.items()},
    )


def all_follow(accepted: Tensor, emitted: Tensor, target: Tensor, temperature: float, **filters: Any) -> bool:
    """Whether each row's tokens, where it was reached, follow the target."""
    return all(
        follows(emitted[accepted >= j, j], probabilities(target[j], temperature, **filters))
        for j in range(len(target))
        if (accepted >= j).sum() > 100
    )


@pytest.mark.parametrize(
    ("num_drafts", "temperature", "draft_temperature", "filters"),
    [
        (1, 1.0, 1.0, {}),
        (2, 0.3, 1.5, {}),
        (3, 1.5, 0.5, FILTERS[1]),
        (4, 0.7, 0.7, FILTERS[2]),
        (5, 1.0, 1.2, FILTERS[4]),
        (2, 1.0, 0.3, FILTERS[3]),
        (0, 0.8, 0.0, FILTERS[4]),
        (1, 1.0, 0.0, {}),
        (3, 1.2, 0.0, FILTERS[4]),
        (5, 1.5, 0.0, {}),
    ],
)
def test_tokens_follow_the_target_exactly(
    num_drafts: int, temperature: float, draft_temperature: float, filters: dict[str, Any]
) -> None:
    target, draft = rows_of(num_drafts, seed=num_drafts)
    params = many(temperature, draft_temperature, **filters)
    accepted, emitted = draw_step(target, draft, params, torch.full((DRAWS,), 20))
    assert all_follow(accepted, emitted, target, temperature, **filters)
    assert not all_follow(accepted, emitted, target, 1.15 * temperature, **filters)


def test_drafts_are_accepted_as_often_as_the_distributions_overlap() -> None:
    target, draft = rows_of(1)
    accepted, _ = draw_step(target, draft, many(1.0, 0.8), torch.zeros(DRAWS, dtype=torch.int64))
    overlap = torch.minimum(probabilities(target[0], 1.0), probabilities(draft[0], 0.8)).sum()
    assert follows(accepted, torch.stack([1 - overlap, overlap]))


@pytest.mark.parametrize("draft_temperature", [0.0, 1.2])
def test_tokens_of_several_steps_form_the_targets_chain(draft_temperature: float) -> None:
    """Every token depends on the one before it; a step's rejected positions are drawn again in the next."""
    vocabulary, requests = 4, 50_000
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(vocabulary, vocabulary, generator=generator)  # logits after each token
    draft = target + torch.randn(vocabulary, vocabulary, generator=generator)
    params = SamplingParams.of(
        [1.0] * requests, draft_temperature=[draft_temperature] * requests, seed=list(range(requests))
    )
    tokens = torch.zeros(requests, 8, dtype=torch.int64)
    length = torch.ones(requests, dtype=torch.int64)  # token 0 is given
    row = torch.arange(requests)
    while (length < 4).any():
        last = tokens[row, length - 1]
        store = DraftDistributions.empty(draft[last], 2)
        drafts = torch.empty(requests, 2, dtype=torch.int64)
        previous = last
        for j in range(2):
            drafts[:, j] = sample_drafts_reference(draft[previous], length + j, params, store, j)
            previous = drafts[:, j]
        seen = torch.cat([last[:, None], drafts], 1)
        accepted, emitted = verify_reference(target[seen], drafts, length, params, store)
        for j in range(3):
            new = (accepted >= j) & (length < 4)
            tokens[row[new], (length + j)[new]] = emitted[new, j]
        length = torch.where(length < 4, length + accepted + 1, length)
    p = target.double().softmax(1)
    joint = p[0][:, None, None] * p[:, :, None] * p[None]
    found = (tokens[:, 1] * vocabulary + tokens[:, 2]) * vocabulary + tokens[:, 3]
    assert follows(found, joint.flatten())


@pytest.mark.parametrize("wrong", ["temperature", "logits"])
def test_another_q_than_the_drafts_is_noticed(wrong: str) -> None:
    target, draft = rows_of(2)
    params, positions = many(1.0, 1.5), torch.full((DRAWS,), 20)
    store = DraftDistributions.empty(draft[:1].expand(DRAWS, -1), 2)
    drafts = torch.stack(
        [
            sample_drafts_reference(draft[j].expand(DRAWS, -1), positions + j, params, store, j)
            for j in (0, 1)
        ],
        1,
    )
    rows = target.expand(DRAWS, -1, -1)
    assert all_follow(*verify_reference(rows, drafts, positions, params, store), target, 1.0)
    if wrong == "temperature":
        store.scale.mul_(1.3)
    else:
        store.logits.add_(0.3 * torch.randn(draft.shape, generator=torch.Generator().manual_seed(1)))
    for j in (0, 1):
        totals = row_totals(store.logits[:, j], store.scale[:, j])
        store.maximum[:, j], store.total[:, j] = totals.maximum, totals.total
    assert not all_follow(*verify_reference(rows, drafts, positions, params, store), target, 1.0)


@pytest.mark.parametrize("shared", [Purpose.ACCEPT, Purpose.RECOVER])
def test_noise_shared_with_the_draft_is_noticed(shared: Purpose, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = rows_of(2)

    def words(seed: Tensor, position: Tensor, purpose: Tensor | int) -> Tensor:
        purpose = torch.as_tensor(purpose)
        found = random_words(seed, position, torch.where(purpose == shared, Purpose.DRAFT, purpose))
        # A draft's first two words only choose among tiles, of which there is one: share the other two.
        return found.roll(2, -1) if shared is Purpose.ACCEPT else found

    monkeypatch.setattr("page4.kernels.mtp_verify.random_words", words)
    step = draw_step(target, draft, many(1.0, 1.0), torch.full((DRAWS,), 20))
    assert not all_follow(*step, target, 1.0)


@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_tokens_that_are_not_allowed_never_appear(draft_temperature: float) -> None:
    draws = 20_000
    target, _ = rows_of(2, vocabulary=40)
    tokens = [[1, 5, 33, 39], [0, 32], [7]]
    draft = target[:2].clone()
    for row in (0, 1):  # the draft prefers an allowed token, but proposes others, too
        draft[row, max(tokens[row], key=target[row].tolist().__getitem__)] = 1.0 + draft[row].max()
    allowed = torch.zeros(1, 3, 2, dtype=torch.int64)
    for row, some in enumerate(tokens):
        for token in some:
            allowed[0, row, token // 32] |= 1 << token % 32
    target[0, 2] = torch.nan  # of a token that is not allowed: it counts as little as the others
    params = SamplingParams.of(
        [1.0] * draws, draft_temperature=[draft_temperature] * draws, top_p=[0.9] * draws, seed=[3] * draws
    )
    accepted, emitted = draw_step(
        target, draft, params, torch.arange(draws), allowed=allowed.to(torch.int32).expand(draws, -1, -1)
    )
    assert (accepted >= 1).sum() > draws / 10
    for row, some in enumerate(tokens):
        reached = emitted[accepted >= row, row]
        assert follows(reached, probabilities(target[row], 1.0, top_p=0.9, allowed=some))


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    params = SamplingParams.of([1.0], top_k=[top_k], top_p=[top_p], min_p=[min_p])
    row = torch.tensor([logits])
    totals = row_totals(row, params.scale)
    found = kept_tokens(row, totals, params.scale, params.top_k, params.top_p, params.log2_min_p)
    return found[0].nonzero()[:, 0].tolist()


def test_filters_keep_the_first_tokens_of_the_order() -> None:
    assert kept([0.0, 3.0, 1.0, 2.0], top_k=1) == [1]
    assert kept([0.0, 3.0, 1.0, 2.0], top_k=9) == [0, 1, 2, 3]
    assert kept([0.0, 3.0, 1.0, 2.0], top_p=1e-9) == [1]
    assert kept([0.0, 3.0, 1.0, 2.0], min_p=1.0) == [1]
    assert kept([0.0, 0.0, 0.0, 0.0], min_p=1.0) == [0, 1, 2, 3]
    # Ties go to the lower token, and -0.0 equals +0.0.
    assert kept([1.0, -0.0, 0.0, -0.0, 2.0], top_k=3) == [0, 1, 4]
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.51) == [0, 1, 2]
    # top-p refers to what top-k and min-p leave, which is 3/4 and 1/4.
    log3 = math.log(3)
    assert kept([log3, 0.0, 0.0, 0.0], top_k=2, top_p=0.7) == [0]
    assert kept([log3, 0.0, 0.0, 0.0], top_p=0.7) == [0, 1, 2]
    assert kept([log3, 0.0, -9.0, -9.0], min_p=0.1, top_p=0.74) == [0]
    assert kept([-math.inf, 0.0, -math.inf], top_k=2) == [1]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_what_their_definition_says(filters: dict[str, Any]) -> None:
    for seed in range(20):
        logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(seed))
        logits = (2 * logits).round() / 2 if seed % 2 else logits
        expected = probabilities(logits, 1.0, **filters).nonzero()[:, 0].tolist()
        assert kept(logits.tolist(), **filters) == expected


def test_a_greedy_target_is_verified_as_the_greedy_reference_does() -> None:
    generator = torch.Generator().manual_seed(0)
    requests, num_drafts, vocabulary = 400, 3, 3
    logits = torch.randint(0, 3, (requests, num_drafts + 1, vocabulary), generator=generator) - 1.0
    logits[logits == 0] *= torch.where(torch.rand(int((logits == 0).sum()), generator=generator) < 0.5, 1, -1)
    drafts = torch.randint(-1, vocabulary + 1, (requests, num_drafts), generator=generator)
    params = SamplingParams.of([0.0] * requests, top_k=[2] * requests)
    found = verify_reference(logits, drafts, torch.arange(requests), params)
    best = torch.tensor(
        [[row.index(max(row)) for row in rows] for rows in logits.tolist()]
    )  # the lower token
    expected = verify_greedy_reference(best, drafts)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_missing_draft_gives_its_place_to_the_targets_own_token() -> None:
    target, draft = rows_of(2)
    params, positions = many(1.0, 1.0), torch.full((DRAWS,), 20)
    store = DraftDistributions.empty(draft[:1].expand(DRAWS, -1), 2)
    for j in (0, 1):
        sample_drafts_reference(draft[j].expand(DRAWS, -1), positions + j, params, store, j)
    for missing in (-1, 9, 2**40):
        drafts = torch.full((DRAWS, 2), missing)
        accepted, emitted = verify_reference(target.expand(DRAWS, -1, -1), drafts, positions, params, store)
        assert not accepted.any() and (emitted[:, 1:] == -1).all()
        assert follows(emitted[:, 0], probabilities(target[0], 1.0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "mask"])
def test_a_row_without_a_distribution_ends_the_step(temperature: float, bad: str) -> None:
    logits = torch.zeros(1, 3, 5)
    logits[0, :, 2] = 80.0
    allowed = torch.full((1, 3, 1), -1, dtype=torch.int32)
    if bad == "mask":
        allowed[0, 1] = 0
    elif bad == "-inf":
        logits[0, 1] = -math.inf
    else:
        logits[0, 1, 0] = float(bad)
    accepted, emitted = verify_reference(
        logits, torch.tensor([[2, 2]]), torch.tensor([7]), SamplingParams.of([temperature]), allowed=allowed
    )
    assert accepted.tolist() == [1] and emitted.tolist() == [[2, -1, -1]]


def test_a_draft_that_equals_the_target_is_always_accepted() -> None:
    target, _ = rows_of(3)
    accepted, emitted = draw_step(target, target[:3], many(0.7, 0.7), torch.full((DRAWS,), 1))
    assert (accepted == 3).all() and (emitted >= 0).all()


def test_tokens_do_not_depend_on_the_batch() -> None:
    requests, num_drafts, vocabulary = 8, 3, 50
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(requests, num_drafts + 1, vocabulary, generator=generator)
    draft = target[:, :num_drafts] + 0.5 * torch.randn(requests, num_drafts, vocabulary, generator=generator)
    temperature = [0.0, 0.5, 1.0, 1.5] * 2
    drafting, seeds, ks = [1.0, 0.0] * 4, list(range(8)), [0, 5, 0, 0, 9, 0, 0, 2]
    positions = torch.arange(10, 18)

    def step(rows: list[int]) -> tuple[Tensor, Tensor]:
        params = SamplingParams.of(
            [temperature[r] for r in rows],
            draft_temperature=[drafting[r] for r in rows],
            seed=[seeds[r] for r in rows],
            top_k=[ks[r] for r in rows],
        )
        store = DraftDistributions.empty(draft[rows, 0], num_drafts)
        drafts = [
            sample_drafts_reference(draft[rows, j], positions[rows] + j, params, store, j)
            for j in range(num_drafts)
        ]
        return verify_reference(target[rows], torch.stack(drafts, 1), positions[rows], params, store)

    accepted, emitted = step(list(range(8)))
    for rows in ([5], [7, 2], [3, 0, 1, 6, 4]):
        alone = step(rows)
        assert torch.equal(alone[0], accepted[rows]) and torch.equal(alone[1], emitted[rows])


def test_padded_requests_are_not_read() -> None:
    logits = torch.full((2, 2, 5), math.nan)
    logits[0] = torch.arange(5.0)
    accepted, emitted = verify_reference(
        logits, torch.tensor([[4], [99]]), torch.tensor([3, -1]), SamplingParams.of([0.0, 1.0])
    )
    assert accepted.tolist() == [1, -1] and emitted.tolist() == [[4, 4], [-1, -1]]


def test_wrong_inputs_are_refused() -> None:
    logits, drafts = torch.zeros(2, 3, 40), torch.zeros(2, 2, dtype=torch.int64)
    positions, greedy = torch.zeros(2, dtype=torch.int64), SamplingParams.of([1.0] * 2)

    def refused(match: str, **wrong: Any) -> None:
        inputs = {"logits": logits, "drafts": drafts, "positions": positions, "params": greedy}
        with pytest.raises(InputError, match=match):
            verify_reference(**(inputs | wrong))

    sampled = SamplingParams.of([1.0] * 2, draft_temperature=[0.0, 1.0])
    refused("distributions that they were sampled from", params=sampled)
    refused("draft logits", params=sampled, distributions=DraftDistributions.empty(logits[:, 0], 3))
    refused("logits", logits=logits[0])
    refused("logits", logits=logits.long())
    refused("9 rows", logits=torch.zeros(2, 9, 40))
    refused("drafts", drafts=drafts[:, :1])
    refused("drafts", drafts=drafts.int())
    refused("positions", positions=positions[:1])
    refused("1 requests", params=SamplingParams.of([1.0]))
    refused("allowed", allowed=torch.zeros(2, 3, 1, dtype=torch.int32))
    refused("allowed", allowed=torch.zeros(2, 3, 2, dtype=torch.int64))
