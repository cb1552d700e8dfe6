"""Studies: grids of runs over one command, from a YAML file to a table and figures (`python -m pretrain.study FILE`)."""
