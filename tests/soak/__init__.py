"""Training under fire: `python -m tests.soak`. It takes half an hour, so it is a command and no test."""
