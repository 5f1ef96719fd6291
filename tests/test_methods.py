import dataclasses

import pytest

import rholoss as rho
from rholoss import methods, picks
from rholoss.errors import RholossError


def test_the_table_has_every_method_of_the_paper_under_its_own_name():
    assert list(rho.METHODS) == [
        "uniform",
        "loss",
        "grad_norm",
        "grad_norm_is",
        "negative_il",
        "rho",
        "entropy",
        "conditional_entropy",
        "bald",
        "loss_minus_conditional_entropy",
    ]
    assert all(method.name == name for name, method in rho.METHODS.items())


def test_by_name_takes_a_name_or_a_method():
    assert methods.by_name("rho") is rho.METHODS["rho"]
    mine = rho.boltzmann("loss")
    assert methods.by_name(mine) is mine


def test_what_a_method_needs_is_a_set_of_names():
    base = rho.METHODS["rho"]
    listed = dataclasses.replace(base, needs=["irreducible_loss", "loss"])
    assert methods.by_name(listed).needs == base.needs
    with pytest.raises(
        RholossError, match=r"`needs` of the method 'rho' is 'loss'; give the names"
    ):
        methods.by_name(dataclasses.replace(base, needs="loss"))


def test_an_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(RholossError, match=r"`method` is 'rhoo'.*uniform, loss,.*`rholoss.Method`"):
        methods.by_name("rhoo")


def test_boltzmann_changes_the_pick_alone():
    soft = rho.boltzmann("bald", temperature=0.25, replacement=True)
    base = rho.METHODS["bald"]
    assert soft.name == "boltzmann_bald"
    assert (soft.score, soft.needs) == (base.score, base.needs)
    assert soft.pick == picks.SoftmaxSample(0.25, replacement=True)
    assert rho.boltzmann().score is rho.METHODS["rho"].score
    assert not rho.boltzmann().pick.replacement


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_cannot_be_used(temperature):
    with pytest.raises(RholossError, match=rf"`temperature` must be above 0 .*is {temperature};"):
        rho.boltzmann("rho", temperature=temperature)
