"""What the arms of the race do, in words."""

from __future__ import annotations

from experiments.fair_clock.arms import LONGEST, Arm
from rholoss.engine import InfoBatch, Plan, RandomShare, Remembered

STATISTICS = {
    "eval": "BatchNorm's running statistics",
    "recent": "BatchNorm's recent statistics",
    "following": "BatchNorm's means as they follow the weights",
    "train": "the candidates' own statistics",
    "rows": "the statistics of some candidates",
}
STALE = {False: "", True: ", one step stale", "ahead": ", by weights that are looked ahead to"}


def about(arm: Arm) -> str:
    """What an arm does, in words."""
    parts = []
    if arm.scores:
        if arm.switch is None:
            until = f"until the target has caught up (at most {LONGEST:.0%} of the steps)"
        else:
            until = "to the end" if arm.switch == 1 else f"for {arm.switch:.0%} of the steps"
        method = {"rho": "RHO-LOSS", "loss": "training loss"}[arm.method]
        scored = STATISTICS[arm.batch_norm] + STALE[arm.overlap]
        parts.append(f"{method} chooses one of {arm.k} {until}, scored with {scored}")
        if arm.shortlist < 1:
            parts.append(f"only the {arm.shortlist:.0%} that promise most are scored")
    if arm.needs_il:
        *rungs, last = map(str, (*arm.rungs, arm.il_epochs))
        epochs = f"{', '.join(rungs)} and {last}" if rungs else last
        parts.append(f"irreducible losses after {epochs} epochs")
    if arm.drop:
        parts.append(f"without the {arm.drop:.0%} of highest irreducible loss")
    if arm.plan is not None:
        parts.append(planned(arm.plan(1.0)))
    return ("; ".join(parts) or "all rows, as they come").replace("%", " %")


def planned(plan: Plan) -> str:
    """What the passes that score nothing leave out."""
    if isinstance(plan, RandomShare):
        if plan.share == 1:
            return "all rows, and their losses are remembered"
        return f"a fresh random {plan.share:.0%} of the rows each pass"
    if isinstance(plan, InfoBatch):
        return f"{plan.prune:.0%} of the rows below the mean loss are left out, the others of them count more"
    assert isinstance(plan, Remembered)
    parts = []
    if plan.filter_from < 1:
        unless = f", if they are more than {plan.least:.0%}" if plan.least else ""
        if plan.measured:
            which = (
                "rows whose label never had more probability than the share of wrong labels, which is "
                "measured,"
            )
        else:
            which = "rows that were never better than chance"
        probation = plan.again and plan.chance is not None
        before = f", before that but for one in {plan.again} each pass" if probation else ""
        parts.append(f"{which} are left out from {plan.filter_from:.0%} on{before}{unless}")
    if plan.skip:
        wrong = "of the labels are wrong" if plan.measured else "are left out"
        unless = f", unless more than {plan.most:.0%} {wrong}" if plan.most < 1 else ""
        parts.append(f"{plan.skip:.0%} of what is learnt is skipped{unless}")
    return ", ".join(parts)
