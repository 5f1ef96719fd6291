"""Result lines of the fair race, made by hand."""

from experiments.fair_clock.arms import Cell


def line(arm="uniform", accuracy=90.0, seed=0, **others):
    cell = Cell(
        **{"labels": "clean", "n_b": 128, "lr": 1e-3, "split": "tune", **others}, arm=arm, seed=seed
    )
    about = {"device": "a GPU", "torch": "2", "date": "today", "command": "python", "error": None}
    return {**cell.__dict__, "accuracy": accuracy, **about}
