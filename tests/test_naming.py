"""Names and hashes of functions."""

import functools
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from rholoss import losses
from rholoss.naming import code_hash, named


def defined(text, name="loss"):
    """A function as a user's module has it."""
    module = {"__name__": "mytask", "F": F}
    exec(text, module)
    return module[name]


PLAIN = "def loss(model, batch):\n    return F.cross_entropy(model(batch[0]), batch[1])"


def test_names():
    assert named("tokens") == named(losses.TASKS["tokens"]) == "tokens"
    assert named(defined(PLAIN)) == "mytask.loss"
    assert named(functools.partial(print, 3)) == "functools.partial(<built-in function print>, 3)"
    assert " at 0x" not in named(functools.partial(defined(PLAIN)))
    assert named(torch.nn.Dropout(0.5)) == "Dropout(p=0.5, inplace=False)"


@pytest.mark.parametrize(
    "other",
    [
        PLAIN + " + 1000",
        PLAIN.replace("[1]", "[2]"),
        PLAIN.replace("cross_entropy", "nll_loss"),
        PLAIN.replace("batch)", "batch, scale=2)"),
        PLAIN.replace("batch)", "batch, *, scale=2)"),
        "def make(scale):\n" + PLAIN.replace("def", "  def").replace("    r", "     r")
        + " * scale\n  return loss\nloss = make(2)",
        "helper = lambda x: x\n" + PLAIN + " + helper(1)",
    ],
)  # fmt: skip
def test_other_code_has_another_hash(other):
    assert code_hash(defined(other)) != code_hash(defined(PLAIN))
    assert code_hash(defined(other)) == code_hash(defined("\n# moved\n" + other))
    changed = other.replace("2)", "3)").replace("x: x", "x: 2 * x")
    if changed != other:
        assert code_hash(defined(changed)) != code_hash(defined(other))


def test_what_is_passed_beforehand_counts():
    loss = defined(PLAIN.replace("batch)", "batch, scale=2)"))
    hashes = {code_hash(f) for f in (loss, *(functools.partial(loss, scale=s) for s in (2, 3)))}
    assert len(hashes) == 3


def test_objects_and_built_ins_have_no_code_to_read():
    for thing in (None, "tokens", print, torch.nn.Identity(), losses.TASKS["tokens"]):
        assert code_hash(thing) is None


def test_functions_that_call_each_other_or_what_is_not_there_yet():
    text = "def loss(n):\n    return n and other(n - 1)\ndef other(n):\n    return loss(n)"
    assert code_hash(defined(text)) != code_hash(defined(text.replace("- 1", "- 2")))

    def early():
        return late()

    assert code_hash(early)

    def late():
        return 1


ELSEWHERE = """
import sys; sys.path.insert(0, sys.argv[1])
from test_naming import defined
from rholoss.naming import code_hash
print(code_hash(defined("def loss(n):\\n    return n in {'a', 'b', 'c', 'd'}")))
"""


def test_the_hash_is_the_same_in_another_process():
    here = code_hash(defined("def loss(n):\n    return n in {'a', 'b', 'c', 'd'}"))
    folder = __file__.rpartition("/")[0]
    told = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == here


def test_constants_that_a_function_reads_are_part_of_what_it_does():
    text = "SMOOTH = {}\ndef loss(model, batch):\n    return SMOOTH * model(batch)"
    assert code_hash(defined(text.format(0.5))) == code_hash(defined(text.format(0.5)))
    assert code_hash(defined(text.format(0.5))) != code_hash(defined(text.format(0.0)))
