"""The theorems of section 4 made visible: `python -m moa.theory`.

Theorem 4.1 says that, at equal width, Type-I LA networks contain every fixed-activation network and MoA networks
contain LA ones, strictly, in the norm of W^{1,inf}; theorem 4.2 says the same of the quadratic Type-II networks. For
each separating target this package

- writes down the network that equals it (`constructions`),
- fits networks of every class and several widths to it (`networks`, `fitting`, `search`, `pool`),
- measures what remains, in value and gradient (`targets`, `sobolev`),
- and tells it as a table, a JSON file and a figure (`report`, `figure`).
"""
