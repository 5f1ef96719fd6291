"""Means of BatchNorm that follow the weights: what they are, and of which candidates."""

import pytest
import torch
from benchmarks.bench_agreement import Watched
from fixtures_folded import IMAGES, N, Net, run, trained
from torch import nn

from rholoss.engine import Folded, Resident, Trainer
from rholoss.engine.folded import FoldedCopy
from rholoss.engine.means import mean_input, mean_result, taps
from rholoss.errors import RholossError


@pytest.fixture
def images():
    return IMAGES.clone()


@pytest.mark.parametrize(
    "how",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
        {"kernel_size": (5, 3), "stride": (2, 1), "padding": (2, 0), "dilation": (1, 2)},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": 3, "groups": 2, "padding": 2, "bias": False},
        {"kernel_size": 4, "stride": 3},
    ],
)
def test_the_mean_of_a_result_follows_from_that_of_the_inputs(how):
    torch.manual_seed(0)
    conv, x = nn.Conv2d(6, 8, **how), torch.randn(5, 6, 11, 9)
    mean = mean_input(x.mean(0), *taps(conv, x))
    with torch.no_grad():
        for _ in range(2):  # and of other weights, without another look
            result = mean_result(conv.weight, mean) + (0 if conv.bias is None else conv.bias)
            torch.testing.assert_close(result, conv(x).mean((0, 2, 3)))
            conv.weight.mul_(torch.rand(conv.weight.shape))


def test_means_that_follow_become_those_of_the_candidates(images):
    """Where nothing moves, scoring ends where BatchNorm in train mode is, with its variances."""
    model = trained(Net()).train()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 1.0
    with torch.no_grad():
        expected = model(images)  # and the running statistics are those of these images
    for norm in (model.norm0, model.norm1, model.norm4):
        norm.running_mean.add_(1.0)  # means, too, but for what is folded
    norms = [model.norm0, model.norm1, model.norm2, model.norm4]
    folded = FoldedCopy(model, torch.float32, means=len(images))
    assert len(folded.pairs) == len(norms)
    found = []
    for _ in range(200):
        folded.refresh_statistics()
        folded.refresh_weights()
        with torch.no_grad():
            found.append(folded.model(images))
        folded.note_inputs()
    assert float((found[0] - expected).abs().mean()) > 0.1
    torch.testing.assert_close(found[-1], expected, rtol=0.01, atol=0.01)


def test_the_means_of_a_layer_that_is_frozen_stay_its_own(images):
    model = trained(Net()).train()
    model.norm0.eval()
    folded = FoldedCopy(model, torch.float32, means=16)
    whole = FoldedCopy(trained(Net()).eval(), torch.float32, means=16)  # all are: as a whole
    for copy in (folded, whole):
        copy.refresh_statistics()
        copy.refresh_weights()
        copy.model(images)
        copy.note_inputs()
    assert [bool(place.isnan().any()) for place in folded._places] == [True, False, False, False]
    assert not any(place.isnan().any() for place in whole._places)


def test_there_is_no_mean_to_follow_where_all_layers_are_frozen(images):
    model = Net().train()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.eval()
    with pytest.raises(
        RholossError, match=r"`means` is 16, but all .* are frozen.*leave `means` out"
    ):
        run(Folded(means=16), images, net=lambda: model)


def test_of_what_the_convolutions_read_the_mean_alone_is_kept(images):
    folded = FoldedCopy(Net().train(), torch.float32, means=16)
    folded.model(images)
    kept = [fused.read for fused, _, _ in folded.pairs]
    torch.testing.assert_close(kept[0], images[:16].mean(0))
    assert all(image.untyped_storage().nbytes() == 4 * image.numel() for image in kept)
    # As what they are the means of lies in memory: otherwise a GPU reads it channel by channel.
    assert all(image.permute(1, 2, 0).is_contiguous() for image in kept)
    folded.note_inputs()
    assert [fused.read for fused, _, _ in folded.pairs] == [None] * 4


@pytest.mark.parametrize("overlap", [False, True, "ahead"])
def test_they_follow_in_each_step(images, overlap):
    scoring = Folded(means=16)
    _, trainer = run(scoring, images, steps=3, overlap=overlap)
    before = [place.clone() for place in scoring.copy._places]
    trainer.train(1)
    assert all(bool(place.isfinite().all()) for place in before)
    assert not any(map(torch.equal, before, scoring.copy._places))


def test_the_number_of_candidates_is_that_of_the_state(images):
    _, half = run(Folded(means=16), images, steps=3)
    with pytest.raises(RholossError, match=r"means=16.* has .*means=8"):
        run(Folded(means=8), images, 3, half.state_dict())


def test_means_that_follow_choose_more_like_the_paper(images):
    def shared(scoring):
        """With exact scoring, in the steps of a run by this."""
        torch.manual_seed(0)
        trainer = Trainer(
            Net(), Resident(images, torch.arange(N) % 5, device="cpu"), total_steps=60, learning_rate=0.01,
            irreducible=torch.linspace(0, 1, N), candidates=48, keep=0.25, scoring=scoring, batch_norm="eval",
        )  # fmt: skip
        watched = Watched(trainer)
        return sum(watched.look()[1] for _ in range(60)) / 60

    assert shared(Folded(0.5, means=48)) > shared(Folded(0.5)) + 0.03
