"""The bench: studies are lists of cells, cells are run by the engine, pages are made of their lines.

A **Cell** (`cell.py`) is one run and nothing but plain values: data set, labels, method, irreducible losses,
model, sizes, seed. A **Study** (`cell.py`) is a name, groups of named arms (an arm is a cell whose seed is
still to be set) and how often each is run. `experiments/studies` has one short file for each, and
`experiments.studies.STUDIES` names them all.

    ARMS = {"uniform": Cell(), "RHO-LOSS": Cell(method="rho", il="small_cnn, clean holdout")}
    STUDY = Study("my_study", "What is asked", seeds=3, groups=(
        Group("clean labels", ARMS, targets=(80, 87.5), paper={"uniform": "79 / NR (87)"}),
    ))

What a cell names is looked up here:
- `problems.DATASETS[cell.dataset]`: a function from the data directory to `problems.Arrays`
- `problems.label_set(...)`: 'clean', 'noise 10 %', 'noise 10 % any', 'structured 50 %', or human labels
- `experiments.models.MODELS[cell.model]`: a function from the number of classes to a module
- `cell.method`: a name of `rholoss.METHODS`, or 'svp' (core-set by the proxy that `il` names)
- `cell.il`: 'none', or '<model>, <from>' with <from> one of `irreducible.SOURCES`

Data that is read file by file has its entry in `streaming.STREAMS` and trains in an ordinary loop.

`run.Bench(root)` makes each of these once; `run.run(bench, cells, out, ...)` trains them side by side and
appends a line for each to `<out>/<study>/runs.jsonl`; `report.write(study, out)` makes its page, and
`html.write_html` one page of all studies to explore. A cell that has a line in any study's file is not run
again: studies share runs.
"""
