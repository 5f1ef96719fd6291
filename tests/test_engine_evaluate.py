import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rholoss.engine import Evaluator, Resident


def test_it_measures_what_a_plain_loop_measures():
    torch.manual_seed(0)
    x, y = torch.randn(107, 5), torch.randint(0, 3, (107,))
    model = nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
    ).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluation = Evaluator(model, Resident(x, y, device="cpu"), num_classes=4, batch_size=25)()
    assert model.training
    assert model[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    logits = model.eval()(x)
    right = logits.argmax(1) == y
    assert evaluation.loss == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-6)
    assert evaluation.accuracy == pytest.approx(right.float().mean().item())
    for c in range(3):
        assert evaluation.per_class[c] == pytest.approx(right[y == c].float().mean().item())
    assert evaluation.per_class[3] != evaluation.per_class[3]  # no example of it


def test_the_model_may_change_before_what_was_found_is_read():
    torch.manual_seed(0)
    x, y, model = torch.randn(60, 5), torch.randint(0, 3, (60,)), nn.Linear(5, 3)
    evaluate = Evaluator(model, Resident(x, y, device="cpu"), num_classes=3)
    first = evaluate()
    evaluate.begin()
    with torch.no_grad():
        model.weight.neg_()
    assert evaluate.read() == first
    assert evaluate() != first
