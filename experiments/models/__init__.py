"""Models of the paper, for images of 32 x 32, and the network of its studies on digits."""

import functools
from collections.abc import Callable

from torch import nn

from experiments.models.imagenet import HEADS, imagenet
from experiments.models.inception import GoogLeNet, InceptionV3
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet18 as ResNet18
from experiments.models.resnet import ResNet34, ResNet50
from experiments.models.small_cnn import SmallCNN as SmallCNN
from experiments.models.zoo import VGG11, DenseNet121, MobileNetV2

# By the name that a cell gives: functions from the number of classes to a model.
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": ResNet18,
    "small_cnn": SmallCNN,
    "vgg11": VGG11,
    "googlenet": GoogLeNet,
    "resnet34": ResNet34,
    "resnet50": ResNet50,
    "densenet121": DenseNet121,
    "mobilenet_v2": MobileNetV2,
    "inception_v3": InceptionV3,
    # Not for photographs, or with the dropout that the Monte-Carlo draws of Figure 9 need.
    "mlp": MLP,
    "mlp_dropout": functools.partial(MLP, dropout=0.5),
    "small_cnn_dropout": functools.partial(SmallCNN, dropout=0.05),
    # For large images; these need torchvision.
    **{f"imagenet_{name}": functools.partial(imagenet, name=name) for name in HEADS},
    "imagenet_resnet18_random": functools.partial(imagenet, name="resnet18", pretrained=False),
}
