"""What cannot be kept is told before anything is fitted or scored: afterwards it would be lost."""

import pytest
from test_il_fit import blobs, quick, small

from rholoss.errors import RholossError
from rholoss.il.score import score_irreducible
from rholoss.indexed import WithIndex


def never(model, batch):
    raise AssertionError("no row is to be looked at")


@pytest.mark.parametrize(
    ("ids", "message"),
    [(range(-1, 29), "negative numbers"), (range(0, 2**40, 2**36), "a table by row number")],
)
@pytest.mark.parametrize("over", [{}, {"ranks": True}])
def test_ids_of_which_no_table_can_be_made_are_told_before_the_work(tmp_path, ids, message, over):
    data = WithIndex(blobs(len(ids), 0), ids=list(ids))
    with pytest.raises(RholossError, match=message):
        quick(small, blobs(30, 1), score=data, loss=never, out=tmp_path / "il", **over)
    with pytest.raises(RholossError, match=message):
        score_irreducible(small(), data, loss=never, out=tmp_path / "il", progress=False, **over)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "half of it"}, "`split` is 'half of it'; give a dict"),
        ({"seconds": float("nan")}, "`seconds` is nan; give a number of at least 0"),
        ({"seconds": -5}, "`seconds` is -5; give a number of at least 0"),
    ],
)
def test_what_meta_cannot_hold_is_told_before_the_work(options, message):
    with pytest.raises(RholossError, match=message):
        score_irreducible(small(), blobs(30, 0), loss=never, progress=False, **options)
