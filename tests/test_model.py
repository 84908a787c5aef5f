"""The GPT against its definition: causality, cache, padding, and the log-probabilities of tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import GPT, PIECE, Cache, ModelConfig, attention_of_products, mean_loss, padded, token_log_probs

Make = Callable[..., GPT]
CPU = torch.device("cpu")
STORY = [5, 200, 17, 17, 90, 3, 258]
LONGER = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]


def plain_log_probs(model: GPT, ids: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """The definition: each token's entry of the log softmax at the position before it."""
    logits = model(ids)
    expected = torch.zeros(mask.shape)
    for row in range(ids.shape[0]):
        for position in range(ids.shape[1] - 1):
            if mask[row, position]:
                entries = torch.log_softmax(logits[row, position] / temperature, dim=0)
                expected[row, position] = entries[ids[row, position + 1]]
    return expected


def random_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(259, (4, 12), generator=generator)
    mask = torch.rand(4, 11, generator=generator) < 0.6
    return ids, mask


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_log_probs_are_those_of_the_plain_loop(tiny: Make, temperature: float) -> None:
    model, (ids, mask) = tiny(scale=10), random_batch()
    expected = plain_log_probs(model, ids, mask, temperature)
    assert torch.allclose(token_log_probs(model, ids, mask, temperature), expected, atol=1e-5)
    assert expected[mask].std() > 0.1  # else any token's log-probability would do


def test_a_mask_shifted_by_one_gives_other_log_probs(tiny: Make) -> None:
    model, (ids, mask) = tiny(scale=10), random_batch()
    shifted = token_log_probs(model, ids, mask.roll(1, dims=1))
    assert not torch.allclose(shifted, token_log_probs(model, ids, mask), atol=1e-2)
    assert (token_log_probs(model, ids, mask) == 0).equal(~mask)


def test_a_mask_of_the_wrong_length_is_refused(tiny: Make) -> None:
    ids, _ = random_batch()
    with pytest.raises(AssertionError):
        token_log_probs(tiny(), ids, torch.ones(ids.shape, dtype=torch.bool))


def test_gradient_reaches_only_what_counts(tiny: Make) -> None:
    model = tiny()
    ids, mask = padded([STORY], [[False] * 4 + [True] * 3], CPU)
    token_log_probs(model, ids, mask).sum().backward()
    gradient = model.positions.weight.grad
    assert gradient is not None
    read = gradient.abs().sum(1) > 0
    assert read.tolist() == [True] * 6 + [False] * (64 - 6)  # the last token is predicted, not read from


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_are_those_of_the_plain_loop(tiny: Make, temperature: float) -> None:
    model, generator = tiny(scale=10), torch.Generator().manual_seed(4)
    ids = torch.randint(259, (6, 50), generator=generator)
    mask = torch.rand(6, 49, generator=generator) < 0.7
    assert mask.sum() > PIECE  # so that more than one piece is made
    weights = torch.randn(6, 49, generator=generator)  # of each token's own, as PPO's advantages are
    found = []
    for log_probs in (token_log_probs, plain_log_probs):
        model.zero_grad()
        (weights * log_probs(model, ids, mask, temperature)).sum().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=1e-3, atol=1e-3 * float(gradient.abs().max())), name
        assert gradient.abs().max() > 0, name


