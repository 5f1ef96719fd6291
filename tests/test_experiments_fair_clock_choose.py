"""Which batch size and rate an arm of the fair race takes: chosen on validation points alone."""

from fixtures_race import line

from experiments.fair_clock.arms import Cell
from experiments.fair_clock.choose import choice_for, tuned


def test_the_best_on_the_validation_points_is_chosen_for_each_arm():
    lines = [
        line(accuracy=90, lr=1e-3),
        line(accuracy=91, lr=3e-3, seed=0),
        line(accuracy=93, lr=3e-3, seed=1),
        line(accuracy=91.5, lr=6e-3),
        line(accuracy=99, lr=6e-3, split="final"),  # the test set chooses nothing
        line(accuracy=10, lr=6e-3) | {"error": "diverged"},
        line("InfoBatch", accuracy=80, n_b=512),
        line(accuracy=70, n_b=32, lr=1e-3),
    ]
    best = tuned(lines)
    assert choice(best) == (128, 3e-3)
    assert choice(best, arm="InfoBatch") == (512, 1e-3)
    assert choice(best, arm="rho k=5") == (128, 3e-3)  # uniform's
    assert choice(best, labels="worse") is None
    assert choice(tuned(lines, n_b=32)) == (32, 1e-3)
    assert choice(tuned(lines, rates=[1e-3])) == (128, 1e-3)


def choice(best, labels="clean", arm="uniform", **others):
    return choice_for(best, Cell(labels, arm, 0, 0.0, 0, "final", **others))


def test_a_race_is_tuned_by_itself_where_it_was():
    lines = [
        line(accuracy=90, lr=1e-3),
        line(accuracy=99, lr=6e-3, budget=60.0),
        line(accuracy=99, lr=3e-3, part="half"),
        line("rho k=5", accuracy=99, lr=6e-3, il="reused"),
        line("rho k=5", accuracy=80, lr=3e-3),
    ]
    best = tuned(lines)
    assert choice(best) == (128, 1e-3)
    assert choice(best, budget=60.0) == (128, 6e-3)
    assert choice(best, arm="annealed", budget=60.0) == (128, 6e-3)  # uniform's, of this race
    assert choice(best, part="half") == (128, 3e-3)
    assert choice(best, budget=11.33) == (128, 1e-3)
    assert choice(best, arm="rho k=5") == (128, 3e-3)  # where the IL was paid for
    assert choice(best, dataset="cifar100") is None
