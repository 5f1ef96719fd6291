import pytest
import torch

from rholoss.engine.order import Order
from rholoss.errors import RholossError


def test_batches_come_in_order_and_the_rest_is_dropped():
    order = Order(10, 3, torch.device("cpu"))
    order.deal(torch.arange(10).flip(0))
    assert order.left == 3
    assert [order.next().tolist() for _ in range(3)] == [[9, 8, 7], [6, 5, 4], [3, 2, 1]]


def test_a_shorter_epoch_uses_the_same_buffer():
    order = Order(10, 3, torch.device("cpu"))
    order.deal(torch.arange(10))
    order.next()
    order.deal(torch.tensor([5, 6, 7, 8]))
    assert order.left == 1
    assert order.next().tolist() == [5, 6, 7]


def test_it_goes_on_in_the_epoch():
    order, resumed = (Order(10, 3, torch.device("cpu")) for _ in range(2))
    order.deal(torch.arange(10))
    order.next()
    order.left -= 1
    resumed.load_state_dict(order.state_dict())
    assert resumed.left == 2
    assert resumed.next().tolist() == [3, 4, 5]


def test_the_host_knows_what_comes_next_after_a_resume_too():
    order, resumed = (Order(10, 3, torch.device("cpu")) for _ in range(2))
    assert order.coming() is None
    order.deal(torch.arange(7))  # an epoch that does not fill the buffer
    assert (order.capacity, order.left) == (3, 2)
    assert order.coming().tolist() == [0, 1, 2]
    order.next()
    order.left -= 1
    state = order.state_dict()
    order.next()  # what is saved is not moved by what follows
    resumed.load_state_dict(state)
    assert order.coming().tolist() == resumed.coming().tolist() == [3, 4, 5]
    assert resumed.next().tolist() == [3, 4, 5]
    resumed.left -= 1
    assert resumed.coming() is None


def test_too_few_rows():
    with pytest.raises(
        RholossError, match="Only 2 rows are left to train on, fewer than one batch of 3"
    ):
        Order(10, 3, torch.device("cpu")).deal(torch.arange(2))