def test_log_probs_of_bfloat16_products_are_kept_in_float32(tiny: Make) -> None:
    model, (ids, mask) = tiny(scale=3), random_batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(model, ids, mask)
        logits = model(ids[:, :-1]).float()
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert torch.allclose(found[mask], expected[mask], atol=1e-5)  # bfloat16 log-probabilities would be 0.02 off


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_as_two_products_is_causal_attention(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    inputs = [torch.randn(3, 2, 9, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    weights = torch.randn(3, 2, 9, 8, generator=generator)
    results = []
    for y in (attention_of_products(*inputs, 0.0), F.scaled_dot_product_attention(*inputs, is_causal=True)):
        gradients = torch.autograd.grad((y.float() * weights).sum(), inputs)
        results.append([y, *gradients])
    for mine, torchs in zip(*results, strict=True):
        assert torch.allclose(mine.float(), torchs.float(), atol=1e-5 if dtype == torch.float32 else 0.1)


def test_padding_changes_nothing(tiny: Make) -> None:
    model = tiny(scale=10)
    alone = token_log_probs(model, *padded([STORY], [[True] * len(STORY)], CPU))
    ids, mask = padded([STORY, LONGER], [[True] * len(STORY), [True] * len(LONGER)], CPU)
    beside = token_log_probs(model, ids, mask)
    assert torch.allclose(alone[0], beside[0, : len(STORY) - 1], atol=1e-6)
    assert beside[0, len(STORY) - 1 :].eq(0).all()
    ids[0, len(STORY) :] = 123
    assert token_log_probs(model, ids, mask).equal(beside)


def test_padded_rows_by_hand() -> None:
    ids, mask = padded([[1, 2, 3], [4, 5]], [[False, True, True], [False, True]], CPU)
    assert ids.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert mask.tolist() == [[True, True], [True, False]]


def test_a_later_token_changes_no_earlier_logit(tiny: Make) -> None:
    model = tiny(scale=10)
    ids = torch.tensor([LONGER])
    changed = ids.clone()
    changed[0, 6] = 77
    before, after = model(ids)[0], model(changed)[0]
    assert before[:6].equal(after[:6])
    assert not torch.allclose(before[6:], after[6:], atol=1e-2)


def test_an_earlier_token_and_its_place_change_later_logits(tiny: Make) -> None:
    model = tiny(scale=10)
    last = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    assert not torch.allclose(last, model(torch.tensor([[9, 2, 3, 4]]))[0, -1], atol=1e-3)
    assert not torch.allclose(last, model(torch.tensor([[2, 1, 3, 4]]))[0, -1], atol=1e-3)


def test_the_cache_gives_the_logits_of_a_whole_pass(tiny: Make) -> None:
    model, ids = tiny(scale=10), torch.tensor([LONGER, LONGER[::-1]])
    cache = Cache(model.config, 2, len(LONGER), CPU, torch.float32)
    pieces = [model(ids[:, :4], cache), *(model(ids[:, at : at + 1], cache) for at in range(4, len(LONGER)))]
    assert torch.allclose(torch.cat(pieces, dim=1), model(ids), atol=1e-4)


@pytest.mark.parametrize("rows", [[0, 2], [2, 1], [1, 2], [0, 1, 2], [2]])
def test_kept_rows_of_a_cache_go_on_as_before(tiny: Make, rows: list[int]) -> None:
    model, ids = tiny(scale=10), torch.tensor([LONGER, LONGER[::-1], STORY + STORY[:4]])
    cache = Cache(model.config, 3, 11, CPU, torch.float32)
    model(ids[:, :10], cache)
    left = model(ids[rows, 10:], cache.kept(torch.tensor(rows)))
    assert torch.allclose(left[:, 0], model(ids)[rows, -1], atol=1e-4)


def test_a_filled_cache_refuses_several_tokens(tiny: Make) -> None:
    model = tiny()
    cache = Cache(model.config, 1, 8, CPU, torch.float32)
    model(torch.tensor([[1, 2]]), cache)
    with pytest.raises(AssertionError, match="one token at a time"):
        model(torch.tensor([[3, 4]]), cache)


def test_more_tokens_than_the_context_are_refused(tiny: Make) -> None:
    with pytest.raises(AssertionError, match="context"):
        tiny()(torch.zeros(1, 65, dtype=torch.long))


def test_the_default_size_has_5_8_million_parameters() -> None:
    channels, layers = 256, 6
    layer = 2 * channels + 3 * channels**2 + channels**2 + 2 * 4 * channels**2
    count = sum(weight.numel() for weight in GPT(ModelConfig()).parameters())
    assert count == 4_096 * channels + 256 * channels + layers * layer + channels
    assert round(count / 1e6, 1) == 5.8


def test_untrained_logits_are_nearly_uniform(tiny: Make) -> None:
    loss = mean_loss(tiny(), [LONGER], [[True] * len(LONGER)], 1)
    assert loss == pytest.approx(torch.log(torch.tensor(259.0)).item(), abs=0.1)


def test_mean_loss_is_independent_of_the_batch_size(tiny: Make) -> None:
    model = tiny(scale=10)
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(259, (2 + 5 * number,), generator=generator).tolist() for number in range(10)]
    counts = [[False] + [True] * (len(row) - 1) for row in rows]
    losses = [mean_loss(model, rows, counts, batch) for batch in (1, 3, 10)]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    with torch.no_grad():
        each = [-plain_log_probs(model, *padded([row], [count], CPU)) for row, count in zip(rows, counts, strict=True)]
    by_token = sum(loss.sum().item() for loss in each) / sum(len(row) - 1 for row in rows)
    by_story = sum(loss.mean().item() for loss in each) / len(rows)
    assert losses[0] == pytest.approx(by_token, abs=1e-5)
    assert abs(by_token - by_story) > 1e-3  # the two differ here, so the test tells them apart


def test_dropout_acts_in_training_only(tiny: Make) -> None:
    model, ids = tiny(dropout=0.5), torch.tensor([LONGER])
    assert model(ids).equal(model(ids))
    model.train()
    assert not model(ids).equal(model(ids))


def test_heads_must_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="16 channels do not divide into 3 heads"):
        ModelConfig(channels=16, heads=3)
