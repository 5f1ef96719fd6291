"""Networks for large images, as torchvision has them: Clothing-1M, Figure 1 and Table 2."""

from __future__ import annotations

from typing import Any

from torch import nn

HEADS = {  # where the last layer is
    "resnet18": "fc",
    "resnet50": "fc",
    "mobilenet_v2": "classifier.1",
    "densenet121": "classifier",
    "googlenet": "fc",
    "inception_v3": "fc",
}
AUXILIARY = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}  # their side heads


def imagenet(num_classes: int, name: str, pretrained: bool = True) -> nn.Module:
    """A network with a new last layer; the rest pretrained on ImageNet, or all of it random."""
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"The model {name!r} for large images is torchvision's: pip install torchvision."
        ) from error
    options: dict[str, Any] = {"weights": "IMAGENET1K_V1" if pretrained else None}
    if name in AUXILIARY and not pretrained:
        options["init_weights"] = True
    model = models.get_model(name, **options)
    if name in AUXILIARY:
        # Off as in the authors' code, but afterwards: pretrained weights are only loaded with the heads on.
        model.aux_logits = False
        for head in AUXILIARY[name]:
            setattr(model, head, None)
    place, _, last = HEADS[name].rpartition(".")
    parent = model.get_submodule(place)
    setattr(parent, last, nn.Linear(getattr(parent, last).in_features, num_classes))
    return model
