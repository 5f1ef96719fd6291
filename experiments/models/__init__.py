"""Models of the paper, for images of 32 x 32."""

from experiments.models.resnet import ResNet18 as ResNet18
from experiments.models.small_cnn import SmallCNN as SmallCNN
