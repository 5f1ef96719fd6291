"""The errors that callers may want to catch. All of them are `ValueError`s."""


class RholossError(ValueError):
    """Something given to rholoss cannot be used; the message says what to do next."""


class UnmeasuredLossError(RholossError):
    """A candidate has no (finite) irreducible loss, so it cannot be scored."""


class TooFewFiniteScoresError(RholossError):
    """Fewer candidates have a finite score than are to be selected."""


class StoreError(RholossError):
    """A directory is not a store of irreducible losses that this version can read."""


class IdentityMismatchError(RholossError):
    """The data set is not the one whose irreducible losses are in the store."""
