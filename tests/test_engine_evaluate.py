import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rholoss.engine import Evaluator, Resident
from rholoss.errors import RholossError


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


def test_what_cannot_be_evaluated_is_told_at_once():
    data = Resident(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]), device="cpu")
    with pytest.raises(RholossError, match="`num_classes` is 1, but the data has labels up to 1"):
        Evaluator(nn.Linear(3, 1), data, num_classes=1)
    with pytest.raises(RholossError, match="`precision` is 'int8'; choose one of"):
        Evaluator(nn.Linear(3, 2), data, num_classes=2, precision="int8")


def test_labels_of_any_kind_of_whole_number():
    torch.manual_seed(0)
    x, y, model = torch.randn(60, 5), torch.randint(0, 2, (60,)), nn.Linear(5, 2)
    found = [
        Evaluator(model, Resident(x, y.to(kind), device="cpu"), num_classes=2)()
        for kind in (torch.int64, torch.uint8, torch.bool)
    ]
    assert found[0] == found[1] == found[2]


def test_what_is_no_resident_data_is_told():
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(RholossError, match="`data` is a TensorDataset; make a `Resident"):
        Evaluator(nn.Linear(3, 2), data, num_classes=2)


def test_an_autocast_block_around_it_does_not_round_the_sums():
    torch.manual_seed(0)
    x, y, model = torch.randn(999, 5), torch.randint(0, 2, (999,)), nn.Linear(5, 2)
    evaluate = Evaluator(model, Resident(x, y, device="cpu"), num_classes=2)
    with torch.autocast("cpu", torch.bfloat16):
        evaluation, logits = evaluate(), model(x).float()
    right = logits.argmax(1) == y
    assert evaluation.accuracy == pytest.approx(right.double().mean().item(), abs=1e-9)
    assert evaluation.loss == pytest.approx(F.cross_entropy(logits, y).item(), abs=1e-6)
    assert evaluation.per_class[1] == pytest.approx(right[y == 1].double().mean().item(), abs=1e-9)
