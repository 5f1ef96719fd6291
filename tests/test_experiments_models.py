"""Targets of Figure 2: the published networks, with stems that suit 32 x 32."""

import pytest
import torch

from experiments.models import MODELS
from experiments.studies import fig2


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


# Thousands of parameters with 10 classes; the published networks less their 1000 classes and their stems.
SIZES = {
    "resnet18": 11_174,
    "small_cnn": 538,
    "vgg11": 28_150,
    "googlenet": 5_491,
    "resnet34": 21_282,
    "resnet50": 23_521,
    "densenet121": 6_956,
    "mobilenet_v2": 2_237,
    "inception_v3": 21_639,
}


def test_every_model_has_a_known_size_and_every_target_is_a_model():
    assert set(SIZES) <= set(MODELS)
    assert set(fig2.TARGETS) <= set(MODELS)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_shapes(name):
    with torch.device("meta"):
        model = MODELS[name](10)
        assert round(num_parameters(model) / 1000) == SIZES[name]
        other = MODELS[name](100)
    assert num_parameters(other) > num_parameters(model)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3", "densenet121", "mobilenet_v2"])
def test_the_stem_does_not_wear_the_image_away(name):
    model = MODELS[name](10).eval()
    with torch.no_grad():
        first, whole = model.features[0], model.features
        x = torch.zeros(1, 3, 32, 32)
        assert first(x).shape[2:] == (32, 32)
        assert min(whole(x).shape[2:]) >= 4


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_halve_the_image_three_times(name):
    with torch.device("meta"):
        model = MODELS[name](10)
        assert model.stages(model.stem(torch.zeros(1, 3, 32, 32))).shape[2:] == (4, 4)
