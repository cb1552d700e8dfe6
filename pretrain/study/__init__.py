"""Studies: a YAML file, a grid of runs, a table and figures (`python -m pretrain.study FILE`)."""
